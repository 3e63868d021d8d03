"""The cluster: which devices, how many, and what a calibration measured on them."""

from __future__ import annotations

from dataclasses import replace

from trainledger.spec.efficiency import Efficiency
from trainledger.spec.error_model import ErrorModel
from trainledger.spec.frozen import frozen
from trainledger.spec.links import Fabric
from trainledger.spec.setting import setting
from trainledger.spec.units import MEGA

# Eight devices that share 100 Mbit/s have 1.6 MB/s each: a smaller number was meant in another unit.
LEAST_RATE = MEGA
_FOR_EACH = 'bytes per second for each device; of 400 Gbit/s write "400Gbit/s"'
_OF_ALL = 'bytes per second of all devices together; of 5 GB/s write "5GB/s"'


@frozen
class Device:
    """A device of the catalog, or this machine as its calibration describes it.

    Peaks are dense FLOP/s by dtype; what is unknown is absent, never zero and never another device's.
    ``memory_nbytes`` is the size by its data sheet, ``usable_nbytes`` what its driver leaves to a process (None: not
    known), as read in ``usable_source``. ``compute_capability`` is NVIDIA's generation number.
    ``link_bytes_per_second`` goes one way. ``unverified`` names the numbers that were not read in the source.
    ``basis`` is ``assumed`` for a data sheet and ``measured`` for a calibration. ``multiprocessors`` compute
    tiles of a matmul in parallel. ``efficiency`` is the share of the data sheet that the device reaches; None: not
    known, so that times are bounds. ``clock`` is the share of the clock under a power limit. ``overheads`` is its
    memory outside tensors, ``published`` what runs on such devices reported, ``errors`` what predictions of published
    runs were off by.
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
    errors: ErrorModel | None = None

    @property
    def capacity_nbytes(self) -> int | None:
        """Its usable memory, or that of its data sheet where nothing else is known."""
        return self.memory_nbytes if self.usable_nbytes is None else self.usable_nbytes

    def keeping_free(self, nbytes: int) -> Device:
        """The device without so many bytes of its memory."""
        sizes = self.memory_nbytes, self.usable_nbytes
        memory, usable = (None if each is None else each - nbytes for each in sizes)
        return replace(self, memory_nbytes=memory, usable_nbytes=usable)

    @property
    def step_fabric(self) -> Fabric | None:
        """The fabric with the network share of a step's collectives; its bound where the efficiency is not known."""
        if self.fabric is None:
            return None
        if self.efficiency is None:
            return self.fabric.bound
        return replace(self.fabric, network_share=self.efficiency.network_share)

    @property
    def contention_share(self) -> float:
        """The share of an overlapped collective's time that compute loses to it; 0 without a known efficiency."""
        return 0.0 if self.efficiency is None else self.efficiency.contention_share


@frozen
class Overhead:
    """Memory of a device outside tensors: bytes, or a share of the tensors' bytes."""

    name: str
    what: str
    source: str
    date: str
    nbytes: int = 0
    share: float = 0.0


@frozen
class Published:
    """A number published of other runs, used where the run file gives none."""

    name: str
    value: float
    what: str
    source: str
    date: str


@frozen(kw_only=True)
class Cluster:
    """The devices of a run."""

    device: str = setting("a device of the catalog, or this-machine", quantity="text", default="this-machine")
    count: int = setting("number of devices", default=1, at_least=1, at_most=10**7)
    backend: str = setting(
        "torch device: auto, cpu, cuda or mps", quantity="text", default="auto", choices=("auto", "cpu", "cuda", "mps")
    )
    devices_per_node: int | None = setting(
        "devices that the links of one node connect; absent = the usual number for the device",
        default=None, at_least=1, at_most=10**6,
    )  # fmt: skip
    network: str | None = setting(
        "link of the catalog between nodes (trainledger catalog links); absent = the device's usual one",
        quantity="text", default=None,
    )  # fmt: skip
    network_bytes_per_second: int | None = setting(
        'bandwidth of the network per device, one way, by its data sheet ("50GB/s", "400Gbit/s"); absent = that of '
        "cluster.network",
        quantity="bytes/s", default=None, at_least=LEAST_RATE, at_most=10**15, unit=_FOR_EACH,
    )  # fmt: skip
    network_reached_bytes_per_second: int | None = setting(
        "measured bandwidth of long messages over the network per device, one way: the bus bandwidth of nccl-tests "
        "over several whole nodes, divided by the devices of one; absent = the data sheet's times the catalog's share",
        quantity="bytes/s", default=None, at_least=LEAST_RATE, at_most=10**15, unit=_FOR_EACH,
    )  # fmt: skip
    price_per_device_hour: float | None = setting(
        "price of one device for an hour; absent = no cost", quantity="number", default=None, at_least=0,
        at_most=10**9,
    )  # fmt: skip
    mtbf_device_hours: float | None = setting(
        "hours of one device between interruptions of the run; absent = as published for the device",
        quantity="number", default=None, above=0, at_most=10**12,
    )  # fmt: skip
    restart_seconds: float | None = setting(
        "from an interruption to the next step, without reading the checkpoint; absent = as published",
        quantity="seconds", default=None, at_least=0, at_most=10**7,
    )  # fmt: skip
    storage_bytes_per_second: int | None = setting(
        "rate at which all devices together write checkpoints to storage and read tokens; absent = as published",
        quantity="bytes/s", default=None, at_least=LEAST_RATE, at_most=10**15, unit=_OF_ALL,
    )  # fmt: skip
    loader_tokens_per_second: int | None = setting(
        "tokens that the data loaders of all devices together deliver in a second; absent = steps never wait for data",
        default=None, at_least=1, at_most=10**15,
    )  # fmt: skip
    memory_margin_nbytes: int | None = setting(
        "memory of every device to keep free: a run, and a layout of a search, fits only with that much to spare "
        '("8GB"); absent = none, but a search takes no layout whose chance to fit is below one half',
        quantity="nbytes", default=None, at_least=0, at_most=10**15,
    )  # fmt: skip
    power_limit_watts: float | None = setting(
        "power limit of every device (nvidia-smi -pl); assuming a clock that falls with the cube root of the power; "
        "absent = the rated power",
        quantity="number", default=None, above=0, at_most=10**5,
    )  # fmt: skip
    power_share: float | None = setting(
        "share of its rated power (or the limit) that a device draws in training; absent = all of it",
        quantity="number", default=None, above=0, at_most=1,
    )  # fmt: skip
    power_usage_effectiveness: float | None = setting(
        "energy of the data centre over that of its devices; absent = energy of the devices only",
        quantity="number", default=None, at_least=1, at_most=10,
    )  # fmt: skip
    grid_kg_co2_per_kwh: float | None = setting(
        "CO2 of a kWh of the local grid; absent = no CO2 figure", quantity="number", default=None, at_least=0,
        at_most=10,
    )  # fmt: skip
