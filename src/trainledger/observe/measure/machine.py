"""A calibration of this machine in a minute: kernels, overhead, memory, disk, data loader, collectives of two ranks.

Kernels are timed in rounds (`measure.rounds`). Where no undisturbed block of a kernel is left, its fastest calls count
and the calibration says ``busy``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import build
from trainledger.engine.processors import cores
from trainledger.engine.train.device import compute_capability, host_threads, keep_freed_memory, synchronize
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.step import optimizer_step
from trainledger.ledger.step import account
from trainledger.observe.measure.collectives import FEW_SIZES, measure_collectives
from trainledger.observe.measure.copies import READ, device_copies, disk_times
from trainledger.observe.measure.hardware import Pace, Sample, described, memory_nbytes, rounded, watched, worth_timing
from trainledger.observe.measure.kernels import fresh_bytes_per_second, kernels, operation_seconds
from trainledger.observe.measure.loader import loader_tokens_per_second
from trainledger.observe.measure.rounds import Block, Tell, Timing, has_a_clock, timed
from trainledger.spec.block import Dense, MultiHead
from trainledger.spec.calibration import Calibration, CollectiveTime, KernelTime
from trainledger.spec.durable import sha256, sync
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.units import KIB, MIB

_RECIPE = Recipe(seq_len=8, global_batch=1, steps=1)
_FEW, _MANY = 2, 8  # blocks
_WARM_UP = 3


@dataclass(frozen=True)
class StepOverhead:
    """Seconds per operation, per call of the optimizer, and per tensor of such a call."""

    operation: float
    update: float
    update_tensor: float


# Bare calls of small operations would show a third of what a step costs beyond arithmetic and memory: modules, autograd
# and the optimizer's loop over tensors do the rest. So steps of the engine are timed, on a model so small that its
# operations do nothing else.
class TinySteps:
    """Two tiny models, of few and of many tensors, ready to be stepped again and again."""

    def __init__(self, device: torch.device) -> None:
        self._steppers = [_Stepper(device, blocks) for blocks in (_FEW, _MANY)]

    def __call__(self, steps: int = 10) -> StepOverhead:
        """Mean overhead over so many steps of each model."""
        few, many = self._steppers
        (few_rest, few_update), (many_rest, many_update) = few.seconds(steps), many.seconds(steps)
        operation = (few_rest + many_rest) / (few.operations + many.operations)
        tensor = max(0.0, (many_update - few_update) / (many.tensors - few.tensors))
        once = few_update - tensor * few.tensors - operation * few.update_operations
        return StepOverhead(operation, max(0.0, once), tensor)


class _Stepper:
    def __init__(self, device: torch.device, blocks: int) -> None:
        spec = ModelSpec(
            vocab_size=16,
            d_model=8,
            n_layers=blocks,
            max_seq_len=8,
            attention=MultiHead(n_heads=2),
            feed_forward=Dense(d_ff=16),
        )
        with device:
            self._model = build(spec, _RECIPE)
            ids_BT = torch.arange(8).view(1, 8)
        initialize(self._model, seed=0)
        self._optimizer = build_optimizer(self._model, _RECIPE)
        self._batches = [(ids_BT, ids_BT)]
        self._device = device
        ledger = account(Run(model=spec, recipe=_RECIPE), backend="cpu" if device.type == "cpu" else "cuda")
        computed = [entry for entry in ledger if entry.kind != "allocate"]
        self.update_operations = sum(entry.times for entry in computed if entry.phase == "optimizer")
        self.operations = sum(entry.times for entry in computed) - self.update_operations
        self.tensors = sum(1 for _ in self._model.parameters())
        self.seconds(_WARM_UP)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Mean seconds of a step outside of the update, and in it; on an accelerator those of the program, which is
        what such a step waits for."""
        spent = {True: 0.0, False: 0.0}

        @contextmanager
        def clock(phase: str) -> Iterator[None]:
            start = time.perf_counter()
            yield
            spent[phase == "optimizer"] += (time.perf_counter() - start) / steps

        for _ in range(steps):
            synchronize(self._device)
            optimizer_step(self._model, self._optimizer, self._batches, _RECIPE, clock=clock)
        return spent[False], spent[True]


RANKS = 2  # of the collectives
_PARTS = (attrgetter("operation"), attrgetter("update"), attrgetter("update_tensor"))

T = TypeVar("T")


