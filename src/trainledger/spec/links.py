"""Links between the devices of a node, and the network between nodes."""

from __future__ import annotations

from dataclasses import replace

from trainledger.spec.frozen import frozen


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
    None for a link without them.
    """

    name: str
    title: str
    bytes_per_second: float
    share: float = 1.0
    switch_share: float | None = None
    switch_seconds: float = 0.0
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
    """How the devices of a cluster are connected: ``node`` links within a node, ``network`` between nodes.

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
            self, node=self.node.bound, network=None if self.network is None else self.network.bound,
            host=None if self.host is None else self.host.bound, network_share=1.0,
        )  # fmt: skip
