"""The time of a collective: where its ranks are, and the fastest way that a library has for a message of that size.

Every way costs a start, so many steps from rank to rank, and bytes over a bandwidth (Hockney 1994). Rings and trees are
those of Thakur, Rabenseifner and Gropp (2005, "Optimization of collective communication operations in MPICH"); what
NCCL adds are the ring over several nodes whose channels use every rail, the double binary tree between nodes (Sanders,
Speck and Traeff 2009) with a chain inside each, sums taken in the switch, and three protocols that trade bandwidth for
latency (NVIDIA/nccl, src/graph/tuning.cc). Bandwidth figures agree with nccl-tests' PERFORMANCE.md: of S bytes over n
ranks an all-reduce moves 2 (n - 1) / n S through every rank, an all-gather and a reduce-scatter (n - 1) / n S.

Sizes and ranks may be arrays. n ranks in all, k of them in each of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from math import comb, gcd
from typing import Any

from trainledger.forecast.predict.roofline import NoRate
from trainledger.ledger.core.sizes import greater, smaller
from trainledger.ledger.entry import EVERY_EXPERT, EXPERT_TENSOR
from trainledger.spec.cluster import Fabric, Protocol
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.units import ceil_div

Number = Any  # a number, or an array of them

TREE_RATE = 0.92  # of a ring's bus bandwidth: NVIDIA/nccl, src/graph/tuning.cc, read 2026-11-20
NEVER = 1e9  # seconds of a way that a group does not have
ENDS = "first and last stage"  # which share a tied embedding
AXES = ("tensor", "context", "shard", "replicate", "pipeline")  # from neighbours to the farthest apart


@frozen
class Placement:
    """Where the ranks of a group are: how many, on how many nodes, and how many of them in each.

    Where the nodes have unequal parts, ``in_node`` is the smallest of any group, whose network all others wait for:
    NCCL takes as many channels everywhere as the rank with the fewest has (NVIDIA/nccl, src/init.cc). ``far`` is the
    share of an all-to-all's bytes that pass the network, where a token goes once to each node (see
    `forecast.predict.collective`); None where every rank sends each other its own part.
    """

    ranks: Number
    nodes: Number
    in_node: Number
    far: Number | None = None


def placement(
    layout: Layout, group: str, ranks: Number, devices_per_node: int, spec: ModelSpec | None = None
) -> Placement:
    """Where a group's ranks are, the mesh laid over the devices with tensor ranks next to each other.

    Then come context, shard, replicate and pipeline, as torchtitan builds its mesh (pp, dp_replicate, dp_shard, cp, tp,
    from outermost to innermost; Megatron-LM's default order tp-cp-ep-dp-pp is the same). Expert ranks are neighbours
    among shard x context. ``spec`` is the model whose tokens may be sent once to each node. Groups follow one another,
    so that one of several begins at each multiple of what its size and a node's have in common.

    >>> placement(Layout(tensor=4, shard=64), "shard", 64, 8)
    Placement(ranks=64, nodes=32, in_node=2, far=None)
    >>> placement(Layout(shard=25, replicate=4), "shard", 25, 8)
    Placement(ranks=25, nodes=4, in_node=1, far=None)
    """
    if group == ENDS:  # in one node where all stages are
        together = (layout.devices <= devices_per_node) * 1
        return Placement(ranks, 2 - together, 1 + together)
    apart = _apart(layout, group)
    places = greater(1, devices_per_node // apart)
    common = _gcd(places, ranks)
    alone = layout.devices <= apart * ranks
    rest = (ranks - 1) % places + 1  # what the last node of a group has that begins with one
    in_node = common + alone * (smaller(rest, ranks) - common)
    nodes = ceil_div(ranks + (places - common) * (1 - alone), places)
    if group == "expert" and spec is not None and spec.experts is not None and layout.sends_to_nodes:
        return Placement(ranks, nodes, in_node, other_nodes(spec, nodes) / spec.experts.per_token)
    return Placement(ranks, nodes, in_node)


def _gcd(a: Number, b: Number) -> Number:
    if hasattr(a, "shape") or hasattr(b, "shape"):
        import numpy

        return numpy.gcd(a, b)
    return gcd(a, b)


def _apart(layout: Layout, group: str) -> Number:
    """Devices from one rank of a group to the next."""
    if group.endswith("/ expert"):
        return layout.splits_expert * layout.expert
    if group in (EXPERT_TENSOR, EVERY_EXPERT):  # next to each other
        return 1
    if group == "expert" and layout.folds:
        return layout.splits_expert
    first = {"expert": "context", "shard x context": "context", "tensor / kv_heads": "tensor"}.get(group, group)
    if first not in AXES:
        raise ValueError(f"no group {group!r} of the mesh is known")
    apart: Number = 1
    for axis in AXES[: AXES.index(first)]:
        apart = apart * getattr(layout, axis)
    return apart


def collective_seconds(
    name: str, nbytes: Number, place: Placement, fabric: Fabric, *, unreachable: float | None = None
) -> Number:
    """Seconds of one collective of ``nbytes`` (counted as `Entry.payload`) by the fastest way; a group of one is free.

    ``name`` is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, or send (recv) to a neighbour. A group
    that needs a network that is not known takes ``unreachable`` seconds; without those this raises NoRate.

    >>> from trainledger.spec.cluster import Link
    >>> fabric = Fabric(devices_per_node=8, node=Link(name="x", title="x", bytes_per_second=100e9))
    >>> round(collective_seconds("all_reduce", 8e9, Placement(8, 1, 8), fabric), 3)
    0.14
    """
    if _is_one(place.ranks):
        return 0.0
    far: Number = False if fabric.network is not None else place.nodes > 1
    if unreachable is None and (far.any() if hasattr(far, "shape") else far):
        raise NoRate(
            f"a group of {place.ranks} ranks is on {place.nodes} nodes of {fabric.devices_per_node} devices, and the "
            "network between them is not known (cluster.network names one)"
        )
    seconds = reduce(smaller, _WAYS[name](nbytes, place, fabric))
    if fabric.network is None and unreachable is not None:
        import numpy

        seconds = numpy.where(far, unreachable, seconds)
    return seconds if isinstance(place.ranks, int) else seconds * (place.ranks > 1)


# Ways


def _ring_all_reduce(nbytes: Number, place: Placement, fabric: Fabric) -> Iterator[Number]:
    yield from _ring(nbytes, place, fabric, rounds=2)
    yield from _tree(nbytes, place, fabric)
    yield from _switch(nbytes, place, fabric)


def _ring_once(nbytes: Number, place: Placement, fabric: Fabric) -> Iterator[Number]:
    yield from _ring(nbytes, place, fabric, rounds=1)


def _ring(nbytes: Number, place: Placement, fabric: Fabric, *, rounds: int) -> Iterator[Number]:
    """Every part goes round once or twice; channels on several rails leave each node."""
    n = place.ranks
    for inside, between in _protocols(fabric):
        steps = rounds * ((n - place.nodes) * inside.ring_step_seconds + (place.nodes - 1) * between.ring_step_seconds)
        rate = _rate(place, fabric) * inside.ring_share
        yield inside.start_seconds + steps + rounds * (n - 1) / n * nbytes / rate


def _tree(nbytes: Number, place: Placement, fabric: Fabric) -> Iterator[Number]:
    """Up and down a chain in each node and two binary trees between nodes, each with half of the bytes."""
    # A device in a chain sends every byte up and down; so does a node in the trees, but one of two sends half of it.
    for inside, between in _protocols(fabric):
        up = (place.in_node - 1) * inside.tree_step_seconds + _log2(place.nodes) * between.tree_step_seconds
        chain = 2 * nbytes * (place.in_node > 1) / fabric.node.reached
        seconds = greater(chain, _between(nbytes, place, fabric)) / (TREE_RATE * inside.tree_share)
        yield inside.start_seconds + 2 * up + seconds


def _between(nbytes: Number, place: Placement, fabric: Fabric) -> Number:
    """Seconds of the trees between nodes, over the rails of all of a group's devices in a node."""
    if fabric.network is None:
        return 0.0
    rails = smaller(place.in_node * fabric.network_reached, place.in_node * fabric.node.reached)
    return ((place.nodes > 1) * 1 + (place.nodes > 2)) * nbytes / rails


def _switch(nbytes: Number, place: Placement, fabric: Fabric) -> Iterator[Number]:
    """The switch of a node adds up and spreads; trees join several nodes."""
    # A device sends all of its bytes to be read and its part of the sums: (1 + 1 / k) of the message.
    if fabric.node.switch_share is None:
        return
    k, rate = place.in_node, fabric.node.bytes_per_second * fabric.node.switch_share
    seconds: Number = (1 + 1 / k) * nbytes / rate
    steps = fabric.node.switch_seconds
    if fabric.network is not None:
        _, between = list(_protocols(fabric))[-1]
        seconds = greater(seconds, _between(nbytes, place, fabric) / TREE_RATE)
        steps = steps + 2 * _log2(place.nodes) * between.tree_step_seconds
    if not _is_one(k):
        yield steps + seconds + (k == 1) * NEVER  # one device of a node has nothing to add up there


def _all_to_all(nbytes: Number, place: Placement, fabric: Fabric) -> Iterator[Number]:
    """Every rank sends each other one its part, those of its node over the links and the rest over its own rail."""
    # Where a token goes once to each node, it goes to the rank in the sender's place there and on to those of its
    # experts over the links, while the next ones are on the network (DeepSeek-V3, section 3.2.2).
    n, k = place.ranks, place.in_node
    if place.far is not None:
        yield from _by_nodes(nbytes, place, fabric)
        return
    for inside, between in _protocols(fabric):
        near = (k - 1) * (inside.ring_step_seconds + nbytes / n / (fabric.node.reached * inside.ring_share))
        far: Number = 0.0
        if fabric.network is not None:
            rate = smaller(fabric.network_reached, fabric.node.reached) * inside.ring_share
            far = (place.nodes > 1) * (between.ring_step_seconds * (n - k) + (n - k) / n * nbytes / rate)
        yield inside.start_seconds + near + far


def _by_nodes(nbytes: Number, place: Placement, fabric: Fabric) -> Iterator[Number]:
    """The slower of network and links, which work at the same time: (k - 1) / k of what arrives goes on in its node."""
    k = place.in_node
    for inside, between in _protocols(fabric):
        near = (k - 1) / k * nbytes / (fabric.node.reached * inside.ring_share)
        steps = (k - 1) * inside.ring_step_seconds
        if fabric.network is not None:
            rate = smaller(fabric.network_reached, fabric.node.reached) * inside.ring_share
            near = greater(near, place.far * nbytes / rate)
            steps = steps + (place.nodes - 1) * between.ring_step_seconds
        yield inside.start_seconds + steps + near


def _send(nbytes: Number, place: Placement, fabric: Fabric) -> Iterator[Number]:
    """To the next rank: within a node where all of them are, else the slowest of the sends crosses the network."""
    for inside, between in _protocols(fabric):
        near = inside.ring_step_seconds + nbytes / (fabric.node.reached * inside.ring_share)
        if fabric.network is None:
            yield inside.start_seconds + near
            continue
        rate = smaller(fabric.network.reached, fabric.node.reached) * inside.ring_share
        far = between.ring_step_seconds + nbytes / rate
        crosses = place.nodes > 1
        yield inside.start_seconds + near * (1 - crosses) + far * crosses


def _broadcast(nbytes: Number, place: Placement, fabric: Fabric) -> Iterator[Number]:
    """Down a ring in pieces: the steps once, the bytes once."""
    for inside, between in _protocols(fabric):
        n = place.ranks
        steps = (n - place.nodes) * inside.ring_step_seconds + (place.nodes - 1) * between.ring_step_seconds
        yield inside.start_seconds + steps + nbytes / (_rate(place, fabric) * inside.ring_share)


_WAYS = {
    "all_reduce": _ring_all_reduce,
    "all_gather": _ring_once,
    "reduce_scatter": _ring_once,
    "all_to_all": _all_to_all,
    "send": _send,
    "recv": _send,
    "broadcast": _broadcast,
}


def _protocols(fabric: Fabric) -> Iterator[tuple[Protocol, Protocol]]:
    """The protocols that the links of a node and the network both have, as each of them runs them."""
    if fabric.network is None:
        yield from ((protocol, protocol) for protocol in fabric.node.protocols)
        return
    between = {protocol.name: protocol for protocol in fabric.network.protocols}
    both = [(protocol, between[protocol.name]) for protocol in fabric.node.protocols if protocol.name in between]
    # Other networks have their own protocols: then the last of each, which is for long messages.
    yield from both or [(fabric.node.protocols[-1], fabric.network.protocols[-1])]


def _rate(place: Placement, fabric: Fabric) -> Number:
    """Bytes per second round a ring: of the links, or of the rails of a group in a node where those are less."""
    # Each device has its own share of its node's network, and the other groups of a node have theirs.
    inside: Number = fabric.node.reached
    if fabric.network is None:
        return inside
    rails = smaller(float(inside), place.in_node * fabric.network_reached)
    if isinstance(place.nodes, int):
        return rails if place.nodes > 1 else inside
    return inside + (place.nodes > 1) * (rails - inside)


def _log2(nodes: Number) -> Number:
    """Levels of a binary tree."""
    if isinstance(nodes, int):
        return (nodes - 1).bit_length()
    import numpy

    return numpy.ceil(numpy.log2(nodes))


def _is_one(size: Number) -> bool:
    return isinstance(size, int) and size == 1


# Tokens that go to experts once for each node


def other_nodes(spec: ModelSpec, nodes: Number) -> Number:
    """The expected number of nodes, its own left out, that a token is sent to; ``nodes`` may be an array.

    >>> from trainledger.answers.load import model
    >>> ungrouped = {"feed_forward.router.groups": 1, "feed_forward.router.top_groups": 1}
    >>> spec = model("deepseek-v3", **ungrouped)  # 8 of 256 experts
    >>> other_nodes(spec, 1), round(other_nodes(spec, 8), 3)
    (0.0, 4.633)
    """
    if not hasattr(nodes, "shape"):
        return (nodes - 1) * _has_one(spec, nodes)
    import numpy as np

    known = {each: (each - 1) * _has_one(spec, each) for each in set(nodes.ravel().tolist())}
    return np.array([known[each] for each in nodes.ravel().tolist()]).reshape(nodes.shape)


def _has_one(spec: ModelSpec, nodes: int) -> float:
    """The chance that a node has at least one of a token's experts."""
    # One minus that of all K being drawn from the others: C(E - E / M, K) / C(E, K); where groups are drawn first, the
    # same within the experts of those, by how many of the drawn groups are the node's.
    assert spec.experts is not None
    router = spec.experts.router
    experts, chosen, groups, drawn = spec.experts.n_experts, spec.experts.per_token, router.groups, router.top_groups
    here = experts // nodes
    if drawn >= groups or (groups % nodes and nodes % groups):
        return 1 - _missed(experts, here, chosen)
    candidates, of_group = drawn * experts // groups, experts // groups
    if groups >= nodes:
        own = groups // nodes
        hits = (
            (comb(own, index) * comb(groups - own, drawn - index), index * of_group)
            for index in range(min(own, drawn) + 1)
        )
        return float(sum(ways * (1 - _missed(candidates, size, chosen)) for ways, size in hits) / comb(groups, drawn))
    return drawn / groups * (1 - _missed(candidates, here, chosen))


def _missed(experts: int, here: int, chosen: int) -> float:
    """The chance that none of the ``chosen`` of so many experts is among those that are ``here``."""
    return comb(experts - here, chosen) / comb(experts, chosen)
