"""How a verb ends that was interrupted, whose disk is full, or that was asked for what cannot be."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.cli import asking, main
from trainledger.ledger.core.graph import Memory

SMALL = ["layouts", "gpt2", "--device", "a100-sxm-80gb", "--count", "4", "--set", "recipe.global_batch=8"]


def stopped(monkeypatch: pytest.MonkeyPatch, what: str, done: int) -> None:
    """Have a search get the signal of Ctrl-C where it has come so far."""

    def progress(now: str, so_far: int, of: int) -> None:
        if (now, so_far) == (what, done):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(asking, "while_searching", lambda: progress)


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_layouts_that_were_interrupted_are_ranked_and_code_130(monkeypatch, capsys, json_too):
    stopped(monkeypatch, "accounts", 2)
    assert main([*SMALL, *json_too]) == 130
    out = capsys.readouterr().out
    if json_too:
        answer = json.loads(out)
        assert answer["interrupted"] is True
        assert len(answer["ranked"]) == 2
    else:
        assert out.startswith("Interrupted: what was accounted for so far is ranked. Quickest: FSDP 4, ")


def test_layouts_that_were_interrupted_before_there_were_any_are_code_130(monkeypatch, capsys):
    stopped(monkeypatch, "accounts", 0)
    assert main(SMALL) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted\n")


def test_a_whole_search_is_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    assert "nterrupted" not in capsys.readouterr().out


def test_memory_whose_making_was_interrupted_goes_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    del [Memory.__new__(Memory)][0]
    assert heard == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["--version"], ["catalog", "--json"], ["plan", "gpt2"], ["plan", "gpt2", "--json"]])
def test_a_full_disk_is_one_line_and_code_4(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "trainledger", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 4
    *before, last = done.stderr.splitlines()
    assert "the disk is full: the output cannot be written (No space left on device)" in last
    assert not before or before[0].startswith("Assuming ")


@pytest.mark.parametrize(("number", "code"), [("ENOSPC", 4), ("EDQUOT", 4), ("EIO", 2), ("ENOENT", 2)])
def test_a_run_file_that_cannot_be_written_is_named(monkeypatch, capsys, tmp_path, number, code):
    import errno

    def refuse(draft: str, path: str) -> None:
        why = getattr(errno, number)
        raise OSError(why, os.strerror(why), draft)

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "x.toml"
    assert main(["init", str(path)]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert ".new" not in err
    assert "cannot be written" in err
    assert "x.toml" in err or "..." in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc here")
@pytest.mark.parametrize("words", [["init", "/proc/x.toml"], ["plan", "gpt2", "--plot", "/proc/x.html"]])
def test_where_the_system_takes_no_file_the_file_is_named(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"= '{words[-1]}': cannot be written: " in err


def test_what_needs_more_than_the_peak_is_impossible_first_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["napkin", "--params", "70B", "--tokens", "15T", "--device", "a100-sxm-80gb", "--count", "100"]
    assert main([*words, "--days", "88"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("Impossible: it needs 2655.8 % of the peak. 70B parameters, 15T tokens,")
    assert out.count("Impossible") == 1
    near = "nearest that works: 3689, at 72.0 % MFU\n"
    assert err == f"count = 100: these parameters, tokens and days need 2655.8 % of the peak of the devices; {near}"
    assert main([*words, "--days", "88", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"][0]["field"] == "count"
    words[-1] = "3689"
    assert main([*words, "--days", "88"]) == 0
    assert "72.0 % MFU" in capsys.readouterr().out


def test_a_list_of_what_is_wrong_keeps_its_indent_on_every_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").write_text("")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["plan", "empty.toml"]) == 2
    first, *lines = capsys.readouterr().err.replace("\r\x1b[K", "").splitlines()
    assert first == "empty.toml:"
    assert len(lines) > 9, "a line was long enough to be broken"
    assert all(each.startswith("  ") and len(each) <= 80 for each in lines)


def test_a_model_that_is_nowhere_is_one_line(monkeypatch, capsys, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "runs/none"]) == 2
    assert capsys.readouterr().err == "runs/none: is not a directory; trainledger runs lists those of runs\n"


def test_the_note_behind_a_long_name_of_a_figure_has_a_line_of_its_own(tmp_path: Path) -> None:
    from trainledger.report.show import written

    where = str(tmp_path / ("a" * 60 + ".png"))
    names = ["Where 7.366 days go", "Memory of the peak rank over one step (it does NOT fit)"]
    printed = written({where: names[0], f"{where[:-4]}-2.png": names[1]}).splitlines()
    assert printed[::2] == [f"Written to {where}", f"Written to {where[:-4]}-2.png"]
    assert printed[1::2] == [f"({each})" for each in names]
    assert written({"p.svg": "Loss", "p-2.svg": "Time"}) == "Written to p.svg (Loss)\nWritten to p-2.svg (Time)"
    assert written({"p.svg": "Loss"}) == "Written to p.svg"
