"""Collectives: where groups stand, closed forms, measured bus bandwidths, and what must never happen."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger import catalog
from trainledger.forecast.predict.collective import Placement, collective_seconds, placement
from trainledger.forecast.predict.roofline import NoRate
from trainledger.spec.cluster import Fabric, Link
from trainledger.spec.layout import Layout
from trainledger.spec.units import GIGA

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")
GIBI = 2**30
PLAIN = Fabric(
    devices_per_node=8, node=Link(name="near", title="near", bytes_per_second=100e9),
    network=Link(name="far", title="far", bytes_per_second=10e9),
)  # fmt: skip


def place(ranks: int, per_node: int = 8) -> Placement:
    return Placement(ranks, -(-ranks // per_node), min(ranks, per_node))


def bus_bandwidth(name: str, ranks: int, nbytes: int, fabric: Fabric) -> float:
    """GB/s as nccl-tests print it."""
    # What each rank sends in a bandwidth-optimal collective (nccl-tests, PERFORMANCE.md).
    turns = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1, "recv": 1, "broadcast": 1}
    sent = nbytes * turns.get(name, (ranks - 1) / ranks)
    return sent / collective_seconds(name, nbytes, place(ranks), fabric) / GIGA


H100, A100 = (catalog.device(name).fabric for name in ("h100-sxm", "a100-sxm-40gb"))
P4D = replace(A100, network=catalog.link("efa-v1"))
HDR_4 = replace(A100, network=replace(catalog.link("hdr"), bytes_per_second=12.5e9))  # four ports for eight devices

# Bus bandwidth (GB/s) that others measured: collective, ranks, bytes, fabric, GB/s, and how near we must be.
MEASURED = [
    ("all_reduce", 8, 8 * GIBI, H100, 480, 0.02),  # NVIDIA/nccl-tests#212, with NVLink SHARP
    ("all_gather", 8, 8 * GIBI, H100, 370, 0.02),  # NVIDIA/nccl-tests#212, round a ring
    ("all_reduce", 32, 8 * GIBI, H100, 330.93, 0.15),  # aigatech/vpbenchmarking, 4 nodes with NDR
    ("all_gather", 32, 8 * GIBI, H100, 323.53, 0.15),  # the same
    ("all_reduce", 8, GIBI, A100, 230.77, 0.02),  # NVIDIA/nccl#527, p4d
    ("all_reduce", 16, GIBI, P4D, 57.17, 0.1),  # the same on two nodes: a tree needs half as much between them
    ("all_reduce", 24, GIBI, P4D, 31.77, 0.1),
    ("all_reduce", 32, GIBI, P4D, 29.61, 0.1),
    ("all_reduce", 24, 128 * 2**20, HDR_4, 96, 0.1),  # NVIDIA/nccl-tests#119, the best of its sizes
]


@pytest.mark.parametrize(("name", "ranks", "nbytes", "fabric", "measured", "near"), MEASURED)
def test_bus_bandwidths_that_others_measured(name, ranks, nbytes, fabric, measured, near):
    assert bus_bandwidth(name, ranks, nbytes, fabric) == pytest.approx(measured, rel=near)


def test_large_messages_take_what_the_formulas_of_thakur_say() -> None:
    for ranks in (2, 4, 8):
        share = (ranks - 1) / ranks * GIBI / 100e9
        assert collective_seconds("all_reduce", GIBI, place(ranks), PLAIN) == pytest.approx(2 * share)
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            assert collective_seconds(name, GIBI, place(ranks), PLAIN) == pytest.approx(share)
        assert collective_seconds("send", GIBI, place(ranks), PLAIN) == pytest.approx(GIBI / 100e9)


def test_small_messages_take_the_tree_and_large_ones_the_ring() -> None:
    many = place(1024)
    steps = 2 * (many.ranks - many.nodes) * 0.6e-6 + 2 * (many.nodes - 1) * 2.7e-6  # a ring's, in NCCL's table
    assert collective_seconds("all_reduce", 8, many, H100) < steps / 5
    large = collective_seconds("all_reduce", 64 * GIBI, many, H100)
    ring = 2 * 1023 / 1024 * 64 * GIBI / (450e9 * 0.824)
    assert ring <= large <= 1.05 * ring


def test_every_device_of_a_node_brings_its_own_rail() -> None:
    """Of groups that have one device in each node, each has one rail; a group of whole nodes has all of them."""
    whole, one = place(64), Placement(8, 8, 1)
    fast = collective_seconds("all_gather", GIBI, whole, PLAIN) / (63 / 64)
    slow = collective_seconds("all_gather", GIBI, one, PLAIN) / (7 / 8)
    assert slow / fast == pytest.approx(8)


def test_groups_stand_where_the_mesh_puts_them() -> None:
    layout = Layout(tensor=4, context=2, shard=8, replicate=2, pipeline=2, expert=4)
    stands = {
        ("tensor", 4): (1, 4), ("context", 2): (1, 2), ("shard x context", 16): (8, 2), ("replicate", 2): (2, 1),
        ("pipeline", 2): (2, 1), ("expert", 4): (2, 2), ("shard x context / expert", 4): (4, 1),
        ("first and last stage", 2): (2, 1), ("tensor / kv_heads", 2): (1, 2),
    }  # fmt: skip
    for (group, ranks), (nodes, in_node) in stands.items():
        assert placement(layout, group, ranks, 8) == Placement(ranks, nodes, in_node), group
    with pytest.raises(ValueError, match="no group 'rows'"):
        placement(layout, "rows", 2, 8)


def test_a_group_over_nodes_without_a_network_has_no_time() -> None:
    alone = replace(PLAIN, network=None)
    assert collective_seconds("all_reduce", GIBI, place(8), alone) > 0
    with pytest.raises(NoRate, match=r"16 ranks is on 2 nodes of 8 devices.*cluster.network"):
        collective_seconds("all_reduce", GIBI, place(16), alone)


sizes, ranks = st.integers(1, 2**36), st.sampled_from([1, 2, 3, 4, 8, 16, 64, 1024])
fabrics = st.sampled_from([PLAIN, H100, P4D])


@given(st.sampled_from(NAMES), sizes, fabrics)
def test_one_rank_costs_nothing(name: str, nbytes: int, fabric: Fabric) -> None:
    assert collective_seconds(name, nbytes, place(1), fabric) == 0


@given(st.sampled_from(NAMES), sizes, sizes, ranks, fabrics)
def test_more_bytes_never_take_less(name: str, a: int, b: int, ranks: int, fabric: Fabric) -> None:
    less, more = sorted((a, b))
    assert collective_seconds(name, less, place(ranks), fabric) <= collective_seconds(name, more, place(ranks), fabric)


@given(st.sampled_from(NAMES), sizes, ranks, fabrics, st.booleans())
def test_twice_the_bandwidth_is_never_slower(name: str, nbytes: int, ranks: int, fabric: Fabric, node: bool) -> None:
    link = fabric.node if node else fabric.network
    twice = replace(link, bytes_per_second=2 * link.bytes_per_second)
    faster = replace(fabric, node=twice) if node else replace(fabric, network=twice)
    before, after = (collective_seconds(name, nbytes, place(ranks), each) for each in (fabric, faster))
    assert after <= before * (1 + 1e-12)


@given(st.sampled_from(NAMES), sizes, ranks, fabrics)
def test_a_data_sheet_is_a_bound(name: str, nbytes: int, ranks: int, fabric: Fabric) -> None:
    where = place(ranks)
    assert collective_seconds(name, nbytes, where, fabric.bound) <= collective_seconds(name, nbytes, where, fabric)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fabric", [PLAIN, H100, P4D])
def test_arrays_give_what_each_element_does(name: str, fabric: Fabric) -> None:
    counts = [1, 2, 8, 16, 1024]
    ranks, nbytes = np.array(counts), np.array([10, 10**3, 10**6, 10**9, 10**10])
    every = collective_seconds(name, nbytes, Placement(ranks, -(-ranks // 8), np.minimum(ranks, 8)), fabric)
    each = [collective_seconds(name, int(b), place(n), fabric) for n, b in zip(counts, nbytes, strict=True)]
    assert every == pytest.approx(each)


@given(st.sampled_from(NAMES), sizes, ranks, st.sampled_from([PLAIN, H100, P4D]), st.floats(0.1, 0.9))
def test_less_of_the_network_slows_collectives_between_nodes_only(name, nbytes, ranks, fabric, share):
    busy = replace(fabric, network_share=share)
    whole, part = (collective_seconds(name, nbytes, place(ranks), each) for each in (fabric, busy))
    if ranks <= fabric.devices_per_node or name == "send":
        assert part == whole
    else:
        assert whole <= part <= whole / share * (1 + 1e-9)
    assert busy.bound == fabric.bound


@pytest.mark.parametrize("name", [each for each in NAMES if each != "send"])
def test_long_messages_between_nodes_take_what_the_network_carries_of_them(name: str) -> None:
    nbytes, far = 10**12, Placement(64, 64, 1)
    halved = collective_seconds(name, nbytes, far, replace(PLAIN, network_share=0.5))
    assert halved == pytest.approx(2 * collective_seconds(name, nbytes, far, PLAIN))


@given(
    tensor=st.sampled_from([1, 2, 4, 8]), shard=st.integers(1, 30), replicate=st.integers(1, 12),
    per_node=st.sampled_from([4, 8, 16, 64]),
)  # fmt: skip
def test_where_groups_stand_is_what_laying_out_every_rank_gives(tensor, shard, replicate, per_node):
    layout = Layout(tensor=tensor, shard=shard, replicate=replicate)
    for group, ranks, apart in (("shard", shard, tensor), ("replicate", replicate, tensor * shard)):
        if per_node % apart and apart < per_node:
            continue  # uneven steps from rank to rank: compared by as many as always fit
        parts = []
        for first in range(layout.devices):
            if first // apart % ranks == 0:
                devices = [first + rank * apart for rank in range(ranks)]
                nodes = [device // per_node for device in devices]
                parts.append([nodes.count(node) for node in dict.fromkeys(nodes)])
        found = placement(layout, group, ranks, per_node)
        smallest, most = min(map(min, parts)), max(map(len, parts))
        assert found.in_node <= smallest, (group, parts)
        assert most <= found.nodes <= -(-ranks // found.in_node), (group, parts)
        places = max(1, per_node // apart)
        if places % ranks == 0 or ranks % places == 0 or len(parts) == layout.devices // ranks == apart:
            assert (found.in_node, found.nodes) == (smallest, most), (group, parts)
        shapes = placement(layout, group, np.array([ranks, ranks]), per_node)
        assert (shapes.in_node == found.in_node).all()
        assert (shapes.nodes == found.nodes).all()


@pytest.mark.parametrize(("stages", "devices", "nodes"), [(4, 8, 1), (8, 8, 1), (2, 8, 1), (4, 16, 2), (3, 6, 1)])
def test_the_ends_of_a_pipeline_share_a_node_where_all_of_it_does(stages: int, devices: int, nodes: int) -> None:
    layout = Layout(pipeline=stages, shard=devices // stages)
    assert placement(layout, "first and last stage", 2, 8) == Placement(2, nodes, 3 - nodes)


def test_a_group_with_one_rank_alone_on_a_node_waits_for_its_network() -> None:
    """25 ranks of an all-gather on nodes of 8: the last one has the network of one device (NCCL takes the minimum)."""
    alone, even = (
        collective_seconds("all_gather", 1.76e9, placement(Layout(shard=ranks, replicate=4), "shard", ranks, 8), H100)
        for ranks in (25, 24)
    )
    assert 5 < alone / even < 9
