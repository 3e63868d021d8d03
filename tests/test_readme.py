"""The README runs: its Python as it stands, and what it prints of napkin and plan is what they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trainledger.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_section_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "run.toml"]) == 0
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    rows = [line.rsplit(" ", 3) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["parameters", "FLOPs per step", "kept for backward", "peak memory"]
    assert all(predicted == measured for _, predicted, measured, _ in rows)


def test_every_line_it_shows_of_a_command_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"    \$ \.venv/bin/trainledger (.*)\n((?:    .*\n|\n)*)", README.replace("\\\n", " "))
    assert [command.split()[0] for command, _ in shown] == ["napkin", "plan", "plan", "trace", "explain"]
    for command, said in shown:
        assert main(shlex.split(command)) == 0
        printed = capsys.readouterr().out.splitlines()
        lines = [line.removeprefix("    ") for line in said.splitlines() if line.strip() and line.strip() != "..."]
        assert len(lines) > 0
        for line in lines:
            assert line in printed, line
