"""Why a search found no layout: the rule that forbids it, and the nearest values with which there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from trainledger.forecast.plan.layouts.blocks import Blocks, Constraints
from trainledger.forecast.plan.layouts.grid import (
    CHECKPOINTING,
    SENDING,
    Shape,
    Sharding,
    Stages,
    divisors,
    grid_of,
    run_of,
)
from trainledger.forecast.plan.layouts.result import Layouts
from trainledger.forecast.plan.layouts.search import BY_ACCOUNT, NO_NETWORK, ON_TOP_OF_STATES, STATES_ALONE
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import SCHEDULES
from trainledger.spec.problem import InvalidInput
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override

_RECIPE = ("micro_batch", "activation_checkpointing")
_MOST_DEVICES = 10**7
_TRIED = 20  # candidates that are tried, the nearest first
_COUNTS = 8  # of devices that are tried, each by a search
_NAMED = 3
_KINDS = ("ring", "all-to-all")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False, True),
    "reshard_after_forward": (False, True),
    "zero": (3, 2, 1),
    "virtual_stages": (1, 2),
    "schedule": SCHEDULES,
    "context_kind": _KINDS,
    "activation_checkpointing": CHECKPOINTING,
}


@frozen
class Diagnosis:
    """The ``rule``, empty where no layout has the fixed values, and what works in its place as ``--set`` takes it."""

    rule: str
    nearest: tuple[str, ...]


def diagnose(layouts: Layouts, fixed: Mapping[str, Any], fits: Callable[[int], bool], least_devices: int) -> Diagnosis:
    """Why a search found nothing, with ``fixed`` values; ``fits`` says whether there is a layout on so many devices.

    Where the rules allow layouts it is memory: then more devices are tried, from ``least_devices``.
    Else it is a fixed value, where others in its place would do, or that no data ranks divide the batch.
    """
    run, devices = layouts.run, layouts.devices
    if layouts.allowed:
        return Diagnosis(_memory(layouts), tuple(_more(devices, fits, least_devices)))
    named = [name for name in fixed if name not in SENDING]
    others = [each for each in (_instead(run, devices, fixed, name) for name in named) if each is not None]
    reasons = [rejected.reason for rejected in layouts.rejected]
    if others:
        says = (reason for reason in reasons if any(f".{name} " in reason for name in named))
        return Diagnosis(next(says, ""), tuple(others))
    ways = _Ways(run, devices, fixed)
    ranks = sorted(devices // each for each in ways.inner if devices % each == 0)
    batches = list(ways.batches())
    nearest = [*batches, *ways.counts()]
    if run.model.n_mtp_layers:
        plain = replace(run, model=run.model.served)
        nearest += ["model.n_mtp_layers=0"] * _Ways(plain, devices, fixed).there_is
    if not batches:
        return Diagnosis(_plainly(run, devices) or next(iter(reasons), ""), tuple(nearest))
    of = "" if ways.micro_batch == 1 else f"recipe.micro_batch = {ways.micro_batch} x "
    sizes = ", ".join(f"{rank:,}" for rank in ranks[:_NAMED]) + " ..." * (len(ranks) > _NAMED)
    rule = (
        f"recipe.global_batch = {run.recipe.global_batch} must be a multiple of {of}the data ranks, which are "
        f"{sizes} given the tensor, context and pipeline ranks that the model allows"
    )
    return Diagnosis(rule, tuple(nearest))


def _plainly(run: Run, devices: int) -> str:
    """What is wrong where nothing but states is sharded, for any batch."""
    shape = Shape(1, False, 1, "ring", 1, 1, run.recipe.activation_checkpointing.kind)
    recipe = replace(run.recipe, global_batch=devices)
    plain = run_of(replace(run, recipe=recipe), shape, Stages(1, "1f1b", 1, None), Sharding(1, devices, 1))
    return next((f"{run_problem.field} {run_problem.rule}" for run_problem in run_problems(plain)), "")


def _memory(layouts: Layouts) -> str:
    """What is too large in the layouts that come nearest to fitting."""
    reasons = {rejected.reason for rejected in layouts.rejected}
    sentences = {BY_ACCOUNT: "none fits once its memory is counted in full", NO_NETWORK: NO_NETWORK}
    for each in (BY_ACCOUNT, NO_NETWORK, ON_TOP_OF_STATES, STATES_ALONE):
        if each in reasons:
            return sentences.get(each, f"too large: {each.partition(': ')[2]}")
    return "; ".join(layouts.notes) or "none can be timed"


def _more(devices: int, fits: Callable[[int], bool], least: int) -> Iterator[str]:
    """The first count of devices whose memory suffices: a power of two, or three times one.

    Others have few layouts that fit, since tensor ranks, stages and batches are divided by powers of two.
    """
    doubled = (each << times for times in range(_MOST_DEVICES.bit_length()) for each in (2, 3))
    more = (each for each in doubled if max(devices + 1, least) <= each <= _MOST_DEVICES)
    for count in islice(more, _COUNTS):
        if fits(count):
            yield as_override("cluster.count", count)
            return


def _instead(run: Run, devices: int, fixed: Mapping[str, Any], name: str) -> str | None:
    """The value nearest to a fixed one with which the rules allow a layout; None where none does."""
    if not _Ways(run, devices, {each: value for each, value in fixed.items() if each != name}).there_is:
        return None
    values = _CHOICES.get(name)
    if values is None:
        sizes = divisors(run.recipe.global_batch if name == "micro_batch" else devices)
        values = tuple(sorted(sizes, key=lambda size: abs(size - fixed[name])))
    for value in values:
        if value != fixed[name] and _Ways(run, devices, {**fixed, name: value}).there_is:
            return as_override(f"{'recipe' if name in _RECIPE else 'layout'}.{name}", value)
    return None


class _Ways:
    """The sizes that tensor, context and pipeline ranks can have together (``inner``), on any number of devices.

    Every rule speaks of a few fields, so each axis is tried alone, and tensor ranks with context ranks; a layout
    of what is left is then looked for in the grid itself.
    """

    def __init__(self, run: Run, devices: int, fixed: Mapping[str, Any]) -> None:
        self.run, self.devices, self.fixed = run, devices, fixed
        self.micro_batch = fixed.get("micro_batch", 1)
        self.inner: dict[int, dict[str, int]] = {}
        try:
            grid = grid_of(run, devices, fixed)
            rules = Constraints(grid)
        except InvalidInput:
            return
        widths = [
            head for head in range(1, run.model.attention.n_heads + 1) if _allowed(rules, head, 1, (False,), ("ring",))
        ]
        parts = [divisor for divisor in divisors(run.recipe.seq_len) if _allowed(rules, 1, divisor, (False,), _KINDS)]
        depths = [
            each
            for each in grid.values("pipeline", range(1, run.model.n_layers + 3))
            if any(rules.stages(stages) is None for stages in grid.stages(each))
        ]
        for tensor in grid.values("tensor", widths):
            for context in grid.values("context", parts):
                if _allowed(rules, tensor, context, grid.parallels(tensor), grid.kinds(context)):
                    for pipeline in depths:
                        sizes = {"tensor": tensor, "context": context, "pipeline": pipeline}
                        self.inner.setdefault(tensor * context * pipeline, sizes)

    @property
    def there_is(self) -> bool:
        """Whether the rules allow a layout of the unchanged run."""
        batch = self.run.recipe.global_batch
        some = [(each, self.devices, batch) for each in sorted(self.inner) if self._whole(each, self.devices, batch)]
        return next(self._first(some), None) is not None

    def batches(self) -> Iterator[str]:
        """The batch nearest to the run's."""
        batch = self.run.recipe.global_batch
        some = []
        for each in self.inner:
            if self.devices % each == 0:
                step = self.devices // each * self.micro_batch
                below = batch // step * step
                some += [(each, self.devices, near) for near in (below, below + step) if near > 0]
        for _, _, found in self._first(sorted(some, key=lambda each: abs(each[2] - batch))):
            yield as_override("recipe.global_batch", found)

    def counts(self) -> Iterator[str]:
        """The devices nearest to the run's, fewer and more."""
        batch = self.run.recipe.global_batch
        whole = divisors(batch // self.micro_batch) if batch % self.micro_batch == 0 else ()
        sizes = [ranks for ranks in whole if self._shardings(ranks)]
        some = {each * ranks: each for each in self.inner for ranks in sizes}
        fewer = sorted((count for count in some if count < self.devices), reverse=True)
        more = sorted(count for count in some if self.devices < count <= _MOST_DEVICES)
        for counts in (fewer, more):
            for _, found, _ in self._first([(some[count], count, batch) for count in counts]):
                yield as_override("cluster.count", found)

    def _whole(self, inner: int, devices: int, batch: int) -> bool:
        return devices % inner == 0 and batch % (devices // inner * self.micro_batch) == 0

    def _shardings(self, ranks: int) -> bool:
        """Whether so many data ranks can share states as is fixed."""
        shard, replicate = self.fixed.get("shard"), self.fixed.get("replicate")
        if shard is not None and replicate is not None:
            return bool(ranks == shard * replicate)
        return ranks % (shard or replicate or 1) == 0

    def _first(self, some: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        """The first of (inner ranks, devices, batch) with which the grid has a layout, if any of the first few."""
        sharding = [each for each in some if self._shardings(each[1] // each[0])]
        for inner, devices, batch in sharding[:_TRIED]:
            run = replace(self.run, recipe=replace(self.run.recipe, global_batch=batch))
            sizes = {"micro_batch": 1, **self.inner[inner], **self.fixed}
            if _has_layout(run, devices, sizes):
                yield inner, devices, batch
                return


def _allowed(rules: Constraints, tensor: int, context: int, parallels: Sequence[bool], kinds: Sequence[str]) -> bool:
    return any(rules.axes(tensor, parallel, context, kind) is None for parallel in parallels for kind in kinds)


def _has_layout(run: Run, devices: int, fixed: Mapping[str, Any]) -> bool:
    try:
        blocks = Blocks(grid_of(run, devices, fixed))
    except InvalidInput:
        return False
    return any(bool(blocks.allowed(block).any()) for some in blocks.blocks.values() for block in some)
