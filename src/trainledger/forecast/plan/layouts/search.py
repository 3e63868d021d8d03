"""The search: every layout of the grid bounded, the best of them accounted for until their order is certain."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

from trainledger.forecast.plan.layouts.accounts import MOST_LISTED, Accounts, Progress, pareto
from trainledger.forecast.plan.layouts.blocks import Block, Blocks
from trainledger.forecast.plan.layouts.bounds import Bounds, Costs
from trainledger.forecast.plan.layouts.collectives import accumulation_seconds
from trainledger.forecast.plan.layouts.grid import ZERO3_RESHARDS, Sharding, grid_of, run_of
from trainledger.forecast.plan.layouts.result import Gap, Layouts, Rejected
from trainledger.forecast.plan.layouts.stages import Pipelines
from trainledger.forecast.plan.layouts.states import States
from trainledger.forecast.predict.clock import Clock
from trainledger.forecast.predict.interval import even_chance_margin
from trainledger.forecast.predict.parallel_step import straggling
from trainledger.forecast.predict.predict import memory_of_device
from trainledger.forecast.predict.roofline import NoRate
from trainledger.forecast.predict.step import basis_of
from trainledger.forecast.predict.stream_ops import UPDATE
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.spec.device import Device
from trainledger.spec.layout import Layout
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.units import format_nbytes

MOST_TIMES_BEST = 4.0  # a layout so much slower than the best is on no Pareto front that matters
MOST_ON_FRONT = 12  # of the layouts that save memory, those that are accounted for
STATES_ALONE = "does not fit: parameters, gradients and optimizer state alone"
ON_TOP_OF_STATES = "does not fit: activations and gathered parameters, on top of the states"
NO_NETWORK = "cannot be timed: its groups go over nodes, and the network between them is not known"
SLOWER = "slower, even at the lower bound of its time, than the layouts accounted in full"
NOT_ACCOUNTED = "not accounted in full before the time limit"
BY_ACCOUNT = "does not fit by the full account, though the lower bound of its memory does"


def search(
    run: Run,
    machine: Device,
    *,
    backend: str,
    fixed: Mapping[str, Any] | None = None,
    keep: int = 10,
    limit_seconds: float = 30.0,
    front: bool = True,
    progress: Progress | None = None,
) -> Layouts:
    """The best layouts of a run on the ``cluster.count`` devices of a machine, by predicted seconds of a step.

    ``fixed`` gives axes a value (``{"tensor": 8}``); ``keep`` are how many are ranked. The best by bound are accounted
    for until the order of those is certain, at most ``limit_seconds`` of CPU time; Ctrl-C ends that early. ``front``
    off leaves out slower layouts that save memory. A layout is taken where the chance that it fits is at least a half
    (`even_chance_margin`), or beside the margin that the run gives. Raises InvalidInput where the run's fields
    contradict each other or the machine's rates are not known.
    """
    report = progress or (lambda what, done, of: None)
    began = time.process_time()
    grid = grid_of(run, run.cluster.count, fixed or {})
    run = grid.run
    kept_free = even_chance_margin(run, machine) if run.cluster.memory_margin_nbytes is None else 0
    capacity, machine = machine.capacity_nbytes, machine.keeping_free(kept_free)
    blocks = Blocks(grid)
    states = States(run, list(blocks.ranks) or [(1, 1, 1, False)], backend=backend)
    modes = {sharding.zero_mode for some in blocks.blocks.values() for block in some for sharding in block.shardings}
    by_block = {False: any(each < ZERO3_RESHARDS for each in modes), True: any(each >= 2 for each in modes)}
    gathers = [each for each, there in by_block.items() if there]
    costs = _costs(run, machine, backend)
    bounds = Bounds(run, blocks.shapes, states, costs, gathers=gathers, backend=backend, progress=report)
    room = Room(run, machine)
    chosen = Candidates(MOST_LISTED)
    pairs = [(pipeline, number) for pipeline, some in sorted(blocks.blocks.items()) for number in range(len(some))]
    ways = {pipeline: Pipelines(blocks.stages[pipeline], bounds.runs) for pipeline in blocks.blocks}
    for pipeline, some in blocks.blocks.items():
        for zero_mode in sorted({sharding.zero_mode for block in some for sharding in block.shardings}):
            for how in set(ways[pipeline].interleaved):
                states.prepare(zero_mode, how, pipeline)
            bounds.costs.accumulation(zero_mode, pipeline == 1)
    preparing, began = time.process_time() - began, time.process_time()
    allowed_count = fitting = 0
    rates = bounds.rates_of([blocks.blocks[pipeline][at] for pipeline, at in pairs])
    for number, (pipeline, at) in enumerate(pairs):
        report("groups of layouts estimated", number, len(pairs))
        block = blocks.blocks[pipeline][at]
        allowed = blocks.allowed(block)
        allowed_count += int(allowed.sum())
        bound = bounds.of(block, ways[pipeline], rates[number])
        fits = _fitting(bound, room.of(block), allowed, blocks)
        fitting += int(fits.sum())
        chosen.add(bound.seconds, bound.nbytes, pipeline << 32 | at, fits)
    bounding = time.process_time() - began
    report("groups of layouts estimated", len(pairs), len(pairs))

    def layout_at(row: Any) -> Run:
        key = int(row[2])
        block = blocks.blocks[key >> 32][key & 0xFFFFFFFF]
        stages = blocks.stages[key >> 32][int(row[3])]
        return run_of(run, blocks.shapes[block.variants[int(row[4])]], stages, block.shardings[int(row[5])])

    began = time.process_time()
    accounts = Accounts(run, machine, backend, layout_at, keep, grid.chosen_sending)
    saving = _thinned(chosen.front(), MOST_ON_FRONT)
    interrupted = accounts.go(chosen.quickest(), saving, limit_seconds, report, slower=front)
    report("accounts", 1, 1)  # the limit may have ended them before all were done
    blocks.rejected[BY_ACCOUNT] += accounts.too_large
    slower = fitting - len(accounts.found) - accounts.too_large
    if slower > 0:
        blocks.rejected[SLOWER if accounts.certain else NOT_ACCOUNTED] += slower
    ranked = accounts.ranked()
    notes = accounts.notes(interrupted, limit_seconds)
    if kept_free:
        notes.insert(
            0,
            f"{format_nbytes(kept_free)} of each device are kept free, so that the chance to fit is at least one half "
            "(cluster.memory_margin_nbytes sets another margin)",
        )
    return Layouts(
        run=run, device=machine.title, devices=grid.devices, searched=blocks.searched, allowed=allowed_count,
        fitting=fitting, accounted=accounts.count, certain=accounts.certain,
        ranked=tuple(ranked[:keep]), simplest=accounts.simplest(), pareto=accounts.pareto(),
        rejected=tuple(Rejected(reason, count) for reason, count in blocks.rejected.most_common() if count),
        seconds_gap=_gap([(each.bound_seconds, each.seconds) for each in accounts.found]),
        nbytes_gap=_gap([(each.bound_nbytes, each.peak_nbytes) for each in accounts.found]),
        preparing_seconds=preparing, bounding_seconds=bounding, accounting_seconds=time.process_time() - began,
        usable_nbytes=capacity,
        notes=tuple(notes), interrupted=interrupted, basis=basis_of(machine)[0],
    )  # fmt: skip


def _costs(run: Run, machine: Device, backend: str) -> Costs:
    """How parts are timed on a machine; raises InvalidInput where its rates are not known."""
    fabric = machine.step_fabric
    if fabric is None:
        rule = "has no links on record, and layouts are ranked by the time of a step"
        raise InvalidInput([Problem("cluster.device", run.cluster.device, rule)])
    clock = Clock(run, machine, fabric, unreachable=float("inf"))
    # Of casts to 8 bits once a step a bound has none: they are of what a rank computes with, not of what it updates.
    one = with_fields(run.recipe, {"micro_batch": 1, "global_batch": 1, "precision.weight_caching": False})
    alone = replace(run, layout=Layout(), recipe=one)
    try:
        update_seconds = _update_seconds(account(alone, backend=backend), clock)
    except NoRate as reason:
        raise InvalidInput([Problem("cluster.device", run.cluster.device, f"cannot be timed: {reason}")]) from None
    whole = replace(run, layout=Layout(replicate=run.cluster.count))

    @cache
    def accumulation(zero_mode: int, alone: bool) -> float:
        return accumulation_seconds(run, clock, backend, zero_mode, alone=alone)

    return Costs(clock, update_seconds, accumulation, straggling(whole, machine, fabric))


def _update_seconds(ledger: Ledger, clock: Clock) -> float:
    """Seconds of clip and update for each element that is trained."""
    updates = (each for each in ledger if each.phase in UPDATE and each.kind != "transfer")
    spent = sum(clock.roofline.time(each).seconds for each in updates)
    return float(spent) / float(max(1, ledger.parameters))


class Room:
    """How many bytes the ledger's peak may have, so that all that a device holds fits."""

    def __init__(self, run: Run, machine: Device) -> None:
        self.run, self.machine = run, machine
        self.usable: int | None = memory_of_device(run, 0, machine).usable_nbytes
        self._known: dict[tuple[int, int], float] = {}

    def of(self, block: Block) -> Any:
        """By column of a block; infinite where the device's memory is not known."""
        import numpy as np

        if self.usable is None:
            return np.full(len(block.shardings), np.inf)
        replicate, shard = np.array([(each.replicate, each.shard) for each in block.shardings]).T
        fixed = np.array([block.tensor, block.pipeline, block.context, block.expert])[:, None]
        sizes = [replicate, shard * block.context, *np.broadcast_to(fixed, (4, len(shard)))]
        # As `Layout.communicators` counts them: of all those, and one of all devices.
        groups = np.array([*sizes, block.tensor * block.context * block.pipeline * replicate * shard])
        keys = zip((groups > 1).sum(0).tolist(), (groups == 2).sum(0).tolist(), strict=True)
        return np.array([self._of(block, sharding, key) for sharding, key in zip(block.shardings, keys, strict=True)])

    def _of(self, block: Block, sharding: Sharding, key: tuple[int, int]) -> float:
        """Of layouts with so many groups, and so many groups of two, all have the same."""
        assert self.usable is not None
        if key not in self._known:
            layout = Layout(
                replicate=sharding.replicate, shard=sharding.shard, context=block.context, tensor=block.tensor,
                pipeline=block.pipeline, expert=block.expert,
            )  # fmt: skip
            run = replace(self.run, layout=layout)
            least, more = (float(memory_of_device(run, each, self.machine).nbytes) for each in (0, self.usable))
            self._known[key] = (self.usable - least) / ((more - least) / self.usable)
        return self._known[key]


