"""How far predictions were from published runs whose source had taught them nothing: what intervals rest on."""

from __future__ import annotations

from trainledger.spec.frozen import frozen

SHARE = 0.8  # of the runs lie in an interval


@frozen(kw_only=True)
class StepErrors:
    """Measured over predicted seconds of a step: `SHARE` of the published steps lie between ``low`` and ``high``.

    ``basis`` says what is known of the device: ``own`` = steps on such devices are published and its constants fitted
    on them, ``other`` = its constants are those of another device or of single kernels, ``bound`` = its data sheet
    alone. ``rows`` of so many ``sources`` were predicted so, each by what was known without its own source.
    """

    basis: str
    low: float
    high: float
    rows: int
    sources: int


@frozen(kw_only=True)
class PairErrors:
    """Of two runs' steps, the ratio that was measured over the ratio that was predicted.

    `SHARE` of the pairs are within ``ratio`` of 1, up or down. ``rows`` pairs of so many ``sources`` were compared.
    """

    ratio: float
    rows: int
    sources: int


@frozen(kw_only=True)
class MemoryErrors:
    """Of the logarithm of measured over predicted peak memory: Student's t with ``degrees`` of freedom.

    ``shift`` is its middle, ``spread`` its scale: what sources differ by and what the rows of a source do.
    """

    shift: float
    spread: float
    degrees: int
    rows: int
    sources: int


@frozen(kw_only=True)
class Seen:
    """What published runs have: kinds (`predict.interval.kinds_of`), most devices, longest sequences in tokens."""

    kinds: tuple[str, ...]
    most_devices: int
    longest: int


@frozen(kw_only=True)
class ErrorModel:
    """The errors that are expected of a run on a device; ``widening`` of those that are unlike all published ones.

    ``one_device`` are pairs of runs on the same device, ``two_devices`` on different ones; ``adapters`` is of the
    memory of runs with adapters on frozen weights, ``memory`` of all others.
    """

    step: StepErrors
    steps_seen: Seen
    one_device: PairErrors
    two_devices: PairErrors
    memory: MemoryErrors
    adapters: MemoryErrors
    memory_seen: Seen
    widening: float
