"""The search of a layout for a run that asks for one, and why there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trainledger.answers.defaults import default_batch
from trainledger.answers.machine import THIS_MACHINE, kernels_of, machine_of
from trainledger.answers.recent import Recent
from trainledger.forecast.plan.layouts.diagnostics import diagnose
from trainledger.forecast.plan.layouts.grid import fixed_by, whole
from trainledger.forecast.plan.layouts.result import Layouts
from trainledger.forecast.plan.layouts.search import search
from trainledger.forecast.predict.interval import EVEN, LIKELY
from trainledger.forecast.predict.roofline import NoRate
from trainledger.ledger.step import account
from trainledger.spec.device import Device
from trainledger.spec.layout import NOT_SEARCHED
from trainledger.spec.problem import InvalidInput, Problem, refuse_given, shown
from trainledger.spec.run import Run
from trainledger.spec.units import counted

Progress = Callable[[str, int, int], None]
# A search may take half a minute, and `plan` asks for the same run several times; a server asks for many runs.
_FOUND: Recent[Any, Run] = Recent(64)
LIMIT = 30.0  # seconds of CPU for the accounts of a search
_OF_A_NODE = {"tensor": 1, "pipeline": 1, "context": 1}


def with_layout(
    run: Run, *, written: Collection[str] = (), limit_seconds: float = LIMIT, progress: Progress | None = None
) -> Run:
    """The run with the simplest of the quickest layouts, where it asks for a search (``layout.auto``).

    That is `Layouts.simplest`: a pipeline is not worth a percent that predictions cannot resolve. Where nobody asks for
    the search, a model that is named alone, the devices of one node share states and data alone if that fits, as people
    begin there: tensor ranks and stages are for what does not. What the run
    says of its layout, its micro-batch or its recomputation is kept: all that is not as by default, and the fields that
    are ``written`` (`runfile.written`). Where nothing fits within less than the usual ``limit_seconds``, the search
    takes those. ``progress`` hears of it as in `questions.layouts`. Raises `InvalidInput` where nothing fits.
    """
    fixed = fixed_by(run, written)
    asked = not {"layout", "layout.auto"}.isdisjoint(written)
    key, limit = (run, asked, *fixed.items()), min(limit_seconds, LIMIT)
    found = _FOUND.get((*key, LIMIT)) or _FOUND.get((*key, limit))
    if found is None:
        # Of one device whose rates are not known there is nothing to find.
        alone = run.cluster.count == 1 and not fixed_by(run) and run.cluster.device == THIS_MACHINE
        found = (
            replace(run, layout=replace(run.layout, auto=False))
            if alone
            else _searched(run, fixed, asked, limit, progress)
        )
        _FOUND.keep((*key, limit), found)
    searched = not (found.layout.alone and found.recipe.micro_batch is None)
    return replace(found, origin=replace(run.origin, searched=searched))


def _searched(run: Run, fixed: Mapping[str, Any], asked: bool, limit: float, progress: Progress | None) -> Run:
    refuse_not_searched(run, {f"layout.{name}" for name in NOT_SEARCHED})
    search = partial(spread, whole(run), keep=1, front=False, limit_seconds=limit, progress=progress)
    layouts = search(fixed={**_OF_A_NODE, **fixed}, chance=LIKELY) if not asked and _is_one_node(run) else None
    if layouts is None or not (layouts.ranked or layouts.interrupted):
        layouts = search(fixed=fixed)
    if layouts.interrupted:  # who asked for a run did not ask for the best layout until then
        raise KeyboardInterrupt
    if layouts.simplest is None and limit < LIMIT:
        return _searched(run, fixed, asked, LIMIT, progress)
    if layouts.simplest is None:
        why = why_no_layout(layouts, fixed, progress=progress)
        fixes = "".join(f" --fix {name}={value}" for name, value in fixed.items())
        more = f" (trainledger layouts{fixes} --full shows the search)"
        raise InvalidInput([Problem("layout", "auto", f"{why.rule}{more}", why.nearest)])
    return layouts.simplest.run


def _is_one_node(run: Run) -> bool:
    machine = machine_of(run)
    return (
        isinstance(machine, Device)
        and machine.fabric is not None
        and (run.cluster.count <= (run.cluster.devices_per_node or machine.fabric.devices_per_node))
    )


def refuse_not_searched(run: Run, written: Collection[str]) -> None:
    """Raise `InvalidInput` for fields of the layout that are ``written`` and that no layout of a search has."""
    rule = "is not searched for, so it cannot be combined with auto: leave it out"
    said = {f"layout.{name}": getattr(run.layout, name) for name in NOT_SEARCHED if f"layout.{name}" in written}
    refuse_given((name, value != "block" and value, rule, None) for name, value in said.items())


def spread(
    run: Run,
    *,
    fixed: Mapping[str, Any] | None = None,
    keep: int = 10,
    limit_seconds: float = LIMIT,
    front: bool = True,
    first: bool = False,
    chance: float | None = None,
    progress: Progress | None = None,
) -> Layouts:
    """The quickest layouts of a run that was checked before, as `questions.layouts` has them; raises `InvalidInput`.

    ``front`` and ``first`` as in `search`. Without a ``chance`` those that fit with `LIKELY`, and where none does those
    that fit with one half.
    """
    try:
        import numpy  # noqa: F401 (a browser may have none)
    except ModuleNotFoundError:
        rule = "is searched for with numpy, which is not installed; write the layout, such as layout.shard = 8"
        raise InvalidInput([Problem("layout", "auto", rule, "pip install numpy")]) from None
    run, count, name = whole(run), run.cluster.count, run.cluster.device
    machine = machine_of(run)
    if not isinstance(machine, Device):
        rule = "has no links on record, so layouts on it cannot be timed; name a device of the catalog"
        raise InvalidInput([Problem("cluster.device", name, rule)])
    fabric = machine.fabric
    if fabric is not None and fabric.network is None and count > fabric.devices_per_node:
        rule = (
            f"is not known of {name}, and {count:,} devices are more than the {fabric.devices_per_node} of a node; "
            f"name a link (trainledger catalog links) or, of one node, set cluster.devices_per_node = {count}"
        )
        raise InvalidInput([Problem("cluster.network", None, rule, "ethernet-100")])
    asked = partial(
        search, run, machine, backend=kernels_of(run), fixed=fixed, keep=keep, limit_seconds=limit_seconds,
        front=front, first=first, progress=progress,
    )  # fmt: skip
    try:
        layouts = asked(chance=LIKELY if chance is None else chance)
        return asked(chance=EVEN) if chance is None and not (layouts.ranked or layouts.interrupted) else layouts
    except NoRate as reason:
        raise InvalidInput([Problem("cluster.device", name, f"has a rate that is not known: {reason}")]) from None


def why_no_layout(layouts: Layouts, fixed: Mapping[str, Any], *, progress: Progress | None = None) -> Problem:
    """Why a search with ``fixed`` values found no layout, and the nearest values with which there is one."""
    run = whole(layouts.run)
    if layouts.fitting and not layouts.certain:
        looked = f"by {counted(layouts.accounted, 'full account')} of {layouts.fitting:,} layouts that may fit"
        rule = f"found none for {layouts.devices:,} x {run.cluster.device} {looked}; a longer time limit looks at more"
        return Problem("layout", None, rule)

    def fits(count: int) -> bool:
        asked = replace(run, cluster=replace(run.cluster, count=count))
        if "recipe.global_batch" in {*run.origin.assumed} - run.origin.explicit:
            asked = replace(asked, recipe=replace(asked.recipe, global_batch=default_batch(asked)))
        try:
            more = spread(asked, fixed=fixed, keep=1, limit_seconds=3, front=False, chance=EVEN, progress=progress)
        except InvalidInput:  # such as of a network that is not known
            return False
        if more.interrupted:
            raise KeyboardInterrupt
        return more.best is not None

    alone = replace(run, recipe=replace(run.recipe, micro_batch=1, global_batch=1))
    states = sum(nbytes for _, nbytes in account(alone, backend=kernels_of(run)).resident)
    why = diagnose(layouts, fixed, fits, states // layouts.usable_nbytes if layouts.usable_nbytes else 1)
    values = ", ".join(f"{name} = {shown(value)}" for name, value in fixed.items())
    rule = f"found no layout that fits {layouts.devices:,} x {run.cluster.device}"
    rule += f" with {values}" if values and (layouts.allowed or not why.rule) else ""
    rule += f": {why.rule}" if why.rule else ""
    if beyond := sum(rejected.count for rejected in layouts.rejected if "n_mtp_layers" in rejected.reason):
        rule += f"; {beyond:,} of {layouts.searched:,} layouts are not accounted for with multi-token prediction"
        rule += " (model.n_mtp_layers = 0 leaves it out)"
    *some, last = why.nearest or ("",)
    return Problem("layout", None, rule, f"{', '.join(some)} or {last}" if some else last or None)
