"""How quickly the token store gives batches: ``python bench/loader.py [--mebibytes 256] [--json OUT]``.

A store of random tokens; batches are gathered from it at random places as training does, and as many bytes are copied
from array to array, in turns for 20 s. The pages of the store are in memory: a disk is not timed. Printed: medians of
the turns that nothing disturbed, tokens per second, and the ratio of a batch as the model takes it (inputs and targets,
int64) and of its rows as they are stored to copies of the same bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path
from statistics import median

import numpy as np

from trainledger.engine.data import prepare, train_batch
from trainledger.engine.data.loader import halves
from trainledger.engine.data.store import Tokens
from trainledger.observe.measure.hardware import Pace, Sample, watched
from trainledger.spec.run import DataSpec
from trainledger.spec.units import MIB

SECONDS, SEQ_LEN, GLOBAL_BATCH = 20, 1024, 256


def corpus(folder: Path, nbytes: int) -> DataSpec:
    """Documents of random letters."""
    drawn = np.random.default_rng(0)
    for number in range(16):
        letters = drawn.integers(97, 123, nbytes // 16, dtype=np.uint8)
        letters[::80] = 10  # line ends
        (folder / f"{number}.txt").write_bytes(letters.tobytes())
    return DataSpec(path=(str(folder / "*.txt"),), cache=str(folder / "cache"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of text (256)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = prepare(corpus(Path(name), args.mebibytes * MIB), vocab_size=None, progress=True)
        store.train.read(0, store.train.tokens)  # every page in memory, every block verified
        tokens = GLOBAL_BATCH * SEQ_LEN
        stored, wide = np.zeros(tokens, dtype=store.train.dtype), np.zeros(2 * tokens, dtype=np.int64)
        into = {each.dtype: np.empty_like(each) for each in (stored, wide)}

        def rows(step: int) -> Tokens:
            return train_batch(store, seed=0, step=step, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN)

        works: dict[str, Callable[[int], object]] = {
            "batch": lambda step: halves(rows(step)),
            "copy of the batch": lambda step: np.copyto(into[wide.dtype], wide),
            "rows": rows,
            "copy of the rows": lambda step: np.copyto(into[stored.dtype], stored),
        }
        pace = Pace()
        samples: dict[str, list[Sample]] = {each: [] for each in works}
        began = time.perf_counter()
        for step in takewhile(lambda _: time.perf_counter() - began < SECONDS, count()):
            for name_of_work, work in works.items():
                with watched(threads=1, pace=pace) as sample:
                    work(step)
                samples[name_of_work].append(sample)
    undisturbed = {name: [each.seconds for each in found if not each.disturbed] for name, found in samples.items()}
    if not all(undisturbed.values()):
        raise SystemExit("every turn was disturbed: other processes, or a processor below its full speed")
    medians = {each: median(found) for each, found in undisturbed.items()}
    print(f"{'':<18} {'median':>8}       tokens/s   times the copy")
    for each, found in medians.items():
        ratio = found / medians.get(f"copy of the {each}", found)
        print(f"{each:<18} {1000 * found:8.3f} ms {tokens / found:13,.0f} {ratio:16.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"seconds": medians, "tokens": tokens}))


if __name__ == "__main__":
    main()
