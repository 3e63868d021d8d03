"""The search: every layout of the grid estimated, the best of them accounted for until their order is certain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from trainledger.forecast.plan.layouts.accounts import MOST_LISTED, Accounts, Progress, pareto
from trainledger.forecast.plan.layouts.blocks import Block, Blocks
from trainledger.forecast.plan.layouts.bounds import Bounds, Costs
from trainledger.forecast.plan.layouts.grid import ZERO3_RESHARDS, Sharding, grid_of, run_of
from trainledger.forecast.plan.layouts.result import Gap, Layouts, Rejected
from trainledger.forecast.plan.layouts.stages import ROUNDING, Pipelines, States
from trainledger.forecast.predict.clock import Clock
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.interval import EVEN, kept_free
from trainledger.forecast.predict.parallel_step import straggling
from trainledger.forecast.predict.roofline import NoRate
from trainledger.forecast.predict.step import basis_of
from trainledger.forecast.predict.stream_ops import UPDATE
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.spec.device import Device
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.layout import Layout
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.units import format_nbytes

MOST_TIMES_BEST = 4.0  # a layout so much slower than the best is on no Pareto front that matters
_MOST_ROWS = 10**6  # that are kept at a time
MOST_ON_FRONT = 12  # of the layouts that save memory, those that are accounted for
# An account of interleaved stages takes up to twenty times as long as one of plain stages, and kinds of context ranks
# are a third of all that is accounted for before: a search that asks for any good layout has neither.
_PLAIN = {"virtual_stages": 1, "context_kind": "ring"}
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
    first: bool = False,
    chance: float = EVEN,
    progress: Progress | None = None,
) -> Layouts:
    """The best layouts of a run on the ``cluster.count`` devices of a machine, by predicted seconds of a step.

    ``fixed`` gives axes a value (``{"tensor": 8}``); ``keep`` are how many are ranked. Layouts whose states alone do
    not fit are left out, the others estimated (`plan.layouts.bounds`), and the best by estimate accounted for until the
    order of those is certain, at most ``limit_seconds`` of CPU time; Ctrl-C ends that early. ``front`` off leaves out
    slower layouts that save memory; with ``first`` the first of plain ones that fits is all that is asked for. A layout
    is taken where the chance that it fits is at least ``chance`` (`kept_free`), or beside the run's own margin.
    Raises InvalidInput where the run's fields contradict each other or the machine's rates are not known.
    """
    import numpy as np

    report = progress or (lambda what, done, of: None)
    began = time.process_time()
    grid = grid_of(run, run.cluster.count, {**(_PLAIN if first else {}), **(fixed or {})})
    run = grid.run
    kept_nbytes = kept_free(run, machine, chance)
    capacity, machine = machine.capacity_nbytes, machine.keeping_free(kept_nbytes)
    costs = _costs(run, machine, backend)
    blocks = Blocks(grid)
    states = States(run, list(blocks.ranks) or [(1, 1, 1, False)], backend=backend)
    ways = {pipeline: Pipelines(some, states.runs) for pipeline, some in blocks.stages.items() if some}
    room = _room(run, machine)
    waiting, allowed_count = [], 0
    for block in (each for _, some in sorted(blocks.blocks.items()) for each in some):
        allowed = blocks.allowed(block)
        allowed_count += (count := int(allowed.sum()))
        static = states.of(ways[block.pipeline], block.zero_modes, np.array(block.columns))
        most = np.array([room(block, sharding) for sharding in block.shardings])
        allowed &= ((static["resident"] + static["gradients"]).max(axis=1) - ROUNDING <= most)[:, None]
        blocks.rejected[STATES_ALONE] += count - int(allowed.sum())
        left = np.flatnonzero(allowed.any(axis=(0, 1)))
        if len(left):
            static = {name: each[..., left] for name, each in static.items()}
            waiting.append((block.only(left), allowed[..., left], most[left], static))
    wanted: dict[bool, set[int]] = {False: set(), True: set()}
    for block, *_ in waiting:
        for gathers in set((block.zero_modes >= ZERO3_RESHARDS).tolist()):
            wanted[gathers].update(block.variants.tolist())
    bounds = Bounds(run, blocks.shapes, costs, wanted=wanted, backend=backend, progress=report)
    preparing, began = time.process_time() - began, time.process_time()
    rows, fitting = np.zeros((0, 6)), 0
    rates = bounds.rates_of([block for block, *_ in waiting]) if waiting else ()
    for number, ((block, allowed, most, static), rate) in enumerate(zip(waiting, rates, strict=True)):
        report("groups of layouts estimated", number, len(waiting))
        nbytes, reserved, seconds = bounds.of(block, ways[block.pipeline], static, rate)
        fits = allowed & (reserved <= most)
        blocks.rejected[ON_TOP_OF_STATES] += int(allowed.sum()) - (fit := int(fits.sum()))
        fits &= np.isfinite(seconds)
        blocks.rejected[NO_NETWORK] += fit - int(fits.sum())
        fitting += int(fits.sum())
        places = [each.astype(float) for each in np.nonzero(fits)]
        at = np.full(len(places[0]), float(number))
        rows = np.concatenate([rows, np.stack([seconds[fits], nbytes[fits], at, *places], axis=1)])
        if len(rows) > _MOST_ROWS:
            rows = _promising(rows)
    bounding = time.process_time() - began
    report("groups of layouts estimated", 1, 1)

    def layout_at(row: Any) -> Run:
        block = waiting[int(row[2])][0]
        stages = blocks.stages[block.pipeline][int(row[3])]
        return run_of(run, blocks.shapes[block.variants[int(row[4])]], stages, block.shardings[int(row[5])])

    began = time.process_time()
    accounts = Accounts(run, machine, backend, layout_at, keep, grid.chosen_sending)
    rows = _promising(rows)
    saving = rows[pareto(rows[:, 0], rows[:, 1])]
    saving = _thinned(saving[saving[:, 0] < MOST_TIMES_BEST * rows[:1, 0]], MOST_ON_FRONT)
    interrupted = accounts.go(rows[:MOST_LISTED], saving, limit_seconds, report, slower=front, first=first)
    report("accounts", 1, 1)  # the limit may have ended them before all were done
    blocks.rejected[BY_ACCOUNT] += accounts.too_large
    slower = fitting - len(accounts.found) - accounts.too_large
    if slower > 0:
        blocks.rejected[SLOWER if accounts.certain else NOT_ACCOUNTED] += slower
    ranked = accounts.ranked()
    notes = accounts.notes(interrupted, limit_seconds)
    if kept_nbytes:
        notes.insert(
            0,
            f"{format_nbytes(kept_nbytes)} of each device are kept free, so that the chance to fit is at least "
            f"{chance:.0%} (--chance, or cluster.memory_margin_nbytes)",
        )
    return Layouts(
        run=run, device=machine.title, devices=grid.devices, searched=blocks.searched, allowed=allowed_count,
        fitting=fitting, accounted=accounts.count, certain=accounts.certain,
        ranked=tuple(ranked[:keep]), simplest=accounts.simplest(), pareto=accounts.pareto(),
        rejected=tuple(Rejected(reason, count) for reason, count in blocks.rejected.most_common() if count),
        seconds_gap=_gap([(layout.bound_seconds, layout.seconds) for layout in accounts.found]),
        nbytes_gap=_gap([(layout.bound_nbytes, layout.peak_nbytes) for layout in accounts.found]),
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
    if run.recipe.offload == "parameters":  # a block of layouts does not know yet what is sharded
        rule = "is not searched over layouts: give one, or search with the optimizer alone on the host"
        raise InvalidInput([Problem("recipe.offload", "parameters", rule, "optimizer")])
    clock = Clock(run, machine, fabric, unreachable=float("inf"))
    # Of casts to 8 bits once a step a bound has none: they are of what a rank computes with, not of what it updates.
    one = with_fields(run.recipe, {"micro_batch": 1, "global_batch": 1, "precision.weight_caching": False})
    alone = replace(run, layout=Layout(), recipe=one)
    try:
        update_seconds = _update_seconds(account(alone, backend=backend), clock)
    except NoRate as reason:
        raise InvalidInput([Problem("cluster.device", run.cluster.device, f"cannot be timed: {reason}")]) from None
    # An addition reads a gradient and the sum so far, and writes that.
    precision, efficiency = run.recipe.precision, machine.efficiency
    moved = nbytes_in(8, precision.arriving) / 8 + 2 * nbytes_in(8, precision.gradients) / 8
    rate = (machine.memory_bytes_per_second or float("inf")) * (efficiency.bandwidth_share if efficiency else 1.0)
    whole = replace(run, layout=Layout(replicate=run.cluster.count))
    return Costs(clock, update_seconds, moved / rate, straggling(whole, machine, fabric))


def _update_seconds(ledger: Ledger, clock: Clock) -> float:
    """Seconds of clip and update for each element that is trained."""
    updates = (entry for entry in ledger if entry.phase in UPDATE and entry.kind != "transfer")
    spent = sum(clock.time(update)[1].seconds * update.times for update in updates)
    return float(spent) / float(max(1, ledger.parameters))


def _room(run: Run, machine: Device) -> Callable[[Block, Sharding], float]:
    """How many bytes the ledger's peak may have so that all that a device holds fits; infinite where that is not known.

    Layouts with as many communicators, and as many of two ranks, have the same.
    """
    usable: int | None = memory_of_device(run, 0, machine).usable_nbytes
    known: dict[tuple[int, int], float] = {}

    def room(block: Block, sharding: Sharding) -> float:
        if usable is None:
            return float("inf")
        layout = Layout(
            replicate=sharding.replicate,
            shard=sharding.shard,
            context=block.context,
            tensor=block.tensor,
            pipeline=block.pipeline,
            expert=block.expert,
        )
        groups = layout.communicators
        key = len(groups), groups.count(2)
        if key not in known:
            spread = replace(run, layout=layout)
            least, more = (float(memory_of_device(spread, each, machine).nbytes) for each in (0, usable))
            known[key] = (usable - least) / ((more - least) / usable)
        return known[key]

    return room


def _promising(rows: Any) -> Any:
    """Of rows (seconds, bytes, ...) the quickest, and those that no other beats in both; the quickest first."""
    import numpy as np

    order = np.lexsort((rows[:, 1], rows[:, 0]))[:MOST_LISTED]
    return rows[np.concatenate([order, np.setdiff1d(pareto(rows[:, 0], rows[:, 1]), order)])]


def _thinned(rows: Any, most: int) -> Any:
    """At most so many rows, evenly from the first to the last."""
    import numpy as np

    if len(rows) <= most:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, most).round().astype(int))]


def _gap(pairs: Sequence[tuple[float, float]]) -> Gap | None:
    shares = [1 - bound / exactly for bound, exactly in pairs if exactly]
    return Gap(min(shares), median(shares), max(shares)) if shares else None
