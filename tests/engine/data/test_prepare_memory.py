"""A gigabyte of text is tokenized in under 500 MB, parent and workers together."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys
from trainledger.engine.data.prepare import prepare
from trainledger.spec.run import DataSpec
store = prepare(DataSpec(path=(sys.argv[1],), cache=sys.argv[2], tokenizer="bpe"), vocab_size=2048, progress=False)
print(store.train.text_nbytes + store.validation.text_nbytes)
"""


def write_text(path: Path, nbytes: int) -> None:
    """Paragraphs of words with the frequencies of a language, in another order every few MB."""
    generator = random.Random(0)
    words = [
        "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(1, 12))) for _ in range(50_000)
    ]
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(words))))
    with path.open("w") as file:
        while file.tell() < nbytes:
            block = [" ".join(generator.choices(words, cum_weights=weights, k=120)) + ".\n\n" for _ in range(400)]
            for part in range(20):
                generator.shuffle(block)
                file.write(f"Part {part} at {file.tell()}.\n\n" + "".join(block))


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                found += tree(int(child))
    except OSError:
        pass  # it has just ended
    return found


def resident_nbytes(pid: int) -> int:
    """The resident memory of a process and its descendants, shared pages counted in each."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def peak_of_preparing(tmp_path: Path, nbytes: int) -> tuple[int, int]:
    """The peak resident bytes of preparing a generated text, and how many processes there were."""
    corpus = tmp_path / "corpus.txt"
    write_text(corpus, nbytes)
    command = [sys.executable, "-c", PROGRAM, str(corpus), str(tmp_path / "cache")]
    peak = most = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak, most = max(peak, resident_nbytes(process.pid)), max(most, len(tree(process.pid)))
            time.sleep(0.05)
        assert process.stdout is not None
        assert int(process.stdout.read()) == corpus.stat().st_size
    return peak, most


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the memory of processes from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peak, processes = peak_of_preparing(tmp_path, 30_000_000)
    assert processes > 1
    assert 30_000_000 < peak < 500_000_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the memory of processes from /proc")
def test_a_gigabyte_takes_under_500_megabytes(tmp_path: Path) -> None:
    peak, processes = peak_of_preparing(tmp_path, 1_000_000_000)
    print(f"peak {peak / 1e6:.0f} MB over {processes} processes")
    assert processes > 1
    assert peak < 500_000_000
