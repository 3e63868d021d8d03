"""The cluster: which devices, how many, and the links between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting
from trainledger.spec.units import MEGA


@frozen(kw_only=True)
class Protocol:
    """A protocol of a communication library over a link: its latencies, and the share of the rate that it reaches.

    ``start_seconds`` is the latency of a call, ``ring_step_seconds`` and ``tree_step_seconds`` those of a step from one
    rank to the next. ``ring_share`` and ``tree_share`` are shares of the link's rate with long messages.
    """

    name: str
    start_seconds: float = 0.0
    ring_step_seconds: float = 0.0
    tree_step_seconds: float = 0.0
    ring_share: float = 1.0
    tree_share: float = 1.0


@frozen(kw_only=True)
class Link:
    """A link: bytes per second of each device, one way, and the share of them that long messages reach.

    ``switch_share`` is the share with reductions in the switch (NVLink SHARP), whose latency is ``switch_seconds``;
    None for a link without them. ``memory_bytes_per_second`` is the bandwidth of the memory of a host behind it.
    """

    name: str
    title: str
    bytes_per_second: float
    share: float = 1.0
    switch_share: float | None = None
    switch_seconds: float = 0.0
    memory_bytes_per_second: float | None = None
    protocols: tuple[Protocol, ...] = (Protocol(name="plain"),)
    basis: str = "assumed"
    source: str = ""
    date: str = ""
    unverified: tuple[str, ...] = ()

    @property
    def reached(self) -> float:
        """Bytes per second of a device in long messages."""
        return self.bytes_per_second * self.share

    @property
    def bound(self) -> Link:
        """The link at its data sheet: full bandwidth, no latency."""
        switch = None if self.switch_share is None else 1.0
        plain = (Protocol(name="plain"),)
        return replace(self, share=1.0, switch_share=switch, switch_seconds=0.0, protocols=plain, basis="bound")


@frozen(kw_only=True)
class Fabric:
    """The connections of a cluster's devices: ``node`` links within a node, ``network`` between nodes.

    ``network`` is None where it is not known: then groups must stay within a node. ``host`` connects a device to its
    host's memory. Collectives reach ``network_share`` of the network's rate (`Efficiency.network_share`), sends between
    two devices all of it.
    """

    devices_per_node: int
    node: Link
    network: Link | None = None
    host: Link | None = None
    network_share: float = 1.0

    @property
    def network_reached(self) -> float:
        """Bytes per second of a device between nodes in a collective; 0 where no network is known."""
        return 0.0 if self.network is None else self.network.reached * self.network_share

    @property
    def bound(self) -> Fabric:
        """The fabric at its data sheets: no run is faster."""
        return replace(
            self,
            node=self.node.bound,
            network=None if self.network is None else self.network.bound,
            host=None if self.host is None else self.host.bound,
            network_share=1.0,
        )


# Eight devices that share 100 Mbit/s have 1.6 MB/s each: a smaller number was meant in another unit.
LEAST_RATE = MEGA
_RATE: dict[str, Any] = {"quantity": "bytes/s", "at_least": LEAST_RATE, "at_most": 10**15}
_EACH = _RATE | {"unit": 'bytes per second for each device; of 400 Gbit/s write "400Gbit/s"'}
_ALL = _RATE | {"unit": 'bytes per second of all devices together; of 5 GB/s write "5GB/s"'}


@frozen(kw_only=True)
class Cluster:
    """The devices of a run."""

    device: str = setting("a device of the catalog, or this-machine", "this-machine")
    count: int = setting("number of devices", 1, at_least=1, at_most=10**7)
    backend: str = setting("torch device: auto, cpu, cuda or mps", "auto", choices=("auto", "cpu", "cuda", "mps"))
    devices_per_node: int | None = setting(
        "devices that the links of one node connect; absent = the usual number for the device",
        None,
        at_least=1,
        at_most=10**6,
    )
    network: str | None = setting(
        "link of the catalog between nodes (trainledger catalog links); absent = the device's usual one", None
    )
    network_bytes_per_second: int | None = setting(
        'bandwidth of the network per device, one way, by its data sheet ("50GB/s", "400Gbit/s"); absent = that of '
        "cluster.network",
        None,
        **_EACH,
    )
    network_reached_bytes_per_second: int | None = setting(
        "measured bandwidth of long messages over the network per device, one way: the bus bandwidth of nccl-tests "
        "over several whole nodes, divided by the devices of one; absent = the data sheet's times the catalog's share",
        None,
        **_EACH,
    )
    host_memory_nbytes: int | None = setting(
        'memory of a node\'s host ("512GB"); absent = not known, so that nothing says whether a run fits there',
        None,
        quantity="nbytes",
        at_least=1,
        at_most=10**15,
    )
    host_update_bytes_per_second: int | None = setting(
        "rate at which a host updates an offloaded optimizer: bytes that the update reads and writes, all processes of "
        "a node together; absent = a quarter of its memory bandwidth",
        None,
        **_ALL,
    )
    price_per_device_hour: float | None = setting(
        "price of one device for an hour; absent = no cost", None, quantity="amount", at_least=0, at_most=10**9
    )
    mtbf_device_hours: float | None = setting(
        "hours of one device between interruptions of the run; absent = as published for the device",
        None,
        above=0,
        at_most=10**12,
    )
    restart_seconds: float | None = setting(
        "from an interruption to the next step, without reading the checkpoint; absent = as published",
        None,
        quantity="seconds",
        at_least=0,
        at_most=10**7,
    )
    storage_bytes_per_second: int | None = setting(
        "rate at which all devices together write checkpoints to storage and read tokens; absent = as published",
        None,
        **_ALL,
    )
    loader_tokens_per_second: int | None = setting(
        "tokens that the data loaders of all devices together deliver in a second; absent = steps never wait for data",
        None,
        at_least=1,
        at_most=10**15,
    )
    memory_margin_nbytes: int | None = setting(
        "memory of every device to keep free: a run, and a layout of a search, fits only with that much to spare "
        '("8GB"); absent = none, but a search takes layouts whose chance to fit is 80 %, else one half',
        None,
        quantity="nbytes",
        at_least=0,
        at_most=10**15,
    )
    power_limit_watts: float | None = setting(
        "power limit of every device (nvidia-smi -pl); assuming a clock that falls with the cube root of the power; "
        "absent = the rated power",
        None,
        above=0,
        at_most=10**5,
    )
    power_share: float | None = setting(
        "share of its rated power (or the limit) that a device draws in training; absent = all of it",
        None,
        above=0,
        at_most=1,
    )
    power_usage_effectiveness: float | None = setting(
        "energy of the data centre over that of its devices; absent = energy of the devices only",
        None,
        at_least=1,
        at_most=10,
    )
    grid_kg_co2_per_kwh: float | None = setting(
        "CO2 of a kWh of the local grid; absent = no CO2 figure", None, at_least=0, at_most=10
    )
