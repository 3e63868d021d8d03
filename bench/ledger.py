"""Accounts per second of the closed form: one run at a time, and arrays of layouts; and how the time grows.

    python bench ledger            # a minute: a million layouts of Llama 3.1 405B among them

CPU seconds of this process on one core; each figure is the median of several runs, interleaved.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from timing import interleaved

from trainledger.answers.load import load
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.ranks import account_of_stage, accounts
from trainledger.ledger.step import account
from trainledger.spec.run import Run

CHUNK = 20_000  # layouts in one pass: the arrays of a pass stay in the processor's cache
MODEL = "llama-3.1-405b"


def run_of(**recipe: Any) -> Run:
    return load({
        "model": {"preset": MODEL},
        "recipe": {"seq_len": 8192, "global_batch": 2048, "micro_batch": 1, "steps": 1, "precision": "bf16-sharded",
                   "activation_checkpointing": "full", **recipe},
        "cluster": {"device": "h100-sxm", "count": 1},
    })  # fmt: skip


def seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def in_turns(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median CPU seconds of each piece of work, one after the other in every round."""
    for work in works.values():
        work()
    return interleaved({name: partial(seconds, work) for name, work in works.items()}, rounds)


def layouts(many: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random layouts: powers of two on each axis, sizes that divide what they must."""
    draw = np.random.default_rng(seed)

    def power(most: int) -> np.ndarray:
        return 2 ** draw.integers(0, most + 1, many)

    return {"replicate": power(3), "shard": power(7), "tensor": power(3), "context": power(4), "micro_batch": power(2)}


def with_layouts(run: Run, pipeline: int, sizes: dict[str, np.ndarray]) -> Run:
    """The run with arrays for the sizes of its layout: what checks single runs is not asked."""
    layout = copy(run.layout)
    vars(layout).update({name: sizes[name] for name in ("replicate", "shard", "tensor", "context")})
    vars(layout).update(pipeline=pipeline, sequence_parallel=True)
    recipe = copy(run.recipe)
    data_ranks = sizes["replicate"] * sizes["shard"]
    vars(recipe).update(micro_batch=sizes["micro_batch"], global_batch=sizes["micro_batch"] * data_ranks * 16)
    return replace(run, layout=layout, recipe=recipe)


def account_for(run: Run, many: int, pipelines: tuple[int, ...]) -> tuple[int, int]:
    """Peak bytes and FLOPs of the first and the last stage of many layouts; how many layouts, how many fit in 80 GB."""
    fit = done = 0
    for pipeline in pipelines:
        sizes = layouts(many // len(pipelines), seed=pipeline)
        for first in range(0, many // len(pipelines), CHUNK):
            some = {name: each[first : first + CHUNK] for name, each in sizes.items()}
            worst = 0
            for stage in {0, pipeline - 1}:
                ledger = account_of_stage(with_layouts(run, pipeline, some), stage, backend="cuda")
                worst = np.maximum(worst, peak_nbytes(ledger))
                assert np.all(ledger.flops > 0)
            fit += int((worst < 80 * 10**9).sum())
            done += len(some["shard"])
    return done, fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    run = run_of()
    told: dict[str, Any] = {}

    one_device = run_of(global_batch=1)
    spread = load({"model": {"preset": MODEL}, "recipe": {"seq_len": 8192, "global_batch": 2048, "micro_batch": 1,
                   "steps": 1, "precision": "bf16-sharded"},
                   "layout": {"shard": 8, "tensor": 8, "pipeline": 9, "sequence_parallel": True},
                   "cluster": {"device": "h100-sxm", "count": 576}})  # fmt: skip
    ints = in_turns(
        {
            "one device": lambda: account(one_device, backend="cuda").peak(),
            "9 stages": lambda: [each.ledger.peak() for each in accounts(spread, backend="cuda")],
        },
        rounds=9,
    )
    told["accounts per second, ints"] = 1 / ints["one device"]
    told["ranks per second, ints, of a layout with 9 stages"] = 9 / ints["9 stages"]

    deep = {
        f"{layers} layers": (lambda layers=layers: account(
            replace(one_device, model=replace(one_device.model, n_layers=layers)), backend="cuda").peak())
        for layers in (2, 126, 10_000)
    }  # fmt: skip
    for name, each in in_turns(deep, rounds=9).items():
        told[f"ms for {name}"] = 1000 * each
    for many in (1_000, 10_000, 100_000):
        spent = seconds(lambda many=many: account_for(run, many, (1,)))
        told[f"layouts per second, {many:,} of one stage"] = many / spent

    before = time.process_time()
    done, fit = account_for(run, args.layouts, (1, 2, 6, 14))
    spent = time.process_time() - before
    told[f"seconds for {done:,} layouts of {MODEL} on 1, 2, 6 and 14 stages, first and last stage of each"] = spent
    told["layouts per second"] = done / spent
    told["of which fit in 80 GB"] = fit
    if args.json:
        json.dump(told, sys.stdout, indent=2)
        print()
        return
    for name, value in told.items():
        print(f"{name:<95} {value:,.4g}" if value < 10**6 else f"{name:<95} {value:,.0f}")


if __name__ == "__main__":
    main()
