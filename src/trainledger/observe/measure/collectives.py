"""Collectives between processes of this machine, by name, size and group.

All ranks run each collective equally often, and the slowest of them counts. Sizes are those of `Entry.payload`: the
whole result of an all-gather, the whole input of a reduce-scatter, a rank's tensor of the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainledger.engine.processors import cores
from trainledger.engine.train.device import synchronize
from trainledger.engine.train.preflight import of_machine
from trainledger.ledger.measured import BUSY
from trainledger.observe.measure.hardware import (
    DISTURBED,
    ProcessorUse,
    described,
    others_between,
    processor_use,
    rounded,
)
from trainledger.observe.measure.local_ranks import Job, Place, on_ranks, serve, threads_of_each
from trainledger.observe.measure.rates import CollectiveTimes
from trainledger.observe.measure.rounds import Tell
from trainledger.spec.calibration import COLLECTIVES, CollectiveTime
from trainledger.spec.plain import from_plain, to_plain
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import GIB, KIB, MIB

SIZES = tuple(4 * KIB * 4**index for index in range(8))  # 4 KiB to 64 MiB
FEW_SIZES = (16 * KIB, 1 * MIB, 16 * MIB)  # what a fit needs at least
BLOCKS, BLOCK_SECONDS, MOST_CALLS = 3, 0.05, 500
TIMEOUT_SECONDS = 120.0
RANKS_OF_A_CORE, RANK_NBYTES = 8, 512 * MIB  # more only wait; torch (250 MB) and three times the largest size
BACKENDS = ("gloo", "nccl")

# torch 2.13 has given them new names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_backend(ranks: int) -> str:
    """nccl where each rank can have a GPU of its own, else gloo."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "gloo"


