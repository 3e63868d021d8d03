"""The cluster: which devices, how many, and what a calibration measured on them."""

from __future__ import annotations

from dataclasses import replace

from trainledger.frozen import frozen
from trainledger.spec.efficiency import Efficiency
from trainledger.spec.links import Fabric
from trainledger.spec.setting import setting
from trainledger.units import MEGA

# Eight devices that share 100 Mbit/s have 1.6 MB/s each: a smaller number was meant in another unit.
LEAST_RATE = MEGA
_FOR_EACH = 'bytes per second for each device; of 400 Gbit/s write "400Gbit/s"'
_OF_ALL = 'bytes per second of all devices together; of 5 GB/s write "5GB/s"'


@frozen
class Device:
    """A device of the catalog, or this machine as its calibration describes it.

    Peaks are dense FLOP/s by dtype; what is unknown is absent, never zero and never another device's.
    ``memory_nbytes`` is the number on the box, ``usable_nbytes`` what its driver leaves to a process (None: not
    known), as read in ``usable_source``. ``compute_capability`` is NVIDIA's generation number.
    ``link_bytes_per_second`` goes one way. ``unverified`` names the numbers that were not read in the source.
    ``basis`` is ``assumed`` for a data sheet and ``measured`` for a calibration. ``multiprocessors`` work on tiles of a
    product at once. ``efficiency`` is what share of the data sheet the device reaches; None: not known, so that times
    are bounds. ``clock`` is what a limit of power leaves of the clock. ``overheads`` is what it holds beside tensors,
    ``published`` what runs on such devices met with.
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
    multiprocessors: int | None = None
    efficiency: Efficiency | None = None
    clock: float = 1.0
    overheads: tuple[Overhead, ...] = ()
    published: tuple[Published, ...] = ()
    fabric: Fabric | None = None

    @property
    def step_fabric(self) -> Fabric | None:
        """The fabric as the collectives of a step find it; its bound where the device's efficiency is not known."""
        if self.fabric is None:
            return None
        if self.efficiency is None:
            return self.fabric.bound
        return replace(self.fabric, network_share=self.efficiency.network_share)

    @property
    def contention_share(self) -> float:
        """The part of a collective's time that compute beside it loses; none where the efficiency is not known."""
        return 0.0 if self.efficiency is None else self.efficiency.contention_share


@frozen
class Overhead:
    """Something that a device holds beside tensors: bytes, or a share of the bytes in tensors."""

    name: str
    what: str
    source: str
    date: str
    nbytes: int = 0
    share: float = 0.0


@frozen
class Published:
    """A number that others published of their runs; it stands in where the run file does not say ours."""

    name: str
    value: float
    what: str
    source: str
    date: str


@frozen(kw_only=True)
class Cluster:
    """The devices of a run."""

    device: str = setting("a device of the catalog, or this-machine", quantity="text", default="this-machine")
    count: int = setting("how many of them", default=1, at_least=1, at_most=10**7)
    backend: str = setting(
        "torch device: auto, cpu, cuda or mps", quantity="text", default="auto", choices=("auto", "cpu", "cuda", "mps")
    )
    devices_per_node: int | None = setting(
        "devices that the links of one node join; absent = as the device usually stands", default=None, at_least=1,
        at_most=10**6,
    )  # fmt: skip
    network: str | None = setting(
        "link of the catalog between nodes (trainledger catalog links); absent = the device's usual one",
        quantity="text", default=None,
    )  # fmt: skip
    network_bytes_per_second: int | None = setting(
        'what the network carries for each device, one way, as its data sheet says ("50GB/s", "400Gbit/s"); absent = '
        "that of cluster.network",
        quantity="bytes/s", default=None, at_least=LEAST_RATE, at_most=10**15, unit=_FOR_EACH,
    )  # fmt: skip
    network_reached_bytes_per_second: int | None = setting(
        "what long messages reach over the network for each device, one way, as measured: the bus bandwidth that "
        "nccl-tests tells of all devices of several nodes, over the devices of one node; absent = its rate times the "
        "catalog's share",
        quantity="bytes/s", default=None, at_least=LEAST_RATE, at_most=10**15, unit=_FOR_EACH,
    )  # fmt: skip
    price_per_device_hour: float | None = setting(
        "what one device costs for an hour; absent = no bill", quantity="number", default=None, at_least=0,
        at_most=10**9,
    )  # fmt: skip
    mtbf_device_hours: float | None = setting(
        "hours of one device between interruptions of the run; absent = as published for the device",
        quantity="number", default=None, above=0, at_most=10**12,
    )  # fmt: skip
    restart_seconds: float | None = setting(
        "from an interruption to the first step again, reading the checkpoint left out; absent = as published",
        quantity="seconds", default=None, at_least=0, at_most=10**7,
    )  # fmt: skip
    storage_bytes_per_second: int | None = setting(
        "bytes that all devices together write to the storage of checkpoints in a second, and read of tokens there; "
        "absent = as published",
        quantity="bytes/s", default=None, at_least=LEAST_RATE, at_most=10**15, unit=_OF_ALL,
    )  # fmt: skip
    loader_tokens_per_second: int | None = setting(
        "tokens that the data loaders of all devices together deliver in a second; absent = never too few",
        default=None, at_least=1, at_most=10**15,
    )  # fmt: skip
    power_limit_watts: float | None = setting(
        "limit of power set on every device (nvidia-smi -pl); its clock is taken to go with the third root of what "
        "is left for it; absent = the rated power",
        quantity="number", default=None, above=0, at_most=10**5,
    )  # fmt: skip
    power_share: float | None = setting(
        "part of its power, the rated one or the limit, that a device draws in training; absent = all of it",
        quantity="number", default=None, above=0, at_most=1,
    )  # fmt: skip
    power_usage_effectiveness: float | None = setting(
        "energy of the whole data centre over that of its devices; absent = the devices alone",
        quantity="number", default=None, at_least=1, at_most=10,
    )  # fmt: skip
    grid_kg_co2_per_kwh: float | None = setting(
        "CO2 of a kWh of the local grid; absent = no CO2 is said", quantity="number", default=None, at_least=0,
        at_most=10,
    )  # fmt: skip
