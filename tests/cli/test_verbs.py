"""What all verbs share: their help, their output for programs, and hostile arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.cli import main
from trainledger.cli.arguments import parser_of
from trainledger.cli.command_line import COMMANDS, question_named

HOSTILE = [
    ["plan", "adir"], ["plan", "torn.toml"], ["plan", "bytes.toml"], ["plan", "torn.json"], ["plan", "list.json"],
    ["plan", ""],
    ["plan", "gpt2", "--set"], ["plan", "gpt2", "--set", "x"], ["plan", "gpt2", "--set", "recipe.stepz=1"],
    ["plan", "gpt2", "--set", "=3"], ["plan", "gpt2", "--device", ""], ["plan", "gpt2", "--count", "many"],
    ["plan", "gpt2", "--phase", "decoding"], ["plan", "gpt2", "and", "more"], ["plan", "gpt2", "--plot", "adir"],
    ["explain"], ["explain", "speed", "gpt2"], ["explain", "memory", "gpt2", "--symbolic", "Z"], ["compare", "gpt2"],
    ["layouts", "gpt2", "--device", "h100", "--fix", "foo"], ["optimal"], ["optimal", "--flops", "much"], ["napkin"],
    ["catalog", "nothing"], ["catalog", ""], ["trace", "gpt2", "--by", "colour"], ["lock", "--lock", "adir", "gpt2"],
    ["check"], ["check", "--lock", "adir"], ["dtype", "foo"], ["tensor", "foo"], ["einsum", "foo"], ["data"],
    ["measure", "matmul", "--shapes", "10x"], ["measure", "matmul", "--shapes", "0x1x1"],
    ["measure", "matmul", "--sweep", "depth"], ["measure", "matmul", "--shapes", "1x1x1", "--sweep", "batch"],
    ["measure", "matmul", "--dtype", "fp23"], ["measure", "copy", "--dir", "nothing"],
    ["measure", "loader", "nothing.toml"], ["measure", "loader", "--set", "recipe.seq_len=8"],
    ["measure", "collectives", "--ranks", "1"], ["measure", "collectives", "--backend", "mpi"],
    ["train", "nothing.toml"], ["measure"], ["measure", "me"], ["measure", "step"], ["reconcile", "nothing"],
    ["reconcile", "adir"], ["runs", "--dir", "nothing"], ["init", "adir"], ["pland", "gpt2"], ["--fast"],
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    Path("adir").mkdir()
    Path("torn.toml").write_text("[model\n")
    Path("bytes.toml").write_bytes(bytes(range(256)))
    Path("torn.json").write_text('{"model_type":')
    Path("list.json").write_text("[1, 2]")


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_help_fits_80_columns_and_names_the_exit_codes(verb: str) -> None:
    text = parser_of(verb, question_named(verb)).format_help()
    assert max(map(len, text.splitlines())) <= 80
    assert "--json" in text
    assert "Exit codes: 0 done, 1 failed, 2 wrong input or a run that cannot run" in " ".join(text.split())


@pytest.mark.parametrize("words", HOSTILE, ids=" ".join)
def test_hostile_arguments_are_a_sentence_and_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip()
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"][0]["sentence"]


def test_a_plan_that_cannot_run_tells_programs_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--device", "h100-sxm", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["forecast"]["fits"] is False
    assert [each["field"] for each in found["error"]] == ["memory"]


def test_a_served_batch_that_does_not_fit_names_the_largest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2", "--phase", "decode", "--device", "t4"]
    assert main([*words, "--batch", "10k"]) == 2
    *_, near = capsys.readouterr().err.split()
    assert main([*words, "--batch", near]) == 0
    assert main([*words, "--batch", str(int(near) + 1)]) == 2


@pytest.mark.parametrize("verb", ["measure"])
def test_a_verb_of_two_words_is_named_whole(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trainledger measure is one of: measure machine, measure ")
    assert all(each in said for each in COMMANDS if each.startswith("measure "))
    assert main([verb, "--help"]) == 0
    assert "trainledger measure step " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["plan", "gpt2", "--device", "h100-sxm"], ["catalog"], ["--help"]])
def test_a_narrow_terminal_is_no_traceback(words: list[str]) -> None:
    environment = {**os.environ, "COLUMNS": "40"}
    command = [sys.executable, "-m", "trainledger", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