def measure_machine(
    backend: str = "cpu", *, quick: bool = False, progress: Callable[[float, str], None] | None = None
) -> Calibration:
    """Measure the machine under ``backend`` (cpu, cuda, mps) in about 40 s; ``quick`` in 8 s, without collectives.

    Where samples are disturbed, by other processes or a processor below its full speed, it takes up to 30 s longer.

    ``progress`` is called with the share of the work done and the name of the kernel being timed.
    """
    device = torch.device(backend)
    tell = progress or (lambda share, name: None)
    fresh = fresh_bytes_per_second(device)
    keep_freed_memory()  # as the engine does, which is what the rates are for
    threads, pace = host_threads(device), Pace() if device.type == "cpu" else None
    emulated = not worth_timing(device, torch.bfloat16)
    notes = ["bf16 matmuls are emulated on this machine and were left out"] if emulated else []
    chosen = kernels(device, ["fp32"] if emulated else ["fp32", "bf16"], quick=quick)
    seconds, rounds, disk_nbytes = (4.0, 3, 16 * MIB) if quick else (15.0, 5, 64 * MIB)

    def part(begin: float, end: float) -> Tell:
        return lambda share, name: tell(begin + (end - begin) * share, name)

    timings, busy = timed(chosen, device, seconds=seconds, rounds=rounds, pace=pace, tell=part(0.0, 0.65))
    bare = [] if has_a_clock(device) else _watched_often(lambda: operation_seconds(device), threads, 5, pace)
    overhead = _middle(bare) if bare else 0.0
    tell(0.66, "overhead of a step")
    steps = _watched_often(TinySteps(device), threads, 9, pace)
    operation, update, update_tensor = (
        _middle([(sample, get(step_overhead)) for sample, step_overhead in steps]) for get in _PARTS
    )
    tell(0.7, "storage")
    saves = _watched_often(lambda: storage_bytes_per_second(disk_nbytes), threads, 3)
    saved = [(sample, 1 / rate) for sample, rate in saves if rate is not None]
    reads = next((copy.bytes_per_second for copy in disk_times(disk_nbytes) if copy.what == READ), None)
    tell(0.74, "data loader")
    loads = loader_tokens_per_second(text_nbytes=256 * KIB if quick else 2 * MIB, seconds=0.1 if quick else 0.3)
    tell(0.77, "host and device")
    copied = tuple(copy for copy in device_copies(device) if copy.seconds is not None)
    links: tuple[CollectiveTime, ...] = ()
    library = _collectives_of(device)
    if not quick and library is not None:
        tell(0.8, "collectives")
        ranks_tell = part(0.8, 1.0)
        try:
            links = measure_collectives(
                RANKS,
                library,
                sizes=FEW_SIZES,
                block_seconds=0.04,
                tell=lambda share, name: ranks_tell(share, f"{name} ranks"),
            )
        except (ChildProcessError, InvalidInput) as error:
            notes.append(f"collectives could not be measured: {error}")
    tell(1.0, "done")

    samples: list[Block | Sample] = [block for timing in timings for block in timing.blocks]
    samples += [sample for sample, _ in (*bare, *steps)]
    if any(sample.others is None for sample in samples):
        notes.append("whether other processes disturbed the samples is unknown: this system has no /proc/stat")
    return Calibration(
        **described(device),
        backend=backend,
        kernels=tuple(_kernel_time(timing, overhead) for timing in timings),
        fresh_bytes_per_second=fresh,
        operation_seconds=operation,
        update_seconds=update,
        update_tensor_seconds=update_tensor,
        storage_bytes_per_second=1 / _middle(saved) if saved else None,
        memory_nbytes=memory_nbytes(device),
        compute_capability=compute_capability(device),
        read_bytes_per_second=reads,
        loader_tokens_per_second=loads,
        cores=cores(),
        pace_seconds=None if pace is None else pace.fastest,
        host_copies=copied,
        collectives=links,
        samples=len(samples),
        discarded=sum(sample.disturbed for sample in samples),
        busy=bool(busy),
        notes=(*notes, *busy),
    )


def _collectives_of(device: torch.device) -> str | None:
    """What ranks of this machine talk through; None where there are no two devices, or no two cores."""
    if device.type == "cuda":
        return "nccl" if torch.cuda.device_count() >= RANKS else None
    return "gloo" if device.type == "cpu" and cores() >= RANKS else None


def _watched_often(
    measure: Callable[[], T], threads: int, times: int, pace: Pace | None = None
) -> list[tuple[Sample, T]]:
    samples = []
    for _ in range(times):
        with watched(threads, pace) as sample:
            samples.append((sample, measure()))
    return samples


def _middle(samples: list[tuple[Sample, float]]) -> float:
    kept = [value for sample, value in samples if not sample.disturbed]
    return statistics.median(kept) if kept else min(value for _, value in samples)


def _kernel_time(timing: Timing, overhead: float) -> KernelTime:
    """What the kernel itself takes: the cost of calling any operation is a number of its own."""
    kernel, (called, others) = timing.kernel, timing.best()
    seconds = max(called - overhead * kernel.operations, 0.1 * called)
    return KernelTime(
        kind=kernel.kind,
        dtype=kernel.dtype,
        shape=kernel.shape,
        flops=kernel.flops,
        nbytes=kernel.nbytes,
        seconds=seconds,
        phase=kernel.phase,
        operation=kernel.operation,
        others=rounded(others),
    )


def storage_bytes_per_second(nbytes: int, directory: str | None = None) -> float | None:
    """How fast a checkpoint goes to disk, as the engine saves it: bytes written, synced and hashed per second.

    None where it fails.
    """
    tensors = {str(index): torch.rand(max(1, nbytes // 16)) for index in range(4)}
    written = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            path = Path(folder) / "sample"
            start = time.perf_counter()
            save_file(tensors, path)
            sync(path)
            sha256(path)
            return written / (time.perf_counter() - start)
    except (OSError, SafetensorError):
        return None
