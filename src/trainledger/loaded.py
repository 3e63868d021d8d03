"""A run as its file names it: where specs, catalog, calibrations and Hugging Face configurations meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainledger import catalog
from trainledger.spec import runfile
from trainledger.spec.cluster import Device
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.spec.run import Run

if TYPE_CHECKING:
    from trainledger.plan.layouts.found import Layouts
    from trainledger.spec.calibration import Calibration

THIS_MACHINE = "this-machine"


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    search: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> Run:
    """The run in a TOML file or a dict of sections, after overrides (``{"recipe.micro_batch": 2}``).

    A layout that is to be found (``layout = "auto"``) is searched for, but for ``search=False``; ``progress`` hears of
    the search as in `questions.layouts`. Raises `InvalidInput` with every problem found.

    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 8, "tokens": "1B"}})
    >>> run.model.n_layers, run.recipe.total_steps
    (12, 122070)
    """
    table = source if isinstance(source, Mapping) else runfile.read_table(source)
    where = "" if isinstance(source, Mapping) else os.fspath(source)
    run = runfile.parse(
        table, overrides, presets=catalog.model, from_config=config_fields, devices=_known_device,
        networks=catalog.link, where=where,
    )  # fmt: skip
    return with_layout(run, progress=progress) if search and run.layout.auto else run


_FOUND: dict[Run, Run] = {}  # a search may take half a minute, and `plan` asks for the same run several times


def with_layout(run: Run, *, progress: Callable[[str, int, int], None] | None = None) -> Run:
    """The run with the simplest of the quickest layouts, where it asks for a search (``layout.auto``).

    That is `Layouts.simplest`: nobody takes on pipelines for a percent that a prediction cannot tell from none.
    What the run says of its layout, its micro-batch or what it recomputes, other than the defaults, is kept.
    ``progress`` hears of the search as in `questions.layouts`. Raises `InvalidInput` where nothing fits.
    """
    if run not in _FOUND:
        _FOUND[run] = _searched(run, progress)
    return _FOUND[run]


def _searched(run: Run, progress: Callable[[str, int, int], None] | None) -> Run:
    from trainledger.plan.layouts.grid import fixed_by, whole
    from trainledger.questions import layouts

    fixed = fixed_by(run)
    if run.cluster.count == 1 and not fixed and run.cluster.device == THIS_MACHINE:
        return replace(run, layout=replace(run.layout, auto=False))
    found = layouts(whole(run), fixed=fixed, keep=1, progress=progress)
    if found.interrupted:  # who asked for a run did not ask for the best layout until then
        raise KeyboardInterrupt
    if found.simplest is None:
        why = why_no_layout(found, fixed, progress=progress)
        raise InvalidInput([Problem("layout", "auto", f"{why.rule} (trainledger layouts says all)", why.nearest)])
    return found.simplest.run


def why_no_layout(
    found: Layouts, fixed: Mapping[str, Any], *, progress: Callable[[str, int, int], None] | None = None
) -> Problem:
    """Why a search with ``fixed`` values found no layout, and the nearest values with which there is one."""
    from trainledger.ledger.step import account
    from trainledger.plan.layouts.grid import whole
    from trainledger.plan.layouts.refused import refused
    from trainledger.questions import layouts

    run = whole(found.run)

    def fits(count: int) -> bool:
        try:
            more = layouts(run, devices=count, fixed=fixed, keep=1, limit_seconds=3, progress=progress)
        except InvalidInput:  # such as of a network that is not known
            return False
        if more.interrupted:
            raise KeyboardInterrupt
        return more.best is not None

    alone = replace(run, recipe=replace(run.recipe, micro_batch=1, global_batch=1))
    states = sum(nbytes for _, nbytes in account(alone, backend=kernels_of(run)).resident)
    why = refused(found, fixed, fits, states // found.usable_nbytes if found.usable_nbytes else 1)
    values = ", ".join(f"{name} = {shown(value)}" for name, value in fixed.items())
    rule = f"found no layout that fits {found.devices:,} x {run.cluster.device}"
    rule += f": {why.rule}" if why.rule else f" with {values}" if values else ""
    *some, last = why.nearest or ("",)
    return Problem("layout", None, rule, f"{', '.join(some)} or {last}" if some else last or None)


def model(name: str, **fields: Any) -> ModelSpec:
    """A model of the catalog, with any fields changed; raises `InvalidInput`.

    >>> model("llama-3-8b", n_layers=2).n_layers
    2
    """
    ahead = {**catalog.model(name), **fields}.get("n_predict_ahead")  # modules that need a few tokens after each
    recipe = {"seq_len": 128 if ahead else 1, "global_batch": 1, "steps": 1}
    return load({"model": {"preset": name, **fields}, "recipe": recipe}).model


def config_fields(path: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Hugging Face config.json; raises `InvalidInput`."""
    from pathlib import Path

    from trainledger.spec.huggingface import from_config, read_json

    return dict(vars(from_config(read_json(Path(path)), path)))


def config_notes(path: str) -> list[str]:
    """Sentences on what a Hugging Face config.json says that an account does not hold; raises `InvalidInput`."""
    from pathlib import Path

    from trainledger.spec.huggingface import left_out, read_json

    return left_out(read_json(Path(path)))


def _known_device(name: str) -> None:
    if name != THIS_MACHINE and name not in catalog.device_names():
        catalog.device(name)


def machine_of(run: Run) -> Device | Calibration | None:
    """What predicts the times of a run: a device of the catalog, or the calibration of this machine.

    None where this machine was not measured yet; with backend ``auto`` an accelerator's calibration comes
    before the processor's. Raises `InvalidInput` where the device is unknown.
    """
    if run.cluster.device != THIS_MACHINE:
        return catalog.placed(catalog.device(run.cluster.device), run.cluster)
    if run.cluster.power_limit_watts is not None:
        rule = "is for devices of the catalog: this machine is predicted as it was measured"
        raise InvalidInput([Problem("cluster.power_limit_watts", run.cluster.power_limit_watts, rule)])
    from trainledger.spec.calibration import find_calibration

    backends = ("cuda", "mps", "cpu") if run.cluster.backend == "auto" else (run.cluster.backend,)
    return next((found for each in backends if (found := find_calibration(each)) is not None), None)


def device_of(run: Run) -> Device | None:
    """The machine of a run as a device: peaks, memory, bandwidth; as `machine_of` in all else."""
    machine = machine_of(run)
    if machine is None or isinstance(machine, Device):
        return machine
    from trainledger.spec.calibration import to_device

    return to_device(machine)


def kernels_of(run: Run) -> str:
    """Whose kernels run it, as the closed form tells them apart: ``cpu``, or ``cuda`` for any accelerator."""
    if run.cluster.device != THIS_MACHINE:
        return "cuda"
    if run.cluster.backend != "auto":
        return "cpu" if run.cluster.backend == "cpu" else "cuda"
    machine = machine_of(run)
    return "cpu" if machine is None or isinstance(machine, Device) or machine.backend == "cpu" else "cuda"
