"""Files that a verb writes where its user says, and never over what it reads, over source, or over one another."""

import json
import os
from pathlib import Path

import pytest

from trainledger.answers.budgets.lockfile import LOCK
from trainledger.cli import main
from trainledger.cli.arguments import Output, parser_of
from trainledger.cli.command_line import COMMANDS, question_named

RUN = """
[model]
config = "config.json"
[recipe]
seq_len = 16
global_batch = 4
steps = 10
[data]
path = "corpus.txt"
"""
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_positions": 16, "n_embd": 8,
    "n_layer": 1, "n_head": 2,
}  # fmt: skip
WRITES = ("-o", "--output", "--plot", "--memory-viz", "--html")
THERE = "exists already, and source and settings are not overwritten"
READ = "is a file that this command reads, and would be overwritten"
NAMED = "is a file that the run file names, and would be overwritten"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "corpus.txt").write_text("a text")
    (tmp_path / "outputs_net.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(4, 4)\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'a'\n")
    (tmp_path / "uv.lock").write_text("version = 1\n")
    (tmp_path / "linked.json").symlink_to("config.json")
    os.link(tmp_path / "run.toml", tmp_path / "hard.json")
    return tmp_path


def contents(project: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in project.iterdir() if each.is_file()}


CODE = ["trace", "outputs_net:build", "--input", "fp32[2,4]", "--loss", "sum"]


@pytest.mark.parametrize(("words", "said"), [
    ([*CODE, "-o", "outputs_net.py"], f"-o = 'outputs_net.py': {THERE}; nearest that works: outputs_net.json.gz"),
    ([*CODE, "--output", "./other.py"], f"--output = './other.py': {THERE}; nearest that works: other.json.gz"),
    ([*CODE, "--memory-viz=pyproject.toml"], f"{THERE}; nearest that works: pyproject.pickle"),
    ([*CODE, "-o", "uv.lock"], f"-o = 'uv.lock': {THERE}; nearest that works: uv.json.gz"),
    ([*CODE, "-o", "a.gz", "--memory-viz", "./a.gz"], "is the name of two output files"),
    (["trace", "run.toml", "-o", "run.toml"], f"-o = 'run.toml': {READ}; nearest that works: run.json.gz"),
    (["trace", "run.toml", "-o", "hard.json"], READ),
    (["trace", "run.toml", "-o", "config.json"], f"{NAMED}; nearest that works: config.json.gz"),
    (["trace", "run.toml", "-o", "linked.json"], NAMED),
    (["trace", "run.toml", "--memory-viz", "corpus.txt"], f"{NAMED}; nearest that works: corpus.pickle"),
    (["trace", "--hf", "config.json", "-o", "config.json"], READ),
    (["trace", "gpt2", "--set", "model.config=config.json", "-o", "config.json"], READ),
    (["plan", "run.toml", "--plot", "run.toml"], f"--plot = 'run.toml': {READ}; nearest that works: run.html"),
    (["compare", "config.json", "run.toml", "--plot", "config.json"], READ),
    (["annotate", "--html", "other.py", "other.py"], f"--html = 'other.py': {READ}; nearest that works: other.html"),
    (["annotate", "--html", "corpus.txt", "other.py", "--data=corpus.txt"], READ),
    (["measure", "step", "run.toml", "--output", "run.toml"], READ),
    (["measure", "machine", "--output", "run.toml"], f"{THERE}; nearest that works: run-2.toml"),
    (["reconcile", ".", "--html", "corpus.txt"], "is a file of ., which this command reads, and would be overwritten"),
    (["lock", "run.toml", "--lock", "run.toml"], f"--lock = 'run.toml': {READ}; nearest that works: run.lock"),
    (["lock", "--lock", "pyproject.toml"], f"{THERE}; nearest that works: pyproject.lock"),
    (["lock", "run.toml", "--lock", "other.py"], THERE),
    (["lock", "run.toml", "--lock", "uv.lock"], "no lock of trainledger's"),
    (["init", "other.py", "--force"], f"path = 'other.py': {THERE}; nearest that works: other.toml"),
    (["init", "pyproject.toml", "--force"], f"{THERE}; nearest that works: pyproject-2.toml"),
])  # fmt: skip
def test_nothing_that_is_needed_is_overwritten(words, said, project, capsys):
    before = contents(project)
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert contents(project) == before


def test_what_was_written_before_is_written_anew(project: Path) -> None:
    for _ in range(2):
        assert main([*CODE, "-o", "traced.json.gz", "--memory-viz", "traced.pickle"]) == 0
        assert main(["lock", "run.toml", "--lock", "mine.toml"]) == 0
        assert main(["init", "new.toml", "--force"]) == 0
    assert main(["check", "--lock", "mine.toml"]) == 0
    assert not (project / LOCK).exists()


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_file_that_a_verb_is_asked_to_write_is_checked(verb: str) -> None:
    for each in parser_of(verb, question_named(verb))._actions:
        if set(WRITES) & set(each.option_strings) or (verb, each.dest) in (("lock", "lock"), ("init", "path")):
            assert isinstance(each, Output)