def measure_collectives(
    ranks: int = 2,
    backend: str | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    names: Sequence[str] = COLLECTIVES,
    block_seconds: float = BLOCK_SECONDS,
    tell: Tell = lambda share, name: None,
) -> tuple[CollectiveTime, ...]:
    """Time collectives between ``ranks`` processes, and between the first 2, 4, 8 ... of them.

    Raises `InvalidInput` where nccl has fewer GPUs than ranks, and ChildProcessError where a rank fails.
    """
    backend = backend or default_backend(ranks)
    if backend not in BACKENDS:
        raise InvalidInput([Problem("--backend", backend, "must be gloo or nccl", "gloo")])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and gpus < ranks:
        nearest = f"--ranks {gpus}" if gpus > 1 else "--backend gloo"
        raise InvalidInput(
            [Problem("--ranks", ranks, f"nccl takes a GPU for each, and this machine has {gpus}", nearest)]
        )
    free = of_machine()
    most = min(RANKS_OF_A_CORE * cores(), ranks if free is None else free.nbytes // RANK_NBYTES)
    if ranks > most:
        rule = f"each is a process with {RANK_NBYTES / GIB:.2g} GiB of memory, and {RANKS_OF_A_CORE} share a core"
        raise InvalidInput([Problem("--ranks", ranks, rule, most if most > 1 else "a machine with more memory")])
    job = {"backend": backend, "sizes": list(sizes), "names": list(names), "block_seconds": block_seconds}
    return tuple(from_plain(CollectiveTime, on_rank) for on_rank in on_ranks("collectives", ranks, job, tell)[0])


def report_collectives(
    ranks: int = 2,
    backend: str | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    block_seconds: float = BLOCK_SECONDS,
    tell: Tell = lambda share, name: None,
) -> CollectiveTimes:
    """The same with the machine and the versions they were measured with."""
    times = measure_collectives(ranks, backend, sizes=sizes, block_seconds=block_seconds, tell=tell)
    crowded = any(
        collective_time.others is not None and collective_time.others > DISTURBED for collective_time in times
    )
    notes = (f"{BUSY}: some collectives have no undisturbed sample",) if crowded else ()
    device = torch.device("cuda" if times[0].backend == "nccl" else "cpu")
    return CollectiveTimes(**described(device) | {"threads": threads_of_each(ranks)}, times=times, notes=notes)


def main() -> None:
    """Be one of the ranks."""
    serve(_measured)


def groups_of(ranks: int) -> list[int]:
    """The sizes of the groups that are measured: powers of two, and all ranks.

    >>> groups_of(2), groups_of(6)
    ([2], [2, 4, 6])
    """
    return [*(2**power for power in range(1, ranks.bit_length()) if 2**power < ranks), ranks]


def _measured(place: Place, job: Job, tell: Tell) -> list[dict[str, Any]]:
    backend, on_gpus = job["backend"], job["backend"] == "nccl"
    device = torch.device("cuda", place.rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        f"cpu:gloo,cuda:{backend}" if on_gpus else backend,
        init_method=f"file://{place.meeting}",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    agreed = dist.new_group(backend="gloo")
    times: list[dict[str, Any]] = []
    groups = groups_of(place.ranks)
    calls = [(name, nbytes) for name in job["names"] for nbytes in job["sizes"]]
    for at, size in enumerate(groups):
        members = list(range(size))
        group, numbers = dist.new_group(members), dist.new_group(members, backend="gloo")
        for done, (name, nbytes) in enumerate(calls, at * len(calls)):
            tell(done / len(groups) / len(calls), f"{name} of {size}")
            if place.rank < size:
                call, moved = _call(name, nbytes, size, group, device)
                seconds, others = _timed(call, device, size, numbers, job["block_seconds"])
                which = {"name": name, "backend": backend, "ranks": size, "nbytes": moved}
                times.append(to_plain(CollectiveTime(**which, seconds=seconds, others=rounded(others))))
        dist.barrier(agreed)
    dist.barrier(agreed)  # nobody leaves while others wait for it
    return times


def _call(name: str, nbytes: int, ranks: int, group: Any, device: torch.device) -> tuple[Callable[[], object], int]:
    """One collective as a call, and its bytes: whole elements of fp32 for each rank."""
    part = max(1, nbytes // 4 // ranks)
    whole = torch.ones(part * ranks, device=device)
    if name == "all_reduce":  # the maximum stays what it is however often it runs; a sum would not
        return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group), whole.nbytes
    if name == "broadcast":
        return lambda: dist.broadcast(whole, src=0, group=group), whole.nbytes
    if name == "all_to_all":
        out = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(out, whole, group=group), whole.nbytes
    own = torch.ones(part, device=device)
    if name == "all_gather":
        return lambda: _all_gather(whole, own, group=group), whole.nbytes
    return lambda: _reduce_scatter(own, whole, group=group), whole.nbytes


def _timed(
    call: Callable[[], object], device: torch.device, ranks: int, numbers: Any, block_seconds: float
) -> tuple[float, float | None]:
    """Seconds of a call, the median of undisturbed blocks or the fastest, and the cores that others took in it."""

    def block(calls: int) -> tuple[float, float | None]:
        dist.barrier(numbers)
        before, start = processor_use(), time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        wall, after = time.perf_counter() - start, processor_use()
        own = 0.0 if before is None or after is None else after.own - before.own
        slowest, used = torch.tensor([wall]), torch.tensor([own])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=numbers)
        dist.all_reduce(used, group=numbers)  # the work of every rank is ours
        others = None
        if before is not None and after is not None:
            ended = ProcessorUse(wall, after.busy - before.busy, float(used))
            others = others_between(ProcessorUse(0.0, 0.0, 0.0), ended, ranks)
        return float(slowest) / calls, others

    call()
    once = max(block(2)[0], 1e-7)  # the same on every rank
    calls = max(1, min(MOST_CALLS, round(block_seconds / once)))
    blocks = [block(calls) for _ in range(BLOCKS)]
    limit = DISTURBED + 0.02 / max(calls * once, 1e-3)
    quiet = [seconds for seconds, others in blocks if others is None or others <= limit]
    told = [others for _, others in blocks if others is not None]
    return (statistics.median(quiet) if quiet else min(each for each, _ in blocks)), min(told, default=None)
