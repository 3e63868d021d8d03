"""How many tensor ranks serve a model where its layout is to be found: the fewest that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainledger.predict.inference import Inference, inference
from trainledger.predict.roofline import Machine
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.serving import Serving
from trainledger.units import counted, format_nbytes


def served(run: Run, serving: Serving, machine: Machine | None, *, backend: str) -> Inference:
    """As `inference`; a run with ``layout.auto`` on the fewest tensor ranks of its devices that hold weights and cache.

    More tensor ranks than one that the run says itself are kept. Raises `InvalidInput` where no ranks hold it.
    """
    if not run.layout.auto:
        return inference(run, serving, machine, backend=backend)
    if run.layout.tensor > 1:
        return inference(_on(run, run.layout.tensor), serving, machine, backend=backend)
    devices = run.cluster.count
    for told in _accounts(run, serving, machine, backend, range(1, devices + 1)):
        if told.fits is None:  # nobody knows what the device holds
            return inference(_on(run, 1, devices), serving, machine, backend=backend)
        if told.fits:
            whole = inference(told.run, serving, machine, backend=backend)
            note = (
                f"served on {told.run.layout.tensor:,} of the {devices:,} devices, the fewest that hold weights and "
                "cache (layout=auto; layout.tensor says others)"
            )
            return whole if devices == 1 else replace(whole, notes=(note, *whole.notes))
    raise InvalidInput([_too_large(run, told, serving, machine, backend)])


def _on(run: Run, ranks: int, devices: int | None = None) -> Run:
    layout = replace(run.layout, tensor=ranks, auto=False)
    return replace(run, layout=layout, cluster=replace(run.cluster, count=devices or layout.devices))


def _accounts(run: Run, serving: Serving, machine: Machine | None, backend: str, sizes: range) -> Iterator[Inference]:
    """The forward on so many tensor ranks, for those that go evenly into the model; one always does."""
    for ranks in sizes:
        if ranks > run.model.n_heads:
            return
        try:
            yield inference(_on(run, ranks), serving, machine, backend=backend, table=False)
        except InvalidInput:
            if ranks == 1:
                raise


def _too_large(run: Run, told: Inference, serving: Serving, machine: Machine | None, backend: str) -> Problem:
    """Why no ranks hold it, with the batch that the most of them hold and the devices that would hold this one.

    ``told`` is what the most ranks that there can be come to.
    """
    devices = run.cluster.count
    most = inference(told.run, serving, machine, backend=backend)
    ways = [f"batch {most.largest_batch:,}"] if most.largest_batch else []
    more = _accounts(run, serving, machine, backend, range(devices + 1, run.model.n_heads + 1))
    ways += [f"cluster.count={each.run.layout.tensor}" for each in more if each.fits][:1]
    nbytes = most.ledger.peak().nbytes if most.memory is None else most.memory.nbytes
    needs = f"{format_nbytes(nbytes)} in each of {most.run.layout.tensor:,}"
    rule = f"finds no tensor ranks on {counted(devices, 'device')} that hold weights and cache: {needs}, the most that"
    return Problem("layout", "auto", f"{rule} there can be, are too much", " or ".join(ways) or None)
