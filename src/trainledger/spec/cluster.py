"""The cluster: which devices, how many, and what a calibration measured on them."""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.spec.setting import setting


@frozen
class Device:
    """A device of the catalog, or this machine as its calibration describes it.

    Peaks are dense FLOP/s by dtype; what is unknown is absent, never zero and never another device's.
    ``memory_nbytes`` is the number on the box, ``usable_nbytes`` what its driver leaves to a process (None: not
    known), as read in ``usable_source``. ``compute_capability`` is NVIDIA's generation number.
    ``link_bytes_per_second`` goes one way. ``unverified`` names the numbers that were not read in the source.
    ``basis`` is ``assumed`` for a data sheet and ``measured`` for a calibration.
    """

    name: str
    title: str
    peak_flops_per_second: dict[str, float]
    memory_nbytes: int | None = None
    memory_bytes_per_second: float | None = None
    power_watts: float | None = None
    basis: str = "assumed"
    source: str = ""
    date: str = ""
    unverified: tuple[str, ...] = ()
    link: str = ""
    link_bytes_per_second: float | None = None
    note: str = ""
    usable_nbytes: int | None = None
    usable_source: str = ""
    compute_capability: float | None = None


@frozen
class Overhead:
    """Something that a device holds beside tensors: bytes, or a share of the bytes in tensors."""

    name: str
    what: str
    source: str
    date: str
    nbytes: int = 0
    share: float = 0.0


@frozen(kw_only=True)
class Cluster:
    """The devices of a run."""

    device: str = setting("a device of the catalog, or this-machine", quantity="text", default="this-machine")
    count: int = setting("how many of them", default=1, at_least=1, at_most=10**7)
    backend: str = setting(
        "torch device: auto, cpu, cuda or mps", quantity="text", default="auto", choices=("auto", "cpu", "cuda", "mps")
    )
    price_per_device_hour: float | None = setting(
        "what one device costs for an hour; absent = no bill", quantity="number", default=None, at_least=0,
        at_most=10**9,
    )  # fmt: skip
