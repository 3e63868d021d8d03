"""The search: every layout of the grid bounded, the best of them accounted for until their order is certain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.plan.layouts.blocks import Block, Blocks
from trainledger.plan.layouts.bounds import Bounds, Costs
from trainledger.plan.layouts.constraints import Constraints
from trainledger.plan.layouts.gradient_accumulation import GradientAccumulation
from trainledger.plan.layouts.grid import ZERO3_RESHARDS, Sharding, grid_of, plainer, run_of
from trainledger.plan.layouts.pareto import Candidates, pareto
from trainledger.plan.layouts.rescore import Score, rescore
from trainledger.plan.layouts.result import AS_QUICK, Gap, Layouts, Rejected, ScoredLayout
from trainledger.plan.layouts.stages import Pipelines
from trainledger.plan.layouts.states import States
from trainledger.predict.clock import Clock
from trainledger.predict.parallel_step import straggling
from trainledger.predict.predict import memory_of_device
from trainledger.predict.roofline import NoRate
from trainledger.predict.step import basis_of
from trainledger.predict.utilization import mfu, step_peak
from trainledger.spec.cluster import Device
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much
MOST_LISTED = 4000  # layouts by bound that are remembered for the accounts
MOST_ON_FRONT = 12  # of the layouts that save memory, those that are accounted for
MOST_OF_A_KIND = 4  # of the layouts with as few kinds of ranks, those that are accounted for
STATES_ALONE = "does not fit: parameters, gradients and optimizer state alone"
ON_TOP_OF_STATES = "does not fit: activations and gathered parameters, on top of the states"
NO_NETWORK = "cannot be timed: its groups go over nodes, and the network between them is not known"
BY_ACCOUNT = "does not fit: by its account, though its bound does"


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
    for until the order of those is certain, at most ``limit_seconds`` long; Ctrl-C ends that early. ``front`` off
    leaves out slower layouts that save memory. Raises InvalidInput where the run's fields contradict each other or the
    machine's rates are not known.
    """
    report = progress or (lambda what, done, of: None)
    began = time.process_time()
    grid = grid_of(run, run.cluster.count, fixed or {})
    run = grid.run
    constraints = Constraints(grid)
    blocks = Blocks(grid, constraints)
    states = States(run, list(blocks.ranks) or [(1, 1, 1, False)], backend=backend)
    shardings = [each for some in blocks.blocks.values() for block in some for each in block.shardings]
    gathers = [each for each in (False, True) if any(_table(sharding.zero_mode) == each for sharding in shardings)]
    gathers = [False, True] if any(each.zero_mode == 2 for each in shardings) else gathers
    bounds = Bounds(run, blocks.shapes, states, _costs(run, machine, backend), gathers=gathers, backend=backend)
    room = Room(run, machine)
    chosen = Candidates(MOST_LISTED)
    pairs = [(pipeline, number) for pipeline, some in sorted(blocks.blocks.items()) for number in range(len(some))]
    ways = {pipeline: Pipelines(blocks.stages[pipeline], bounds.runs) for pipeline in blocks.blocks}
    for pipeline, some in blocks.blocks.items():
        for zero_mode in sorted({sharding.zero_mode for block in some for sharding in block.shardings}):
            for how in set(ways[pipeline].interleaved):
                states.prepare(zero_mode, interleaved=how, pipeline=pipeline)
            bounds.costs.accumulation.seconds(zero_mode, pipeline=pipeline)
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
    accounts = _Accounts(run, machine, backend, layout_at, keep, grid.chosen_sending)
    saving = _thinned(chosen.front(), MOST_ON_FRONT)
    interrupted = accounts.go(chosen.quickest(), saving, limit_seconds, report, slower=front)
    report("accounts", 1, 1)  # the limit may have ended them before all were done
    blocks.rejected[BY_ACCOUNT] += accounts.too_large
    slower = fitting - len(accounts.found) - accounts.too_large
    if slower > 0:
        blocks.rejected["slower by its bound than those that were accounted for"] += slower
    ranked = accounts.ranked()
    notes = list(accounts.notes(interrupted, limit_seconds))
    return Layouts(
        run=run, device=machine.title, devices=grid.devices, searched=blocks.searched, allowed=allowed_count,
        fitting=fitting, accounted=accounts.count, certain=accounts.certain,
        ranked=tuple(ranked[:keep]), simplest=accounts.simplest(), pareto=accounts.pareto(),
        rejected=tuple(Rejected(reason, count) for reason, count in blocks.rejected.most_common() if count),
        seconds_gap=_gap([(each.bound_seconds, each.seconds) for each in accounts.found]),
        nbytes_gap=_gap([(each.bound_nbytes, each.peak_nbytes) for each in accounts.found]),
        preparing_seconds=preparing, bounding_seconds=bounding, accounting_seconds=time.process_time() - began,
        usable_nbytes=room.usable,
        notes=tuple(notes), interrupted=interrupted, basis=basis_of(machine)[0],
    )  # fmt: skip