def _fitting(bound: Any, room: Any, allowed: Any, blocks: Blocks) -> Any:
    """Which layouts may fit and can be timed; the others are counted."""
    import numpy as np

    fits = allowed & (bound.nbytes <= room)
    count, fit = int(allowed.sum()), int(fits.sum())
    if fit < count:
        alone = int((allowed & (bound.states > room)).sum())
        blocks.rejected[STATES_ALONE] += alone
        blocks.rejected[ON_TOP_OF_STATES] += count - fit - alone
    if not fit:
        return fits
    timed = fits & np.isfinite(bound.seconds)
    blocks.rejected[NO_NETWORK] += fit - int(timed.sum())
    return timed


def _thinned(rows: Any, most: int) -> Any:
    """At most so many rows, evenly from the first to the last."""
    import numpy as np

    if len(rows) <= most:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, most).round().astype(int))]


def _gap(pairs: Sequence[tuple[float, float]]) -> Gap | None:
    shares = [1 - bound / exactly for bound, exactly in pairs if exactly]
    return Gap(min(shares), median(shares), max(shares)) if shares else None


class Candidates:
    """Rows of (seconds, bytes, block, stages, variant, sharding), at most about twice ``most`` of them at a time."""

    def __init__(self, most: int) -> None:
        import numpy as np

        self.most = most
        self.slowest = np.inf
        self.best = np.inf
        self._rows: list[Any] = []
        self._waiting = 0
        self._front = np.zeros((0, 6))

    def add(self, seconds: Any, nbytes: Any, block: int, allowed: Any) -> None:
        """The layouts of a block that are ``allowed`` and fit, [ways, variants, shardings] each."""
        import numpy as np

        if not allowed.any():
            return
        self.best = min(self.best, float(seconds[allowed].min()))
        # Most can be rejected by bytes alone: those on the front that are quickest need most.
        most = self._front[0, 1] if len(self._front) else np.inf
        saves = (nbytes < most) & (seconds < MOST_TIMES_BEST * self.best)
        rows = _rows(seconds, nbytes, block, allowed & (saves | (seconds < self.slowest)))
        quick = rows[rows[:, 0] < self.slowest]
        if len(quick):
            self._rows.append(quick)
            self._waiting += len(quick)
            if self._waiting > 2 * self.most:
                self._cut()
        saves = rows[:, 0] < MOST_TIMES_BEST * self.best
        if len(self._front):
            # Of each time the least memory so far, of the layouts on the front that are no slower.
            place = np.searchsorted(self._front[:, 0], rows[:, 0], side="right") - 1
            saves &= rows[:, 1] < np.where(place < 0, np.inf, self._front[place, 1])
        if saves.any():
            rows = np.concatenate([self._front, rows[saves]])
            self._front = rows[pareto(rows[:, 0], rows[:, 1])]

    def _cut(self) -> None:
        import numpy as np

        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, 6))
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))][: self.most]
        self._rows, self._waiting = [rows], len(rows)
        if len(rows) == self.most:
            self.slowest = rows[-1, 0]

    def quickest(self) -> Any:
        """The rows by seconds; of equal ones those that need less memory come first."""
        self._cut()
        return self._rows[0]

    def front(self) -> Any:
        """The rows that no other beats in both seconds and bytes, the quickest first."""
        return self._front


def _rows(seconds: Any, nbytes: Any, block: int, which: Any) -> Any:
    import numpy as np

    places = [each.astype(float) for each in np.nonzero(which)]
    return np.stack([seconds[which], nbytes[which], np.full(len(places[0]), float(block)), *places], axis=1)
