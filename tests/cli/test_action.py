"""action.yml: what its steps do, their shell run in a scratch repository with a stand-in for `gh`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainledger.answers.pages.budget import COMMENT
from trainledger.cli import main

pytestmark = pytest.mark.process

ACTION = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())
RUN = """
[model]
preset = "llama-3-8b"
[recipe]
seq_len = 4096
global_batch = 8
micro_batch = 1
steps = 10
precision = "bf16-sharded"
[layout]
shard = 8
[cluster]
device = "h100-sxm"
count = 8
"""
GH = """#!/usr/bin/env bash
if [[ " $* " == *" --paginate "* ]]; then cat "$GH_FOUND"; exit 0; fi
printf '%s\\n' "$*" >> "$GH_CALLS"
exit "${GH_CODE:-0}"
"""


class Job:
    """A job of GitHub's that has come to the action."""

    def __init__(self, folder: Path) -> None:
        self.root, self.temp = folder / "repository", folder / "temp"
        for each in (self.root, self.temp, folder / "bin"):
            each.mkdir()
        (folder / "bin" / "gh").write_text(GH)
        (folder / "bin" / "gh").chmod(0o755)
        subprocess.run(["git", "init", "-q"], cwd=self.root, check=True)
        self.calls, self.found = folder / "calls", folder / "found"
        self.output, self.summary = folder / "output", folder / "summary"
        for file in (self.calls, self.found, self.output, self.summary):
            file.write_text("")
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = os.environ | {
            "PATH": path, "RUNNER_TEMP": str(self.temp), "GITHUB_OUTPUT": str(self.output),
            "GITHUB_STEP_SUMMARY": str(self.summary), "GITHUB_REPOSITORY": "someone/project",
            "GH_CALLS": str(self.calls), "GH_FOUND": str(self.found),
        }  # fmt: skip

    def run(self, event: str = "pull_request", **inputs: str) -> int:
        """All steps but the installation; the exit code of the job."""
        given = {name: str(about["default"]) for name, about in ACTION["inputs"].items()} | inputs
        known = {f"inputs.{name}": value for name, value in given.items()}
        known |= {"github.event_name": event, "github.event.pull_request.number": "7", "github.token": "secret"}

        def filled(text: str) -> str:
            outputs = dict(line.split("=") for line in self.output.read_text().splitlines())
            values = known | {f"steps.check.outputs.{name}": value for name, value in outputs.items()}
            return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values[match[1]], text)

        def wanted(condition: str) -> bool:
            parts = (part.split(" == ") for part in condition.split(" && "))
            return all(known[left] == right.strip("'") for left, right in parts)

        self.output.write_text("")
        for step in ACTION["runs"]["steps"]:
            if step["name"] == "install" or ("if" in step and not wanted(step["if"])):
                continue
            env = {name: filled(value) for name, value in step.get("env", {}).items()}
            folder = self.root / filled(step.get("working-directory", "."))
            shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
            done = subprocess.run(shell, cwd=folder, env=self.env | env, capture_output=True, text=True, check=False)
            self.said = done.stdout + done.stderr
            if done.returncode:
                return done.returncode
        return 0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job(tmp_path)
    monkeypatch.chdir(made.root)
    (made.root / "run.toml").write_text(RUN)
    assert main(["lock"]) == 0
    return made


def test_every_step_says_its_shell_and_every_input_what_it_is() -> None:
    assert ACTION["runs"]["using"] == "composite"
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        # What a pull request can name must not become code of the shell.
        assert "${{" not in step["run"]
    for about in ACTION["inputs"].values():
        assert about["description"]
        assert isinstance(about["default"], str)


def test_a_change_that_costs_more_is_a_comment_and_fails(job: Job) -> None:
    (job.root / "run.toml").write_text(RUN.replace("seq_len = 4096", "seq_len = 4608"))
    assert main(["check", "--json"]) == 1
    assert job.run() == 1
    comment = (job.temp / "trainledger.md").read_text()
    assert comment == job.summary.read_text()
    assert comment.startswith(f"{COMMENT}\n**trainledger check**: 1 of 1 target not as locked\n")
    line = next(line for line in comment.splitlines() if line.startswith("- "))
    said = r"- `run.toml`: \+[\d.]+ GB at the peak \(\+[\d.]+ %\), \+[\d.]+ % FLOPs of a step, kept moved, "
    assert re.fullmatch(
        said + r"still fits \(chance (over )?\d+ %\) on 8 x h100-sxm, a step takes .* \(predicted\)", line
    ), line
    assert "kept +" in comment
    assert job.calls.read_text().splitlines() == [
        f"api --silent --method POST repos/someone/project/issues/7/comments -F body=@{job.temp}/trainledger.md"
    ]


def test_the_comment_has_the_figures_of_the_check(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    (job.root / "run.toml").write_text(RUN.replace("seq_len = 4096", "seq_len = 2048"))
    capsys.readouterr()
    assert main(["check", "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    peak = next(row for row in target["rows"] if row["quantity"] == "peak" and not row["part"])
    assert job.run() == 0
    comment = (job.temp / "trainledger.md").read_text()
    assert f"{peak['change'] / 1e9:.4g} GB at the peak" in comment
    assert f"({100 * peak['change'] / peak['locked']:+.1f} %)" in comment
    assert target["outlook"] in comment


def test_a_later_check_replaces_its_comment_and_nothing_else_is_said_of_a_push(job: Job) -> None:
    job.found.write_text("41\n42\n")
    assert job.run() == 0
    assert "- `run.toml`: as locked, still fits" in (job.temp / "trainledger.md").read_text()
    assert "--method PATCH repos/someone/project/issues/comments/42 " in job.calls.read_text()
    job.calls.write_text("")
    assert job.run("push") == 0
    assert job.run(comment="false") == 0
    assert job.calls.read_text() == ""


def test_without_a_right_to_comment_the_verdict_stays(job: Job) -> None:
    job.env["GH_CODE"] = "1"
    assert job.run() == 0


def test_a_lock_that_is_missing_is_code_2_without_a_comment(job: Job) -> None:
    (job.temp / "trainledger.md").write_text("of an earlier job")
    (job.root / "trainledger.lock").unlink()
    assert job.run() == 2
    assert not (job.temp / "trainledger.md").exists()
    assert job.calls.read_text() == ""


def test_targets_and_options_are_words(job: Job) -> None:
    (job.root / "run.toml").write_text(RUN.replace("seq_len = 4096", "seq_len = 2048"))
    assert job.run(targets="run.toml", options="--tight") == 1
    assert job.run(targets="run.toml", options="--tight --allow kept=99% --allow flops=99%") == 1
    assert job.run(targets="$(touch hacked) *", options="") == 2
    assert not (job.root / "hacked").exists()