def _table(zero_mode: int) -> bool:
    return zero_mode >= ZERO3_RESHARDS


def _costs(run: Run, machine: Device, backend: str) -> Costs:
    """How parts are timed on a machine; raises InvalidInput where its rates are not known."""
    fabric = machine.step_fabric
    if fabric is None:
        rule = "has no links on record, and layouts are ranked by the time of a step"
        raise InvalidInput([Problem("cluster.device", run.cluster.device, rule)])
    clock = Clock(run, machine, fabric, unreachable=float("inf"))
    # Of casts to 8 bits once a step a bound has none: they are of what a rank computes with, not of what it updates.
    one = replace(run.recipe, micro_batch=1, global_batch=1, fp8_weight_caching=False)
    alone = replace(run, layout=Layout(), recipe=one)
    try:
        update_seconds = _update_seconds(account(alone, backend=backend), clock)
    except NoRate as reason:
        raise InvalidInput([Problem("cluster.device", run.cluster.device, f"cannot be timed: {reason}")]) from None
    whole = replace(run, layout=Layout(replicate=run.cluster.count))
    accumulation = GradientAccumulation(run, clock, backend=backend)
    return Costs(clock, update_seconds, accumulation, straggling(whole, machine, fabric))


def _update_seconds(ledger: Ledger, clock: Clock) -> float:
    """Seconds of clip and update for each element that is trained."""
    phases = ("clip", "optimizer")
    spent = sum(
        clock.roofline.time(each).seconds for each in ledger if each.phase in phases and each.kind != "transfer"
    )
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


