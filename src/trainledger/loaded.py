"""A run as its file names it: where specs, catalog, calibrations and Hugging Face configurations meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import log2
from typing import TYPE_CHECKING, Any, NoReturn

from trainledger import catalog
from trainledger.spec import runfile
from trainledger.spec.cluster import Device
from trainledger.spec.kernels import kernels_of_capability
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import precision_of
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.spec.run import Run

if TYPE_CHECKING:
    from trainledger.plan.layouts.result import Layouts
    from trainledger.spec.calibration import Calibration

THIS_MACHINE = "this-machine"
_BATCH_TOKENS = 2**22  # of a model without a run file, about as many as published runs of large models begin with
# Models that take longer sequences are trained on them at the end alone, and fewer layouts hold those (Llama 3,
# arXiv 2407.21783, sections 3.4.1 and 3.4.2: 8,192, and more for the last 800B of 15.6T tokens).
TRAINED_LENGTH = 8192
Overrides = Mapping[str, Any] | Sequence[str]


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | Run,
    overrides: runfile.Overrides = (),
    *,
    search: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> Run:
    """The run in a TOML file, a dict of sections or another run, after overrides (``{"recipe.micro_batch": 2}``).

    A model's name of the catalog, or a Hugging Face config.json, is a run under a default recipe (`named_run`), and a
    warning says which. A layout that is to be found (``layout = "auto"``) is searched for, but for ``search=False``;
    ``progress`` hears of the search as in `questions.layouts`. Raises `InvalidInput` with every problem found.

    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 8, "tokens": "1B"}})
    >>> run.model.n_layers, run.recipe.total_steps
    (12, 122070)
    >>> load(run, {"recipe.seq_len": 512}).recipe.seq_len
    512
    """
    overrides, table = _listed(overrides), dict[str, Any]()
    if isinstance(source, str | os.PathLike):
        named = os.fsdecode(source)
        if is_run_file(named):
            return load_file(named, overrides, search=search, progress=progress)
        run = named_run(named, overrides)
        _warn_of_recipe(named, run, overrides)
    elif isinstance(source, Run | Mapping):
        table = dict(vars(source) if isinstance(source, Run) else source)
        run = _parsed(table, overrides)
    else:
        rule = "must be a run file, a model of the catalog, a config.json, a dict of sections or a Run"
        raise InvalidInput([Problem("run", None, f"{rule}, not {type(source).__name__}")])
    if not (search and run.layout.auto):
        return run
    return with_layout(run, written=runfile.written(table, overrides), progress=progress)


def load_file(
    path: str | os.PathLike[str],
    overrides: runfile.Overrides = (),
    *,
    search: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> Run:
    """As `load`, of a run file alone, whatever it is called."""
    overrides, table = _listed(overrides), runfile.read_table(path)
    run = _parsed(table, overrides, os.fspath(path))
    if not (search and run.layout.auto):
        return run
    return with_layout(run, written=runfile.written(table, overrides), progress=progress)


def _parsed(table: Mapping[str, Any], overrides: runfile.Overrides, where: str = "") -> Run:
    return runfile.parse(
        table, overrides, presets=catalog.model, from_config=config_fields, devices=_known_device,
        networks=catalog.link, where=where,
    )  # fmt: skip


def checked(run: Run) -> Run:
    """A run made by hand as `load` would have it: fields read by their rules, a layout searched for where it is to be.

    Raises `InvalidInput`, also where it is no `Run`.
    """
    return load(run) if isinstance(run, Run) else _no_run(run)


def _no_run(given: object) -> NoReturn:
    from trainledger.ledger.ledger import Ledger

    way = "load makes one of a run file, of sections or of a model's name"
    if isinstance(given, Ledger):
        way = "on_device says what the step of a ledger takes"
    rule = f"a Run belongs here, not {type(given).__name__}; trainledger.{way}"
    raise InvalidInput([Problem("run", None, rule)])


def is_run_file(named: str) -> bool:
    """Whether a run file is named, even one that is not there; a name alone may be a model's."""
    if named.endswith(".json"):
        return False
    if named.endswith(".toml") or os.sep in named or os.path.isfile(named):
        return True
    return os.path.isdir(named) and named.lower() not in catalog.model_names()


def asks_for_layout(overrides: Overrides) -> bool:
    """Whether overrides ask for a search of the layout."""
    given = said(overrides)
    return given.get("layout") == runfile.AUTO or given.get("layout.auto") in (True, "true")


def named_run(named: str, overrides: Overrides = ()) -> Run:
    """A model of the catalog or of a config.json under a default recipe: one full-length sequence, bf16 autocast.

    With a layout that is to be found it is `run_to_spread`, where there are several devices or one of the catalog. It
    is one step long where nobody says how long it is. Raises `InvalidInput`.
    """
    if asks_for_layout(overrides):
        run = run_to_spread(named, overrides)
        if run.cluster.count > 1 or run.cluster.device != THIS_MACHINE:
            return run
    model, fields = _named_model(named)
    recipe: dict[str, Any] = {"seq_len": fields["max_seq_len"], "global_batch": 1, "precision": "bf16-mixed"}
    if "recipe.tokens" not in said(overrides):
        recipe["steps"] = 1
    run = load({"model": model, "recipe": recipe}, overrides)
    recipe |= _attention(run, kernels_of(run))
    return load({"model": model, "recipe": recipe}, overrides) if "attention" in recipe else run


