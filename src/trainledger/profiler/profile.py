"""What a recording says: where the time of its steps went, what its kernels reached, and what is doubtful."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from trainledger.catalog import device_of_driver
from trainledger.document import Answer
from trainledger.profiler.causes import Cause, causes
from trainledger.profiler.flops import Multiplied, Product, ProductRate, multiplied
from trainledger.profiler.kinds import COMMUNICATION
from trainledger.profiler.operators import Which
from trainledger.profiler.quality import doubts
from trainledger.profiler.read import Advance, read_profile
from trainledger.profiler.recording import NONE, Message, Recording
from trainledger.profiler.split import Split, split
from trainledger.profiler.step_time import StepTime, Timeline, step_time, timeline
from trainledger.profiler.steps import Step, steps_of
from trainledger.profiler.waterfall import MeasuredBar, measured_waterfall
from trainledger.spec.cluster import Device

Key = TypeVar("Key")


@dataclass(frozen=True)
class KernelTime:
    """A kernel of the step: its kind, how often it ran and for how long (its runs may overlap others')."""

    name: str
    kind: str
    count: int
    nanoseconds: int


@dataclass(frozen=True)
class Sent:
    """A collective of the step: what it sends, how often, and how long its kernels ran, waits for others included."""

    collective: str
    dtype: str
    elements_in: int
    elements_out: int
    ranks: int
    count: int
    nanoseconds: int


@dataclass(frozen=True)
class Profile(Answer, report="profile"):
    """A profiler's recording, read: all its steps in parts, and of the median one (``at``) its kernels."""

    path: str
    device_name: str
    device: Device | None
    rank: int | None
    ranks: int | None
    found_by: str
    steps: tuple[StepTime, ...]
    at: int
    kernels: tuple[KernelTime, ...]
    products: tuple[ProductRate, ...]
    collectives: tuple[Sent, ...]
    split: Split
    causes: tuple[Cause, ...] = ()
    doubts: tuple[str, ...] = ()
    on_device: bool = True

    @property
    def step(self) -> StepTime:
        """The step of the median length (of an even number the shorter of the two)."""
        return self.steps[self.at]

    @property
    def flops(self) -> int:
        """FLOPs of matrix products, attention and convolutions in that step, recomputed ones included."""
        return sum(each.flops for each in self.products)

    @property
    def model_flops(self) -> int:
        """The same without what runs again: checkpointed regions, scores in the backward of a fused attention."""
        return sum(each.model_flops for each in self.products)

    @property
    def hfu(self) -> float | None:
        """The share of the peak that the step reaches, each format's FLOPs against its own peak.

        None where shapes were not recorded or the device, or a format's peak on it, is not in the catalog.
        """
        return self._of_peak(lambda each, peaks: each.at_peak_ns(peaks))

    @property
    def mfu(self) -> float | None:
        """The same of model FLOPs: nothing that runs again counts."""
        return self._of_peak(lambda each, peaks: each.model_at_peak_ns(peaks))

    @property
    def peaks(self) -> Mapping[str, float]:
        """FLOP/s of the device by format; none where the catalog does not know it."""
        return {} if self.device is None else self.device.peak_flops_per_second

    @property
    def waterfall(self) -> tuple[MeasuredBar, ...]:
        """From the counted model FLOPs at the peak to the step, bar by bar."""
        return measured_waterfall(self.step, self.split, self.products, self.peaks)

    def _of_peak(self, at_peak: Callable[[ProductRate, Mapping[str, float]], float | None]) -> float | None:
        if self.device is None or not self.flops or not self.step.nanoseconds:
            return None
        peaks = self.device.peak_flops_per_second
        found = [at_peak(each, peaks) for each in self.products if each.flops]
        known = [each for each in found if each is not None]
        return sum(known) / self.step.nanoseconds if len(known) == len(found) else None


def profile_of(path: str | os.PathLike[str], advance: Advance = lambda nbytes: None) -> Profile:
    """What the recording in a file says; raises `InvalidInput` as `read_profile` does."""
    return profile(read_profile(path, advance), Path(path).name)


def profile(recording: Recording, path: str = "") -> Profile:
    """What a recording says."""
    steps, times = steps_of(recording), timeline(recording)
    each = tuple(step_time(times, step) for step in steps.steps)
    at = sorted(range(len(each)), key=lambda number: each[number].nanoseconds)[(len(each) - 1) // 2]
    name = recording.devices[0] if recording.devices else ""
    products = multiplied(recording)
    kernels, rates, sent = _of_step(recording, times, products, steps.steps[at])
    device = device_of_driver(name)
    peaks = {} if device is None else device.peak_flops_per_second
    return Profile(
        path=path, device_name=name, device=device, rank=recording.rank, ranks=recording.ranks,
        found_by=steps.found_by, steps=each, at=at, kernels=kernels, products=rates, collectives=sent,
        split=split(recording, times, products, steps.steps[at]),
        causes=causes(recording, each[at], rates, peaks), doubts=(*doubts(recording, steps), *times.recomputed.doubts),
        on_device=recording.on_device,
    )  # fmt: skip


def _of_step(
    recording: Recording, times: Timeline, found: Multiplied, step: Step
) -> tuple[tuple[KernelTime, ...], tuple[ProductRate, ...], tuple[Sent, ...]]:
    """The kernels, products and collectives of a step, those that take longest first."""
    kinds, again = times.work_kinds, times.recomputed.operators
    if not recording.on_device:
        return (), _rates(_products_on_host(recording, step, found.products), again), ()
    work, of = recording.work, found.of_work
    begin, end = step.device_ns
    inside = np.flatnonzero((work.begins_ns >= begin) & (work.begins_ns < end)).tolist()
    lengths = work.ends_ns - work.begins_ns
    kernels: dict[tuple[str, str], list[int]] = {}
    taken: dict[int, int] = {}
    sent: dict[Message, list[int]] = {}
    for at in inside:
        nanoseconds = int(lengths[at])
        _add(kernels, (recording.names[work.names[at]], kinds[at]), nanoseconds)
        if kinds[at] == COMMUNICATION and isinstance(message := _message(recording, at), Message):
            _add(sent, message, nanoseconds)
        if of[at] != NONE:
            taken[int(of[at])] = taken.get(int(of[at]), 0) + nanoseconds
    return (
        tuple(KernelTime(*key, *both) for key, both in _longest(kernels)),
        _rates(((found.products[operator], operator, nanoseconds) for operator, nanoseconds in taken.items()), again),
        tuple(
            Sent(key.collective, key.dtype, key.elements_in, key.elements_out, key.ranks, *both)
            for key, both in _longest(sent)
        ),
    )


def _message(recording: Recording, at: int) -> object:
    more = recording.work.more[at]
    return None if more == NONE else recording.arguments[more]


def _products_on_host(
    recording: Recording, step: Step, products: Mapping[int, Product]
) -> Iterable[tuple[Product, int, int]]:
    operators = recording.operators
    for index, product in products.items():
        if step.host_ns[0] <= operators.begins_ns[index] < step.host_ns[1]:
            yield product, index, int(operators.ends_ns[index] - operators.begins_ns[index])


def _rates(ran: Iterable[tuple[Product, int, int]], again: Which) -> tuple[ProductRate, ...]:
    """By product, of products, the operators that ran them, and how long each took."""
    by_product: dict[tuple[Product, bool], list[int]] = {}
    for product, operator, nanoseconds in ran:
        _add(by_product, (product, bool(again[operator])), nanoseconds)
    return tuple(_rate(*key, *both) for key, both in _longest(by_product))


def _rate(product: Product, recomputed: bool, count: int, nanoseconds: int) -> ProductRate:
    model_flops = 0 if recomputed else product.model_flops * count
    return ProductRate(
        product.kind, product.shape, product.dtype, count, product.flops * count, nanoseconds, recomputed, model_flops,
        product.sizes,
    )  # fmt: skip


def _add(known: dict[Key, list[int]], key: Key, nanoseconds: int) -> None:
    both = known.setdefault(key, [0, 0])
    both[0] += 1
    both[1] += nanoseconds


def _longest(known: dict[Key, list[int]]) -> list[tuple[Key, list[int]]]:
    return sorted(known.items(), key=lambda each: -each[1][1])
