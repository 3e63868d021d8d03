"""A step of the zoo traced on fake tensors, and what independent witnesses say of the same step run for real.

Witnesses: the allocator's own events (the profiler's) for the peak and for what is live where backward begins;
`torch.autograd.graph.saved_tensors_hooks` for what autograd saves; `FlopCounterMode` for FLOPs by operator.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode
from zoo import Setup, Specimen, cast_to
from zoo_own_code import BEYOND as NOT_OWN_CODE
from zoo_own_code import SPECIMENS as OF_OWN_CODE
from zoo_torch import BEYOND as NOT_TORCH
from zoo_torch import SPECIMENS as OF_TORCH
from zoo_transformers import SPECIMENS as OF_TRANSFORMERS

from trainledger.ledger.ledger import Ledger
from trainledger.trace.fakes.tensors import make_states
from trainledger.trace.recorder.storages import tensors_in
from trainledger.trace.step import trace, trace_step

ZOO = (*OF_TRANSFORMERS, *OF_TORCH, *OF_OWN_CODE)
BEYOND = (*NOT_TORCH, *NOT_OWN_CODE)
PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
LIMITS = {"fp32": 0.005, "bf16": 0.02}
BACKWARD = "zoo: backward begins"


@dataclass(frozen=True)
class Truth:
    """What a real step took: bytes by the allocator's events, bytes that autograd saved, FLOPs by operator.

    ``kept`` are bytes live where backward begins, on top of those that were resident before the step; where backward
    begins more than once, those that autograd saved and the losses, as gradients are live then as well. ``corrected``
    are FlopCounterMode's with a rule of ours for grouped convolutions.
    """

    resident: int
    peak: int
    kept: int
    saved: int
    flops: dict[str, int]
    corrected: dict[str, int]


@dataclass(frozen=True)
class Comparison:
    """A trace beside the truth, for one specimen in one precision."""

    specimen: Specimen
    precision: str
    ledger: Ledger
    truth: Truth

    @property
    def peak_error(self) -> float:
        return self.ledger.peak().nbytes / self.truth.peak - 1

    @property
    def kept_error(self) -> float:
        return kept_by(self.ledger) / self.truth.kept - 1

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matmuls and attention by operator."""
        found: Counter[str] = Counter()
        for each in self.ledger:
            if each.kind in ("matmul", "attention"):
                found[each.name] += each.flops * each.times
        return dict(found)


def kept_by(ledger: Ledger) -> int:
    """Bytes that all forwards of a step keep for their backwards."""
    return int(ledger.total("kept"))


@cache
def compare(name: str, precision: str) -> Comparison:
    """Both sides of one specimen in one precision."""
    specimen = named(name)
    setup = built(specimen)
    ledger = traced(setup, PRECISIONS[precision])
    return Comparison(specimen, precision, ledger, truth(setup, PRECISIONS[precision]))


def named(name: str) -> Specimen:
    return next(each for each in (*ZOO, *BEYOND) if each.name == name)


def built(specimen: Specimen) -> Setup:
    torch.manual_seed(0)
    with quiet():
        return specimen.build()