def run_to_spread(named: str, overrides: Overrides = ()) -> Run:
    """A model of the catalog or of a config.json with a batch for many devices, its layout not yet searched for.

    That is about 4 million tokens in sequences of at most `TRAINED_LENGTH`, in bf16. Raises `InvalidInput`.
    """
    given = said(overrides)
    model, fields = _named_model(named)
    adapters = "recipe.lora_rank" in given  # frozen weights are not sharded
    recipe: dict[str, Any] = {
        "seq_len": min(fields["max_seq_len"], TRAINED_LENGTH), "global_batch": 1,
        "precision": "bf16-mixed" if adapters else "bf16-sharded",
    }  # fmt: skip
    if "recipe.tokens" not in given:
        recipe["steps"] = 1
    run = load({"model": model, "recipe": recipe}, overrides, search=False)
    recipe |= _attention(run, "cuda")
    if "recipe.global_batch" not in given:
        recipe["global_batch"] = _batch(run)
    return load({"model": model, "recipe": recipe}, overrides, search=False)


def _attention(run: Run, kernels: str) -> dict[str, str]:
    """The field of a kernel for capped scores or sinks, which PyTorch's own fused attention has neither of.

    Flash kernels have them, for accelerators and in 16 bits.
    """
    if not run.model.capped_or_sinking:
        return {}
    return {"attention": "flash" if kernels != "cpu" and precision_of(run.recipe).low else "math"}


