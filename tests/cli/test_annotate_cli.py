"""The verb annotate: what goes where, what is refused, and that nothing runs that was not named."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trainledger.cli import main

SOURCE = """
import sys
import torch
print("from the script", *sys.argv[1:])
x = torch.ones(8, 16)
y = x.t().reshape(-1) * 2
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    return file


def test_the_table_stands_beside_the_source(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["annotate", "train.py", "--lr", "3e-4"]) == 0
    out, err = capsys.readouterr()
    assert err == "from the script --lr 3e-4\n"
    assert max(map(len, out.splitlines())) <= 80
    row = next(each for each in out.splitlines() if each.endswith("y = x.t().reshape(-1) * 2"))
    assert row.split()[:8] == ["6", "1", "128", "1.02k", "1.02k", "1.02k", "512", "0.06"]
    assert "^ view (free): t, unsafe_view" in out
    assert "^ copy 512 B: non-contiguous by reshape" in out
    assert "1. train.py:6: hidden copy\n    `x.t().reshape(-1)` copies 512 B, once" in out


def test_json_stays_clean_whatever_the_script_prints(script: Path) -> None:
    script.write_text(
        SOURCE + "import os, subprocess\nos.write(1, b'from below\\n')\nsubprocess.run(['echo', 'child'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "trainledger", "annotate", "--json", "train.py"],
        capture_output=True,
        text=True,
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"from the script", "from below", "child"} <= set(done.stderr.splitlines())
    assert answer["total"]["flops"] == 128
    (file,) = answer["files"]
    lines = {each["number"]: each for each in file["lines"]}
    assert sum(each["own"]["flops"] for each in lines.values()) == 128
    assert lines[6]["marks"][1] == {"kind": "copy", "why": "non-contiguous by reshape", "times": 1, "nbytes": 512}
    assert lines[6]["intensity"] == 128 / (2 * 512 + 2 * 512)
    assert answer["findings"][0]["line"] == "train.py:6"


def test_options_behind_the_script_are_its_own(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["annotate", "--busy", "--shapes", "--width", "120", "train.py", "--fake", "--busy"]) == 0
    out, err = capsys.readouterr()
    assert err == "from the script --fake --busy\n"
    assert "import sys" not in out
    assert "with real values" in out
    assert "^ t (view): fp32[16, 8], stride [1, 16], not contiguous, cpu" in out


def test_source_takes_the_width_there_is(
    script, capsys, monkeypatch
):  # fmt: skip
    long = "x = torch.ones(16, 8) + torch.zeros(16, 8) + torch.full((16, 8), 2.0)"
    script.write_text(f"import torch\n{long}\n")
    shown = {}
    for columns in ("80", "160"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["annotate", "--busy", "train.py"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= int(columns)
        shown[columns] = long in out
    assert shown == {"80": False, "160": True}


@pytest.mark.parametrize(
    ("last", "code", "sentence"),
    [
        ("raise SystemExit(4)", 1, "the script exited with 4"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("", 0, ""),
    ],
)
def test_the_exit_code_says_how_it_ended(
    last, code, sentence, script, capsys
):  # fmt: skip
    script.write_text(SOURCE + last)
    assert main(["annotate", "train.py"]) == code
    out = capsys.readouterr().out
    assert "x.t().reshape(-1)" in out
    assert sentence in " ".join(out.split())
    assert main(["annotate", "--json", "train.py"]) == code
    assert sentence in json.loads(capsys.readouterr().out)["ended"]


def test_options_of_ours_behind_a_script_that_fails_are_reported(script, capsys):
    own = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    script.write_text(own)
    assert main(["annotate", "train.py", "--fake", "--steps=2", "--lr"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "--fake, --steps came after the script's name and went to the script;" in out
    assert "trainledger annotate [options] SCRIPT [ARGS ...]" in out
    assert "No findings: it ended before anything was done to a tensor." in out
    assert main(["annotate", "train.py", "--lr", "1"]) == 1
    assert "came after" not in capsys.readouterr().out
    script.write_text("")
    assert main(["annotate", "train.py", "--fake"]) == 0
    assert "came after" not in capsys.readouterr().out


def test_a_script_that_misses_a_gpu_gets_a_hint_of_the_device(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import torch\ntorch.ones(2)\ntorch.ones(2).to('cuda')\n")
    assert main(["annotate", "train.py"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "without any with --device cuda" in out
    assert "No findings in what ran before it ended" in out
    assert main(["annotate", "--device", "cuda", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "--device cuda" not in out
    assert "No findings: nothing unnecessary was seen.\n" in out


@pytest.mark.process
def test_interrupted_it_prints_what_there_is(script: Path) -> None:
    script.write_text(SOURCE + "import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.01)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "trainledger", "annotate", "train.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=script.parent,
    )  # fmt: skip
    assert process.stderr is not None
    while process.stderr.readline() != "ready\n":
        assert process.poll() is None
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "1. train.py:6: hidden copy" in out
    assert "This is what ran so far: interrupted at train.py:" in out


def test_a_page_opens_offline(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SOURCE + "z = '<script>alert(1)</script>'\n")
    assert main(["annotate", "--html", "out.html", "train.py"]) == 0
    page = Path("out.html").read_text()
    assert "hidden copy" in page
    assert "y = x.t().reshape(-1) * 2" in page
    assert "<script>" not in page
    assert "wrote out.html" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["missing.py"], "script = 'missing.py': cannot be read: No such file or directory"),
        ([], "the following arguments are required: SCRIPT;"),
        (
            ["--device", "tpu", "train.py"],
            "device = 'tpu': must be one that can be pretended; nearest that works: cuda",
        ),
        (["--steps", "0", "train.py"], "--steps = '0': must be at least 1"),
        (["--steps", "x", "train.py"], "--steps = 'x': is not a count"),
        (["--width", "20", "train.py"], "--width = '20': must be at least 60"),
        (["--html", "no/such/out.html", "train.py"], "--html"),
    ],
)
def test_what_is_wrong_is_reported_before_anything_runs(
    words, sentence, script, capsys
):  # fmt: skip
    assert main(["annotate", *words]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert out == ""
    assert "from the script" not in err


def test_nothing_is_imported_that_was_not_named(script: Path) -> None:
    for name in ("sitecustomize_not", "conftest", "setup", "__init__"):
        (script.parent / f"{name}.py").write_text("raise SystemExit('imported')\n")
    done = subprocess.run(
        [sys.executable, "-m", "trainledger", "annotate", "train.py"], capture_output=True, text=True,
        cwd=script.parent, env=os.environ | {"PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_page_of_what_ended_early_says_so(script: Path) -> None:
    script.write_text(textwrap.dedent(SOURCE) + "1 / 0\n")
    assert main(["annotate", "--html", "out.html", "train.py"]) == 1
    assert "This is what ran so far" in Path("out.html").read_text()
