"""How quickly the token store gives batches: ``python bench/loader.py [--mebibytes 256] [--json OUT]``.

A store of random tokens; batches are gathered from it at random places as training does, and as many bytes are copied
from array to array beside it, in turns. The pages of the store are in memory: a disk's speed is not the loader's.
Printed: medians of undisturbed turns, tokens per second, and the ratio to the copy of the batch's bytes as they are
stored and as the model takes them (int64).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from trainledger.data import prepare, train_batch
from trainledger.measure.contention import watched
from trainledger.spec.data import DataSpec
from trainledger.units import MIB

ROUNDS, SEQ_LEN, GLOBAL_BATCH = 40, 1024, 256


def corpus(folder: Path, nbytes: int) -> DataSpec:
    """Documents of random letters."""
    drawn = np.random.default_rng(0)
    for number in range(16):
        letters = drawn.integers(97, 123, nbytes // 16, dtype=np.uint8)
        letters[::80] = 10  # line ends
        (folder / f"{number}.txt").write_bytes(letters.tobytes())
    return DataSpec(path=(str(folder / "*.txt"),), cache=str(folder / "cache"))


def timed(work: Callable[[], object]) -> float | None:
    with watched(threads=1) as sample:
        work()
    return None if sample.disturbed else sample.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of text (256)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = prepare(corpus(Path(name), args.mebibytes * MIB), vocab_size=None, progress=True)
        store.train.read(0, store.train.tokens)  # every page in memory, every block verified
        shape = (GLOBAL_BATCH, SEQ_LEN + 1)
        stored, wide = np.zeros(shape, dtype=np.uint16), np.zeros(shape, dtype=np.int64)
        into = {each.dtype: np.empty_like(each) for each in (stored, wide)}
        works: dict[str, Callable[[int], object]] = {
            "batch": lambda step: train_batch(store, seed=0, step=step, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN),
            "copy, stored": lambda step: np.copyto(into[stored.dtype], stored),
            "copy, int64": lambda step: np.copyto(into[wide.dtype], wide),
        }
        seconds: dict[str, list[float]] = {each: [] for each in works}
        for step in range(ROUNDS):
            for name_of_work, work in works.items():
                found = timed(lambda work=work, step=step: work(step))  # type: ignore[misc]
                if found is not None:
                    seconds[name_of_work].append(found)
    if not all(seconds.values()):
        raise SystemExit("every turn was disturbed by other processes")
    medians = {each: median(found) for each, found in seconds.items()}
    print("               median     tokens/s    times the batch")
    for each, found in medians.items():
        print(f"{each:<12} {1000 * found:7.3f} ms {stored.size / found:12,.0f} {medians['batch'] / found:12.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"seconds": medians, "tokens": stored.size}))


if __name__ == "__main__":
    main()
