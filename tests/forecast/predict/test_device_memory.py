"""What stands around the tensors on a device, and whether it all fits."""

from dataclasses import replace

import pytest

from trainledger import catalog
from trainledger.forecast.predict.device_memory import ROUNDING, device_memory

OVERHEADS = catalog.overheads()


def test_every_overhead_has_a_size_a_source_and_a_date() -> None:
    assert len(OVERHEADS) >= 8
    for each in OVERHEADS.values():
        assert (each.nbytes > 0) != (each.share > 0), each.name
        assert each.what
        assert each.source
        assert each.date.count("-") == 2


def test_the_lines_of_a_device_add_up_and_each_says_how_it_is_known() -> None:
    h100 = catalog.device("h100-sxm")
    memory = device_memory(70 * 10**9, h100, OVERHEADS, tensors=1000, groups=(8, 2, 1))
    by_name = {each.name: each for each in memory.lines}
    assert memory.nbytes == sum(each.nbytes for each in memory.lines)
    assert by_name["tensors"].basis == "exact"
    assert by_name["rounding"].nbytes == 1000 * (ROUNDING - 1)
    assert by_name["rounding"].basis == "bound"
    assert by_name["NCCL buffers"].nbytes == (688 + 544) * 2**20
    assert {by_name[name].basis for name in ("CUDA context", "fragmentation", "NCCL buffers")} == {"assumed"}
    assert all(each.source for each in memory.lines)
    assert memory.allocated_nbytes == 70 * 10**9 + by_name["rounding"].nbytes + 2 * 32 * 2**20
    assert memory.fits


def test_the_box_says_80_gb_and_a_process_gets_what_the_driver_leaves() -> None:
    h100 = catalog.device("h100-sxm")
    assert h100.usable_nbytes is not None
    assert h100.memory_nbytes is not None
    assert h100.usable_nbytes == pytest.approx(79.18 * 2**30, rel=1e-6)
    # 80 GB on the box are 80 GiB of chips: more than 80e9 bytes are usable, fewer than 80 x 2**30.
    assert h100.memory_nbytes < h100.usable_nbytes < 80 * 2**30
    full = device_memory(h100.usable_nbytes, h100, OVERHEADS)
    assert full.fits is False


def test_one_rank_has_no_communicators_and_older_devices_smaller_workspaces() -> None:
    alone = device_memory(10**9, catalog.device("a100-sxm-80gb"), OVERHEADS, groups=(1, 1))
    names = {each.name: each.nbytes for each in alone.lines}
    assert "NCCL buffers" not in names
    assert names["cuBLAS workspaces"] == 2 * 8519680


def test_what_is_not_known_of_a_device_is_not_invented() -> None:
    amd = device_memory(10**9, catalog.device("mi300x"), OVERHEADS, groups=(8,))
    assert [each.name for each in amd.lines] == ["tensors"]
    unknown = device_memory(10**9, replace(catalog.device("a100-sxm-80gb"), usable_nbytes=None), OVERHEADS)
    assert unknown.usable_nbytes == 80 * 10**9
    assert "nominal size" in unknown.usable_source
    nothing = replace(catalog.device("a100-sxm-80gb"), usable_nbytes=None, memory_nbytes=None)
    assert device_memory(10**9, nothing, OVERHEADS).fits is None


@pytest.mark.parametrize("name", catalog.device_names())
def test_usable_memory_is_near_the_number_on_the_box(name: str) -> None:
    device = catalog.device(name)
    if device.usable_nbytes is None:
        return
    assert device.usable_source
    assert device.memory_nbytes is not None
    # 95 GB of a TPU v5p are 95.73 GiB in its compiler's message.
    assert 0.9 * device.memory_nbytes < device.usable_nbytes < 1.09 * device.memory_nbytes