def _batch(run: Run) -> int:
    """Sequences of a step: about `_BATCH_TOKENS`, with as many for each device, so that states alone can be spread.

    Those of a device are 1 to 7 times a power of two, as they come in micro-batches of equal size. For more devices
    than sequences it is a multiple of their count's odd part: tensor ranks and stages take powers of two.
    """
    micro_batch, count = run.recipe.micro_batch or 1, run.cluster.count
    whole: int = 2 ** max(0, (_BATCH_TOKENS // run.recipe.seq_len).bit_length() - 1)
    wanted = max(1, whole // micro_batch)
    if count <= wanted:
        fine = 1 << max(0, (wanted // count).bit_length() - 3)
        return round(wanted / count / fine) * fine * count * micro_batch
    odd = count // (count & -count)
    return (odd << max(0, round(log2(wanted / odd)))) * micro_batch


def _named_model(named: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The section of a model, and its fields."""
    if named.endswith(".json"):
        return {"config": named}, config_fields(named)
    return {"preset": named}, catalog.model(named)


def _listed(overrides: runfile.Overrides) -> Overrides:
    """Overrides that can be read more than once."""
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):  # the reader says what is wrong with them
        return [overrides]
    return overrides if isinstance(overrides, Mapping) else list(overrides)


def said(overrides: Overrides) -> dict[str, Any]:
    """What overrides say, by field as it is named: values, or their text."""
    if isinstance(overrides, Mapping):
        return dict(overrides)
    pairs = (each.partition("=") for each in overrides if isinstance(each, str))
    return {name.strip(): text.strip() for name, _, text in pairs}


def _warn_of_recipe(named: str, run: Run, overrides: Overrides) -> None:
    """Say which recipe a model alone was given, as far as overrides do not."""
    from warnings import warn

    given = said(overrides)
    fields = [each for each in ("seq_len", "global_batch", "precision") if f"recipe.{each}" not in given]
    if not {"recipe.tokens", "recipe.steps"} & given.keys():
        fields.append("steps")
    if fields:
        taken = ", ".join(f"recipe.{each} = {shown(getattr(run.recipe, each))}" for each in fields)
        warn(f"{named} has no recipe; taken: {taken} (overrides say others)", stacklevel=3)


_FOUND: dict[Any, Run] = {}  # a search may take half a minute, and `plan` asks for the same run several times


def with_layout(
    run: Run, *, written: Collection[str] = (), progress: Callable[[str, int, int], None] | None = None
) -> Run:
    """The run with the simplest of the quickest layouts, where it asks for a search (``layout.auto``).

    That is `Layouts.simplest`: nobody takes on pipelines for a percent that a prediction cannot tell from none.
    What the run says of its layout, its micro-batch or what it recomputes is kept: all that is not as by default, and
    the fields that somebody has ``written`` (`runfile.written`). ``progress`` hears of the search as in
    `questions.layouts`. Raises `InvalidInput` where nothing fits.
    """
    from trainledger.plan.layouts.grid import fixed_by

    fixed = fixed_by(run, written)
    key = (run, *fixed.items())
    if key not in _FOUND:
        alone = run.cluster.count == 1 and not fixed_by(run) and run.cluster.device == THIS_MACHINE
        _FOUND[key] = replace(run, layout=replace(run.layout, auto=False)) if alone else _searched(run, fixed, progress)
    return _FOUND[key]


def _searched(run: Run, fixed: Mapping[str, Any], progress: Callable[[str, int, int], None] | None) -> Run:
    from trainledger.plan.layouts.grid import whole
    from trainledger.questions import spread

    rule = "is not searched for, so it cannot be kept beside auto: leave it out"
    odd = {name: getattr(run.layout, name) for name in ("gather", "stage_layers")}
    if problems := [Problem(f"layout.{name}", each, rule) for name, each in odd.items() if each not in ("block", None)]:
        raise InvalidInput(problems)
    found = spread(whole(run), fixed=fixed, keep=1, progress=progress)
    if found.interrupted:  # who asked for a run did not ask for the best layout until then
        raise KeyboardInterrupt
    if found.simplest is None:
        why = why_no_layout(found, fixed, progress=progress)
        more = " (trainledger layouts says all)" if run.recipe.lora_rank is None or run.cluster.count == 1 else ""
        raise InvalidInput([Problem("layout", "auto", f"{why.rule}{more}", why.nearest)])
    return found.simplest.run


def why_no_layout(
    found: Layouts, fixed: Mapping[str, Any], *, progress: Callable[[str, int, int], None] | None = None
) -> Problem:
    """Why a search with ``fixed`` values found no layout, and the nearest values with which there is one."""
    from trainledger.ledger.step import account
    from trainledger.plan.layouts.diagnostics import diagnose
    from trainledger.plan.layouts.grid import whole
    from trainledger.questions import spread

    run = whole(found.run)

    def fits(count: int) -> bool:
        try:
            asked = replace(run, cluster=replace(run.cluster, count=count))
            more = spread(asked, fixed=fixed, keep=1, limit_seconds=3, progress=progress)
        except InvalidInput:  # such as of a network that is not known
            return False
        if more.interrupted:
            raise KeyboardInterrupt
        return more.best is not None

    alone = replace(run, recipe=replace(run.recipe, micro_batch=1, global_batch=1))
    states = sum(nbytes for _, nbytes in account(alone, backend=kernels_of(run)).resident)
    why = diagnose(found, fixed, fits, states // found.usable_nbytes if found.usable_nbytes else 1)
    values = ", ".join(f"{name} = {shown(value)}" for name, value in fixed.items())
    rule = f"found no layout that fits {found.devices:,} x {run.cluster.device}"
    rule += f" with {values}" if values and (found.allowed or not why.rule) else ""
    rule += f": {why.rule}" if why.rule else ""
    *some, last = why.nearest or ("",)
    return Problem("layout", None, rule, f"{', '.join(some)} or {last}" if some else last or None)


def model(name: str, **fields: Any) -> ModelSpec:
    """A model of the catalog, with any fields changed; raises `InvalidInput`.

    >>> model("llama-3-8b", n_layers=2).n_layers
    2
    """
    ahead = {**catalog.model(name), **fields}.get("n_predict_ahead")
    return _model_of({"preset": name, **fields}, ahead)


def checked_model(spec: ModelSpec) -> ModelSpec:
    """A model made by hand as `load` would have it; raises `InvalidInput`."""
    return _model_of(vars(spec), spec.n_predict_ahead)


def _model_of(section: Mapping[str, Any], ahead: object) -> ModelSpec:
    # Modules that predict ahead need a few tokens after each.
    recipe = {"seq_len": 128 if ahead else 1, "global_batch": 1, "steps": 1}
    return load({"model": section, "recipe": recipe}).model


def config_fields(path: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Hugging Face config.json; raises `InvalidInput`."""
    from pathlib import Path

    from trainledger.huggingface import from_config, read_json

    return dict(vars(from_config(read_json(Path(path)), path)))


def config_notes(path: str) -> list[str]:
    """Sentences on what a Hugging Face config.json says that an account does not hold; raises `InvalidInput`."""
    from pathlib import Path

    from trainledger.huggingface import left_out, read_json

    return left_out(read_json(Path(path)))


def _known_device(name: str) -> None:
    if name != THIS_MACHINE and name not in catalog.device_names():
        catalog.device(name)


def machine_of(run: Run) -> Device | Calibration | None:
    """What predicts the times of a run: a device of the catalog, or the calibration of this machine.

    None where this machine was not measured yet; with backend ``auto`` an accelerator's calibration comes
    before the processor's. Raises `InvalidInput` where the device is unknown.
    """
    if not isinstance(run, Run):
        _no_run(run)
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
    """Whose kernels run it, of `spec.kernels.KERNELS`."""
    if run.cluster.device != THIS_MACHINE:
        return kernels_of_capability(catalog.device(run.cluster.device).compute_capability)
    if run.cluster.backend == "cpu":
        return "cpu"
    machine = machine_of(run)
    if machine is None or isinstance(machine, Device):
        return "cpu" if run.cluster.backend == "auto" else "cuda"
    if run.cluster.backend not in ("auto", machine.backend):
        return "cuda"
    return "cpu" if machine.backend == "cpu" else kernels_of_capability(machine.compute_capability)
