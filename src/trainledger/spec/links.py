"""What devices talk over: the links inside a node, and the network between nodes."""

from __future__ import annotations

from dataclasses import replace

from trainledger.frozen import frozen


@frozen(kw_only=True)
class Protocol:
    """One way in which a library moves a message over a link: what it costs to begin, and the share that it reaches.

    ``start_seconds`` a call takes whatever its size, ``ring_step_seconds`` and ``tree_step_seconds`` each step from one
    rank to the next. ``ring_share`` and ``tree_share`` are taken of what the link reaches with long messages.
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

    ``switch_share`` is the share where the switch itself adds up (NVLink SHARP), which takes ``switch_seconds`` to
    begin; None where none does.
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
        """The link at its data sheet: all of its bandwidth, and nothing to begin."""
        switch = None if self.switch_share is None else 1.0
        plain = (Protocol(name="plain"),)
        return replace(self, share=1.0, switch_share=switch, switch_seconds=0.0, protocols=plain, basis="bound")


@frozen(kw_only=True)
class Fabric:
    """How the devices of a cluster are joined: so many to a node, ``node`` between those, ``network`` between nodes.

    ``network`` is None where it is not known: then groups must stay within a node. ``host`` joins a device to its
    host's memory. ``network_share`` of what the network reaches is left to collectives (`Efficiency.network_share`);
    sends from one device to another have all of it.
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
        """The same at data sheets: no run is faster."""
        return replace(
            self, node=self.node.bound, network=None if self.network is None else self.network.bound,
            host=None if self.host is None else self.host.bound, network_share=1.0,
        )  # fmt: skip
