"""Accounts of layouts: the same figures as a plan of each, the best bounds first until their order is certain."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trainledger.forecast.plan.layouts.grid import Stages, plainer
from trainledger.forecast.plan.layouts.result import AS_QUICK, ScoredLayout
from trainledger.forecast.plan.layouts.stages import kinds_of
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.parallel_step import layout_time
from trainledger.forecast.predict.roofline import NoRate, mfu, step_peak
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.model.parameters import leaves_of
from trainledger.ledger.parallel.rank_plan import parts_of, rank_plan
from trainledger.ledger.ranks import RankAccount
from trainledger.ledger.step import account, follow
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import layer_runs
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much
MOST_LISTED = 4000  # layouts by bound that are remembered for the accounts
LEAST_ACCOUNTED = 8  # layouts, where none of them fits, whatever the time limit
_LOOKED_AT, _MOST_OF_FIRST = 300, 40  # rows that `Accounts.first` orders, and those that it accounts for
MOST_OF_A_KIND = 4  # of the layouts with as few kinds of ranks, those that are accounted for


@frozen
class Score:
    """Seconds of a step (None: a rate is not known, and ``why``), bytes of the heaviest rank and of its device."""

    seconds: float | None
    peak_nbytes: int
    device_nbytes: int
    fits: bool | None
    why: str = ""


def rescore(run: Run, machine: Device, *, backend: str, untimed: bool = True) -> Score:
    """The result of a layout; with ``untimed`` off its first stage that does not fit is all that is looked at.

    Of stages that have the same layers the first is followed, which has the most micro-batches in flight; of ranks that
    share states the one with the largest pieces. The others take as long, and hold no more.
    """
    layout = run.layout
    stages = Stages(layout.pipeline, layout.schedule, layout.virtual_stages, layout.stage_layers)
    runs = layer_runs(run.model, run.recipe)
    every = kinds_of(stages, [layer_run.count * len(layer_run.kinds) for layer_run in runs])
    # Counts of layers do not show where in a pattern of different ones a stage begins; a rank does, but is slower.
    patterns = any(len(layer_run.kinds) > 1 for layer_run in runs)
    parts = [parts_of(run, stage_kind.stage) if patterns else stage_kind.chunks for stage_kind in every]
    first: dict[Any, int] = {}
    for stage_kind, part in zip(every, parts, strict=True):
        first.setdefault(part, stage_kind.stage)
    plans = {part: rank_plan(run, stage) for part, stage in first.items()}
    ledgers: dict[Any, Ledger] = {}
    heaviest, peak, memory = None, 0, None
    for part, plan in plans.items():
        ledger = ledgers[part] = follow(plan, backend=backend)
        nbytes = peak_nbytes(ledger)
        if heaviest is None or nbytes + ledger.reserved_nbytes > peak + heaviest.reserved_nbytes:
            heaviest, peak = ledger, nbytes
            memory = memory_of_device(run, peak, machine, ledger.reserved)
            if not untimed and memory.fits is False:
                return Score(None, peak, int(memory.nbytes), False)
    assert memory is not None
    ranks = [
        RankAccount(
            plan=replace(plans[part], stage=stage_kind.stage),
            count=layout.devices // layout.pipeline,
            ledger=ledgers[part],
            alike=first[part],
        )
        for stage_kind, part in zip(every, parts, strict=True)
    ]
    tensors = leaves_of(run.model, run.recipe).trained().tensors
    step = layout_time(ranks, machine, tensors=tensors)
    why = "" if step.seconds is not None else step.notes[0]
    return Score(step.seconds, peak, int(memory.nbytes), memory.fits, why)


class Accounts:
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
        self._gaps: dict[tuple[Any, ...], list[float]] = {}  # seconds over their estimates, by `_kind`

    def go(
        self, rows: Any, front: Any, limit_seconds: float, report: Progress, *, slower: bool, first: bool = False
    ) -> bool:
        """Account for rows until the order of the first is certain, for simpler ones, and for the front.

        At least until one is found or `LEAST_ACCOUNTED` were not, however short the time is.
        With ``slower`` off, of the front only for what may be about as quick as the quickest. Whether it was
        interrupted.
        """
        until = time.process_time() + limit_seconds
        try:
            if first:
                self.first(rows)
                return False
            for number, row in enumerate(rows):
                ordered = sorted(layout.seconds for layout in self.found)
                if len(ordered) >= self.keep and row[0] >= ordered[self.keep - 1]:
                    self.certain = True
                    break
                if time.process_time() > until and (self.found or self.count >= LEAST_ACCOUNTED):
                    break
                if len(ordered) >= self.keep and self._expected(row) >= ordered[self.keep - 1]:
                    continue
                report("accounts", number, len(rows))
                self._account(row)
            else:
                self.certain = len(rows) < MOST_LISTED
            self._simpler(rows, until + limit_seconds / 2, report)
            self._plainer()
            if not slower:
                quickest = min((layout.seconds for layout in self.found), default=0.0)
                front = front[front[:, 0] <= quickest * AS_QUICK]
            for number, row in enumerate(front):
                if time.process_time() > until + limit_seconds / 2:
                    break
                report("accounts of what saves memory", number, len(front))
                self._account(row)
        except KeyboardInterrupt:
            return True
        return False

    def _expected(self, row: Any) -> float:
        """The seconds of a row, where its estimate is as far below its account as that of any of its kind at least."""
        return float(row[0]) * min(self._gaps.get(_kind(self.layout_at(row)), (1.0,)))

    def first(self, rows: Any) -> None:
        """Account for rows until one fits: those about as quick as the quickest, the simplest first, then others."""
        near = rows[:_LOOKED_AT][rows[:_LOOKED_AT, 0] <= rows[:1, 0] * AS_QUICK]
        simple = sorted(near, key=lambda row: (self.layout_at(row).layout.kinds_of_ranks, row[0]))
        for row in (*simple, *rows[len(near) :]):
            self._account(row)
            if self.found or self.count >= _MOST_OF_FIRST:
                return

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
        for layout in quickest if simplest in quickest or simplest is None else (*quickest, simplest):
            for run in plainer(layout.run, self.chosen_sending):
                score = rescore(run, self.machine, backend=self.backend)
                if score.seconds is not None and score.fits is not False:
                    self.plainer.append(self._found(run, score, score.seconds, score.peak_nbytes))

    def simplest(self) -> ScoredLayout | None:
        """Of those about as quick as the quickest the simplest; of those as simple, the quickest."""
        ranked = self.ranked()
        as_quick = [layout for layout in ranked if layout.seconds <= ranked[0].seconds * AS_QUICK]
        return min(as_quick, key=lambda layout: layout.simplicity, default=None)

    def _account(self, row: Any) -> None:
        run = self.layout_at(row)
        if run in self._seen:
            return
        self._seen.add(run)
        score = rescore(run, self.machine, backend=self.backend, untimed=False)
        self.count += 1
        if score.fits is False:
            self.too_large += 1
            return
        if score.seconds is None:
            self.unknown = score.why
            return
        self._gaps.setdefault(_kind(run), []).append(score.seconds / float(row[0]))
        self.found.append(self._found(run, score, float(row[0]), float(row[1])))

    def _found(self, run: Run, score: Score, bound_seconds: float, bound_nbytes: float) -> ScoredLayout:
        assert score.seconds is not None
        return ScoredLayout(
            run=run,
            seconds=score.seconds,
            device_nbytes=score.device_nbytes,
            peak_nbytes=score.peak_nbytes,
            mfu=self._mfu(score),
            bound_seconds=bound_seconds,
            bound_nbytes=bound_nbytes,
        )

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
        return sorted((*self.found, *self.plainer), key=lambda layout: (layout.seconds, layout.device_nbytes))

    def pareto(self) -> tuple[ScoredLayout, ...]:
        """Those that no other beats in both seconds and memory, the quickest first."""
        import numpy as np

        if not self.found:
            return ()
        seconds = np.array([layout.seconds for layout in self.found])
        nbytes = np.array([layout.device_nbytes for layout in self.found], float)
        return tuple(self.found[index] for index in pareto(seconds, nbytes))

    def notes(self, interrupted: bool, limit_seconds: float) -> list[str]:
        notes = []
        if interrupted:
            notes.append("interrupted: what was accounted for so far is ranked")
        elif not self.certain and self.found:
            notes.append(
                f"the order is not certain: after {limit_seconds:g} s some layouts had no full account yet that may be "
                "quicker than those ranked"
            )
        if self.unknown:
            notes.append(f"some layouts cannot be timed: {self.unknown}")
        return notes


def _kind(run: Run) -> tuple[Any, ...]:
    """Layouts whose estimates leave out the same are as far below their accounts."""
    layout, recipe = run.layout, run.recipe
    return (
        layout.schedule, layout.pipeline > 1, layout.tensor > 1, layout.sequence_parallel, layout.context > 1,
        layout.context_kind, layout.expert > 1, layout.zero, layout.reshards, layout.shard > 1,
        recipe.activation_checkpointing,
    )  # fmt: skip


def pareto(seconds: Any, nbytes: Any) -> Any:
    """The places of those that no other beats in both, the quickest first.

    >>> import numpy as np
    >>> pareto(np.array([3.0, 1.0, 2.0, 2.5]), np.array([1.0, 9.0, 4.0, 5.0])).tolist()
    [1, 2, 0]
    """
    import numpy as np

    order = np.lexsort((nbytes, seconds))
    least = np.minimum.accumulate(nbytes[order])
    first = np.ones(len(order), bool)
    first[1:] = nbytes[order][1:] < least[:-1]
    return order[first]