def traced(setup: Setup, autocast: torch.dtype | None) -> Ledger:
    """The trace, by the public functions."""
    with quiet():
        if setup.step is None:
            (optimizer,) = setup.optimizers
            return trace(setup.model, setup.batch, loss=setup.loss, optimizer=optimizer, autocast=autocast)

        def step(*batch: Any) -> None:
            with cast_to(autocast):
                setup.step(batch, lambda _: nullcontext())  # type: ignore[misc]

        return trace_step(step, setup.model, setup.batch, optimizers=setup.optimizers)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers and torch warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def truth(setup: Setup, autocast: torch.dtype | None) -> Truth:
    """Real steps in the steady state, each with one witness; gradients are None before each."""
    make_states(setup.model, *setup.optimizers)
    given: set[Tensor] = set()
    trained = (each for each in setup.model.parameters() if each.requires_grad)
    hooks = [each.register_post_accumulate_grad_hook(given.add) for each in trained]
    with quiet():
        setup.run(autocast, lambda _: nullcontext())
    for hook in hooks:
        hook.remove()
    for optimizer in setup.optimizers:
        for parameter in [each for each in optimizer.state if each not in given]:
            del optimizer.state[parameter]
    resident = storages([*setup.model.parameters(), *setup.model.buffers(), *tensors_in(setup.batch)])
    if setup.loss is not None:  # its own targets
        resident |= storages(tensors_in(list(getclosurevars(setup.loss).nonlocals.values())))
    states = [list(each.values()) for optimizer in setup.optimizers for each in optimizer.state.values()]
    resident |= storages(tensors_in(states))
    with quiet():
        peak, live, times = watched(setup, autocast)
        saved = Saved(set(resident))
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            setup.model.zero_grad(set_to_none=True)
            setup.run(autocast, saved.phase)
        counts = []
        for rules in ({}, {torch.ops.aten.convolution_backward: convolution_backward_flops}):
            setup.model.zero_grad(set_to_none=True)
            with FlopCounterMode(display=False, custom_mapping=rules) as counter:
                setup.run(autocast, lambda _: nullcontext())
            found = counter.get_flop_counts().get("Global", {})
            counts.append({str(each).removeprefix("aten."): count for each, count in found.items()})
        setup.model.zero_grad(set_to_none=True)
    there = sum(resident.values())
    kept = live if times == 1 else saved.nbytes + times * 4
    return Truth(there, there + peak, kept, saved.nbytes, *counts)


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Distinct pieces of memory and their bytes."""
    found = [each.untyped_storage() for each in tensors]
    return {each._cdata: each.nbytes() for each in found}


def convolution_backward_flops(grad: Any, image: Any, weight: Any, *settings: Any, **_: Any) -> int:
    """A matmul for each wanted gradient, each as large as the forward's, where weights belong to a group of channels.

    From the definition: every element of the result (transposed: of the image) meets the weights of one output (input)
    channel.
    """
    transposed, wanted = settings[4], settings[7]
    across = image if transposed else grad
    terms = 2 * across[0] * weight[0] * weight[1]
    for each in (*across[2:], *weight[2:]):
        terms *= each
    return terms * (int(wanted[0]) + int(wanted[1]))


def watched(setup: Setup, autocast: torch.dtype | None) -> tuple[int, int, int]:
    """The allocator's most bytes at once, its bytes where backward first begins, and how often one begins."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with record_function(BACKWARD) if name == "backward" else nullcontext():
            yield

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    setup.model.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        setup.run(autocast, phase)
    events: list[tuple[int, int]] = []
    begins: list[int] = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        node = waiting.pop()
        if node.tag.name == "Allocation":
            events.append((node.start_time_ns, node.extra_fields.alloc_size))
        elif node.name == BACKWARD:
            begins.append(node.start_time_ns)
        waiting.extend(node.children)
    live = highest = at_backward = 0
    for when, nbytes in sorted(events, key=lambda each: each[0]):
        live += nbytes
        highest = max(highest, live)
        at_backward = live if when < min(begins) else at_backward
    return highest, at_backward, len(begins)


class Saved:
    """Distinct pieces of memory that autograd saves in a forward and still has where a backward begins."""

    def __init__(self, resident: set[int]) -> None:
        self.nbytes = 0
        self._resident = resident
        self._packed: dict[int, Any] = {}
        self._counted: list[Any] = []

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._resident:
            self._packed[storage._cdata] = weakref.ref(storage)
        return tensor.detach()  # a result that holds its own graph would live on where nobody needs it

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "backward":
            before = {id(each()) for each in self._counted} - {id(None)}
            for reference in self._packed.values():
                storage = reference()
                if storage is not None and id(storage) not in before:
                    self.nbytes += storage.nbytes()
                    self._counted.append(reference)
        yield
