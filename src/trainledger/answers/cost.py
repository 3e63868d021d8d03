"""What a run costs before it starts: its account and its forecast.

``run`` is whatever `load` takes, with ``overrides``, ``device`` and ``count`` as there; a named model whose length is
not given is one step long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from trainledger import catalog
from trainledger.answers.defaults import is_one_step
from trainledger.answers.load import Progress, Source, checked_model, resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.source import OfCluster, with_cluster
from trainledger.forecast.predict import predict as forecasts
from trainledger.forecast.predict.forecast import Forecast
from trainledger.ledger import step
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.parameters import ParameterCount
from trainledger.ledger.model.parameters import parameters as parameters_of
from trainledger.spec.device import Device
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run

if TYPE_CHECKING:
    from trainledger.forecast.predict.step import OnDevice


def account(
    run: Source, overrides: Overrides = (), *, backend: str | None = None, **cluster: Unpack[OfCluster]
) -> Ledger:
    """The closed-form ledger of one optimizer step of one rank, in a pipeline one of the first stage.

    ``backend`` (of `spec.device.KERNELS`) says whose kernels run; absent, those of the run's device. Raises
    `InvalidInput` where the run's fields contradict each other; runs whose sizes are arrays or symbols are not checked
    (`ledger.step.account`).
    """
    if not (isinstance(run, Run) and any(_has_open_sizes(each) for each in (run.model, run.recipe, run.layout))):
        run = _counted(run, with_cluster(overrides, **cluster))
    return step.account(run, backend=kernels_of(run) if backend is None else backend)


def _has_open_sizes(part: object) -> bool:
    """Whether a size is an array or a symbol."""
    sizes = getattr(part, "__dict__", {}).values()
    return any(hasattr(size, "shape") or hasattr(size, "free_symbols") for size in sizes)


def _counted(run: Source, overrides: Overrides) -> Run:
    """The run, checked; the devices of a layout that is written by hand need not be counted."""
    try:
        return resolve(run, overrides)
    except InvalidInput as error:
        first, *others = error.problems
        if not isinstance(run, Run) or others or first.field != "cluster.count" or not isinstance(first.nearest, int):
            raise
        return resolve(replace(run, cluster=replace(run.cluster, count=first.nearest)), overrides)


def parameters(spec: ModelSpec) -> ParameterCount:
    """The number of parameters of a model, by component (`ledger.model.parameters`).

    Raises `InvalidInput` where fields of the model contradict each other; a model whose sizes are arrays or symbols
    is not checked.

    >>> from trainledger.answers.load import model
    >>> parameters(model("gpt2")).total
    124439808
    """
    if not isinstance(spec, ModelSpec):
        rule = f"must be a ModelSpec, not {type(spec).__name__}; trainledger.model makes one of a model's name"
        raise InvalidInput([Problem("model", None, f"{rule}, and a Run has its own as run.model")])
    return parameters_of(spec if _has_open_sizes(spec) else checked_model(spec))


def predict(
    run: Source, overrides: Overrides = (), *, progress: Progress | None = None, **cluster: Unpack[OfCluster]
) -> Forecast:
    """The forecast of a run, from its closed-form ledger and its machine: steps, times, memory and MFU.

    Raises `InvalidInput` where a field breaks a rule of the run file, as `trainledger.load` does.
    """
    run = resolve(run, with_cluster(overrides, **cluster), progress=progress)
    forecast = predicted(run)
    return forecasts.of_one_step(run, forecast) if is_one_step(run) else forecast


def predicted(run: Run) -> Forecast:
    """As `predict`, of a run that was checked before."""
    return forecasts.predict(run, machine_of(run), backend=kernels_of(run))


def on_device(ledger: Ledger, device: Device | str) -> OnDevice:
    """The memory and time of a traced step on a device of the catalog (`forecast.predict.step`).

    Collectives of a rank are named in the notes and not timed. Raises `InvalidInput`.
    """
    from trainledger.forecast.predict.step import on_device as timed

    if not isinstance(ledger, Ledger):
        rule = f"must be a Ledger, such as of trainledger.trace, not {type(ledger).__name__}"
        raise InvalidInput([Problem("ledger", None, rule)])
    return timed(ledger, device if isinstance(device, Device) else catalog.device(str(device), "device"))
