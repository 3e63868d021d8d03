"""Files of a run directory, of a store of tokens and of a lock: flipped, cut, emptied, replaced; every verb answers."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

import trainledger as tl
from trainledger.cli import main

RUN = """
[model]
vocab_size = 512
d_model = 32
n_layers = 1
attention.n_heads = 2
feed_forward.d_ff = 64
max_seq_len = 32
[recipe]
seq_len = 32
global_batch = 2
steps = 4
checkpoints.every = 2
[data]
path = "text.txt"
validation_fraction = 0.1
"""
VERBS = {
    "runs/one": [
        "runs --dir runs", "reconcile runs/one", "reconcile runs/one --html out.html", "sample runs/one --tokens 4",
        "train run.toml --dir runs --resume", "evaluate runs/one", "export runs/one out", "reconcile --update runs/one",
    ],
    "runs/mine": ["runs --dir runs", "reconcile runs/mine", "reconcile runs/mine --html out.html"],
    "cache": ["data run.toml", "data run.toml --verify", "data run.toml --show", "train run.toml --dir new"],
    "trainledger.lock": ["check", "check --tight", "lock"],
}  # fmt: skip
KINDS = ("flip", "cut", "empty", "grow", "gone", "fifo", "directory", "value")
ODD = ["null", "NaN", "-1", "1e400", "[]", "{}", '"x"', "true", "9" * 400, '"\\u0000"', "[[[[]]]]", "0"]
SECONDS = 60


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, before = tmp_path_factory.mktemp("base"), Path.cwd()
    os.chdir(folder)
    Path("text.txt").write_text("some words of a text that repeats. " * 2000)
    Path("run.toml").write_text(RUN)
    assert main(["train", "run.toml", "--dir", "runs"]) == 0
    (run,) = Path("runs").iterdir()
    run.rename("runs/one")
    model, x = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 8)), torch.randint(0, 64, (2, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    traced = tl.trace(model, x, loss="mean", optimizer=optimizer)
    with tl.meter_loop(model, optimizer, "runs/mine", forecast=traced, deep=2):
        for _ in range(5):
            model(x).mean().backward()
            optimizer.step()
    assert main(["lock", "run.toml"]) == 0
    os.chdir(before)
    return folder


def changed(path: Path, kind: str, drawn: random.Random) -> None:
    content = path.read_bytes()
    at = drawn.randrange(len(content) + 1)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind != "gone":
        flipped = (
            content[:at] + bytes(byte ^ 1 << drawn.randrange(8) for byte in content[at : at + 1]) + content[at + 1 :]
        )
        grown = content + drawn.choice([b"\0" * 100, b"{}\n", content, b"NaN\n", b"[1,2"])
        path.write_bytes({"flip": flipped, "cut": content[:at], "empty": b"", "grow": grown}.get(kind, content))
    if kind == "value":
        text = content.decode(errors="replace")
        values = list(re.finditer(r'(?<=[:=\[,])\s*("[^"\n]*"|-?\d[\d.e+-]*|true|false|null)', text))
        value = drawn.choice(values) if values else None
        path.write_text(text if value is None else text[: value.start(1)] + drawn.choice(ODD) + text[value.end(1) :])


def late(*_: object) -> NoReturn:
    raise TimeoutError("a verb waits")


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", VERBS)
def test_no_damaged_file_is_a_traceback_or_waited_for(
    place: str,
    kind: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = random.Random(f"{place} {kind}")
    files = [path for path in sorted(base.rglob("*")) if path.is_file() and path.name != "lock"]
    files = [path for path in files if path.relative_to(base).as_posix().startswith(place)]
    before = signal.signal(signal.SIGALRM, late)
    try:
        cases = [(verb, drawn.choice(files)) for verb in VERBS[place]]
        if (place, kind) == ("cache", "fifo"):  # which `train` waited for
            cases += [("train run.toml --dir new", path) for path in files]
        for number, (verb, path) in enumerate(cases):
            folder = shutil.copytree(base, tmp_path / f"{number}")
            monkeypatch.chdir(folder)
            changed(folder / path.relative_to(base), kind, drawn)
            signal.alarm(SECONDS)
            code = main(verb.split())
            signal.alarm(0)
            captured = capsys.readouterr()
            assert code in range(7), (verb, path, captured.err)
            assert code == 0 or captured.err or captured.out, (verb, path)
            assert "Traceback" not in captured.err, (verb, path, captured.err)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