class _Accounts:
    """Accounts of layouts, the best bounds first."""

    def __init__(
        self,
        run: Run,
        machine: Device,
        backend: str,
        layout_at: Callable[[Any], Run],
        keep: int,
        chosen_sending: Sequence[str],
    ) -> None:
        self.run, self.machine, self.backend, self.layout_at, self.keep = run, machine, backend, layout_at, keep
        self.chosen_sending = chosen_sending
        self.found: list[ScoredLayout] = []
        self.plainer: list[ScoredLayout] = []  # those that are no layouts of the grid
        self.count = self.too_large = 0
        self.certain = False
        self.unknown = ""
        self._work: tuple[float, float] | None = None
        self._seen: set[Run] = set()

    def go(self, rows: Any, front: Any, limit_seconds: float, report: Progress, *, slower: bool) -> bool:
        """Account for rows until the order of the first is certain, for simpler ones, and for the front.

        With ``slower`` off, of the front only for what may be about as quick as the quickest. Whether it was
        interrupted.
        """
        until = time.process_time() + limit_seconds
        try:
            for number, row in enumerate(rows):
                ordered = sorted(each.seconds for each in self.found)
                if len(ordered) >= self.keep and row[0] >= ordered[self.keep - 1]:
                    self.certain = True
                    break
                if time.process_time() > until:
                    break
                report("accounts", number, len(rows))
                self._account(row)
            else:
                self.certain = len(rows) < MOST_LISTED
            self._simpler(rows, until + limit_seconds / 2, report)
            self._plainer()
            if not slower:
                quickest = min((each.seconds for each in self.found), default=0.0)
                front = front[front[:, 0] <= quickest * AS_QUICK]
            for number, row in enumerate(front):
                if time.process_time() > until + limit_seconds / 2:
                    break
                report("accounts of what saves memory", number, len(front))
                self._account(row)
        except KeyboardInterrupt:
            return True
        return False

    def _simpler(self, rows: Any, until: float, report: Progress) -> None:
        """Account for some rows about as quick as the quickest, those with the fewest kinds of ranks first.

        Of each number of kinds a few, the best bounds first, until one of them is as quick.
        """
        best = self.simplest()
        if best is None:
            return
        most = self.ranked()[0].seconds * AS_QUICK
        waiting: dict[int, list[Any]] = {}
        for row in rows[rows[:, 0] <= most]:
            kinds = self.layout_at(row).layout.kinds_of_ranks
            if kinds < best.run.layout.kinds_of_ranks and len(waiting.setdefault(kinds, [])) < MOST_OF_A_KIND:
                waiting[kinds].append(row)
        for kinds in sorted(waiting):
            for number, row in enumerate(waiting[kinds]):
                if time.process_time() > until:
                    return
                report("accounts of what is simpler", number, len(waiting[kinds]))
                self._account(row)
            if self.simplest() != best:
                return

    def _plainer(self) -> None:
        """Account for the plainer ways to send to experts in the quickest layout and in the simplest."""
        quickest, simplest = self.ranked()[:1], self.simplest()
        for each in quickest if simplest in quickest or simplest is None else (*quickest, simplest):
            for run in plainer(each.run, self.chosen_sending):
                score = rescore(run, self.machine, backend=self.backend)
                if score.seconds is not None and score.fits is not False:
                    self.plainer.append(self._found(run, score, score.seconds, score.peak_nbytes))

    def simplest(self) -> ScoredLayout | None:
        """Of those about as quick as the quickest the simplest; of those as simple, the quickest."""
        ranked = self.ranked()
        as_quick = [each for each in ranked if each.seconds <= ranked[0].seconds * AS_QUICK]
        return min(as_quick, key=lambda each: each.simplicity, default=None)

    def _account(self, row: Any) -> None:
        run = self.layout_at(row)
        if run in self._seen:
            return
        self._seen.add(run)
        score = rescore(run, self.machine, backend=self.backend)
        self.count += 1
        if score.seconds is None:
            self.unknown = score.why
            return
        if score.fits is False:
            self.too_large += 1
            return
        self.found.append(self._found(run, score, float(row[0]), float(row[1])))

    def _found(self, run: Run, score: Score, bound_seconds: float, bound_nbytes: float) -> ScoredLayout:
        assert score.seconds is not None
        return ScoredLayout(
            run=run, seconds=score.seconds, device_nbytes=score.device_nbytes, peak_nbytes=score.peak_nbytes,
            mfu=self._mfu(score), bound_seconds=bound_seconds, bound_nbytes=bound_nbytes,
        )  # fmt: skip

    def _mfu(self, score: Score) -> float | None:
        """Of the whole step on all devices."""
        if self._work is None:
            recipe = replace(self.run.recipe, micro_batch=1, global_batch=1)
            ledger = account(replace(self.run, layout=Layout(), recipe=recipe), backend=self.backend)
            try:
                peak = step_peak(ledger, self.machine)
            except NoRate:
                peak = 0.0
            self._work = float(ledger.model_flops * self.run.recipe.global_batch), peak * self.run.cluster.count
        flops, peak = self._work
        return mfu(flops, score.seconds, peak) if score.seconds and peak else None

    def ranked(self) -> list[ScoredLayout]:
        return sorted((*self.found, *self.plainer), key=lambda each: (each.seconds, each.device_nbytes))

    def pareto(self) -> tuple[ScoredLayout, ...]:
        """Those that no other beats in both seconds and memory, the quickest first."""
        import numpy as np

        if not self.found:
            return ()
        seconds = np.array([each.seconds for each in self.found])
        nbytes = np.array([each.device_nbytes for each in self.found], float)
        return tuple(self.found[index] for index in pareto(seconds, nbytes))

    def notes(self, interrupted: bool, limit_seconds: float) -> list[str]:
        notes = []
        if interrupted:
            notes.append("interrupted: what was accounted for so far is ranked")
        elif not self.certain and self.found:
            notes.append(
                f"the order is not certain: after {limit_seconds:g} s layouts were left whose bounds are below"
            )
        if self.unknown:
            notes.append(f"some layouts cannot be timed: {self.unknown}")
        return notes
