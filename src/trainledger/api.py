"""The face of the run file: where specs, catalog, calibration and Hugging Face configurations meet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from trainledger import catalog
from trainledger.spec import runfile
from trainledger.spec.cluster import Device
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.setting import Broken, read_value

if TYPE_CHECKING:
    from trainledger.ledger.entry import Ledger
    from trainledger.plan.plan import Plan
    from trainledger.predict.forecast import Forecast
    from trainledger.spec.calibration import Calibration

THIS_MACHINE = "this-machine"


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> Run:
    """The run in a TOML file or a dict of sections, after overrides (``{"recipe.micro_batch": 2}``).

    Raises `InvalidInput` with every problem found.

    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 8, "tokens": "1B"}})
    >>> run.model.n_layers, run.recipe.total_steps
    (12, 122070)
    """
    table = source if isinstance(source, Mapping) else runfile.read_table(source)
    where = "" if isinstance(source, Mapping) else os.fspath(source)
    return runfile.parse(
        table, overrides, presets=catalog.model, from_config=config_fields, devices=_known_device, where=where
    )


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
        return catalog.device(run.cluster.device)
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


def account(run: Run, *, backend: str | None = None) -> Ledger:
    """The closed-form ledger of one optimizer step of a rank: of a layout, of its first stage.

    ``backend`` (cpu or cuda) says whose kernels run; absent, those of the run's device. Raises `InvalidInput` where the
    run's fields contradict each other; runs whose sizes are arrays or symbols are not checked (`ledger.step.account`).
    """
    from trainledger.ledger import step

    sizes = [*vars(run.model).values(), *vars(run.recipe).values(), *vars(run.layout).values()]
    if not any(hasattr(each, "shape") or hasattr(each, "free_symbols") for each in sizes):
        # Who writes a layout by hand need not count its devices.
        found = list(_broken(run)) or [each for each in run.problems() if each.field != "cluster.count"]
        if found:
            raise InvalidInput(found)
    return step.account(run, backend=kernels_of(run) if backend is None else backend)


def _broken(run: Run) -> Iterator[Problem]:
    """Each field of a run made by hand that breaks a rule of its own."""
    for section in ("model", "recipe", "layout"):
        part = getattr(run, section)
        for each in fields(part):
            try:
                read_value(each, getattr(part, each.name))
            except Broken as broken:
                field = f"{section}.{each.name}"
                yield Problem(field, getattr(part, each.name), broken.rule, broken.nearest)


def plan(run: Run, *, mfu: float = 0.5) -> Plan:
    """Everything that can be said of a run before it starts; ``mfu`` is for the napkin's days."""
    from trainledger.ledger.step import account
    from trainledger.plan.plan import make_plan

    if not run.layout.alone:
        from trainledger.plan.spread import spread_plan

        return spread_plan(run, machine_of(run), backend=kernels_of(run), mfu=mfu)
    return make_plan(run, account(run, backend=kernels_of(run)), machine_of(run), mfu=mfu)


def predict(run: Run) -> Forecast:
    """What a run will cost, from its closed-form ledger and its machine: steps, times, memory, MFU."""
    from trainledger.ledger.step import account
    from trainledger.predict.forecast import forecast

    if not run.layout.alone:
        return plan(run).forecast
    return forecast(run, account(run, backend=kernels_of(run)), machine_of(run))
