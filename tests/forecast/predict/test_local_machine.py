"""What a calibration measured beyond kernels reaches the forecast: links between ranks, host copies, disk, loader."""

from dataclasses import replace

import pytest

import trainledger as tl
from models import sizes
from trainledger.forecast.predict.clock import MeasuredLinks, bus_factor, link_fits, of_each_rank, rank_contention
from trainledger.forecast.predict.parallel_step import layout_time, spans
from trainledger.forecast.predict.predict import predict
from trainledger.forecast.predict.roofline import NoRate
from trainledger.forecast.predict.run import conditions
from trainledger.forecast.predict.step import host_seconds
from trainledger.ledger.entry import Entry
from trainledger.ledger.ranks import accounts
from trainledger.spec.calibration import (
    COLLECTIVES,
    Calibration,
    CollectiveTime,
    CopyTime,
    KernelTime,
    read_calibration,
    write_calibration,
)

LATENCY, BUS = 1e-4, 1e9


def kernel(kind, phase=""):
    return KernelTime(
        kind=kind, dtype="fp32", shape=(64, 64, 64), flops=2 * 64**3, nbytes=3 * 4 * 64**2, seconds=1e-5, phase=phase
    )


def collectives(names=COLLECTIVES, bus=BUS):
    return tuple(
        CollectiveTime(
            name=name, backend="gloo", ranks=2, nbytes=nbytes,
            seconds=LATENCY + nbytes * bus_factor(name, 2) / bus,
        )
        for name in names
        for nbytes in (10**4, 10**6, 10**8)
    )  # fmt: skip


MACHINE = Calibration(
    title="a machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=2, cores=2,
    kernels=(kernel("matmul"), kernel("attention"), kernel("attention", "backward"), kernel("copy")),
    operation_seconds=1e-6, storage_bytes_per_second=1e8, memory_nbytes=8 * 10**9, collectives=collectives(),
)  # fmt: skip


def run(**layout):
    model = sizes(V=512, D=64, L=2, T=64, H=2, F=128)  # fmt: skip
    count = 1
    for ranks in layout.values():
        count *= ranks
    return tl.load(
        {
            "model": model, "recipe": {"seq_len": 64, "global_batch": 8, "micro_batch": 1, "steps": 10},
            "layout": layout, "cluster": {"count": count, "backend": "cpu"},
        }
    )  # fmt: skip


def test_a_measured_collective_takes_what_it_took_and_other_groups_go_by_the_bus_bandwidth():
    links = MeasuredLinks(tuple(link_fits(MACHINE.collectives)))
    for each in MACHINE.collectives:
        assert links.seconds(each.name, each.nbytes, 2) == pytest.approx(each.seconds)
    four = links.seconds("all_reduce", 10**8, 4)
    assert four == pytest.approx(3 * LATENCY + 10**8 * 1.5 / BUS)
    assert links.seconds("send", 10**6, 2) == links.seconds("all_to_all", 10**6, 2)
    with pytest.raises(NoRate, match="no broadcast between ranks of this machine was measured"):
        MeasuredLinks(tuple(link_fits(collectives(["all_reduce"])))).seconds("broadcast", 10, 2)


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}])
def test_ranks_of_this_machine_have_a_step_time(layout):
    spread = run(**layout)
    ranks = accounts(spread, backend="cpu")
    step = layout_time(ranks, MACHINE)
    assert step.seconds > 0
    assert sum(step.causes.values()) == pytest.approx(step.seconds)
    assert step.causes["exposed communication"] > 0
    slower = layout_time(ranks, replace(MACHINE, collectives=collectives(bus=BUS / 10)))
    assert slower.seconds > step.seconds
    assert any("links of this machine (gloo, measured 2026-01-02)" in each for each in step.notes)
    assert spans(ranks, MACHINE)
    without = layout_time(ranks, replace(MACHINE, collectives=()))
    assert without.seconds is None
    assert "no link between devices of this machine was measured" in without.notes[0]


def test_two_ranks_of_two_cores_take_half_the_machine_each():
    own = of_each_rank(MACHINE, 2)
    assert [each.seconds for each in own.kernels] == [2 * each.seconds for each in MACHINE.kernels]
    assert own.memory_nbytes == MACHINE.memory_nbytes // 2
    assert own.operation_seconds == MACHINE.operation_seconds
    assert rank_contention(MACHINE, 2) == 1.0
    one_thread = replace(MACHINE, threads=1)  # OMP_NUM_THREADS=1: the second rank has a core of its own
    assert of_each_rank(one_thread, 2).kernels == MACHINE.kernels
    assert of_each_rank(one_thread, 4).kernels[0].seconds == 2 * MACHINE.kernels[0].seconds
    gpu = replace(MACHINE, backend="cuda")
    assert of_each_rank(gpu, 2) == gpu
    assert rank_contention(gpu, 2) == 0.0


def test_mfu_of_ranks_that_share_a_machine_is_of_its_peak():
    alone, spread = predict(run(), MACHINE, backend="cpu"), predict(run(replicate=2), MACHINE, backend="cpu")
    assert 2 * spread.peak_flops_per_second == pytest.approx(alone.peak_flops_per_second)
    assert spread.usable_nbytes == alone.usable_nbytes // 2


def test_steps_wait_for_a_measured_loader_and_a_measured_disk():
    around = conditions(run(), replace(MACHINE, loader_tokens_per_second=100.0, read_bytes_per_second=7e7))
    assert (around.loader_tokens_per_second, around.read_bytes_per_second) == (100.0, 7e7)
    assert around.storage_bytes_per_second == 1e8
    slow = predict(run(), replace(MACHINE, loader_tokens_per_second=100.0), backend="cpu")
    assert slow.run_step_seconds == pytest.approx(8 * 64 / 100.0)
    disk = predict(run(), replace(MACHINE, read_bytes_per_second=50.0), backend="cpu")
    assert disk.run_step_seconds == pytest.approx(8 * 64 * 2 / 50.0)
    said = tl.load(run(), {"cluster.loader_tokens_per_second": 200, "cluster.storage_bytes_per_second": "1GB"})
    own = conditions(said, replace(MACHINE, loader_tokens_per_second=100.0, read_bytes_per_second=1.0))
    assert (own.loader_tokens_per_second, own.read_bytes_per_second) == (200, None)


def test_transfers_take_the_measured_rate_of_pinned_memory():
    entry = Entry("offload", "", "forward", "transfer", read=10**9)
    assert host_seconds(entry, MACHINE) is None
    copies = (
        CopyTime(what="to device, pageable", nbytes=10**9, seconds=1.0),
        CopyTime(what="to device, pinned", nbytes=10**9, seconds=0.1),
        CopyTime(what="to host, pinned", nbytes=10**9, seconds=0.2),
    )
    assert host_seconds(entry, replace(MACHINE, host_copies=copies)) == pytest.approx(0.2)
    assert conditions(run(), replace(MACHINE, host_copies=copies)).host_bytes_per_second == pytest.approx(5e9)


def test_the_new_rates_are_kept_and_a_file_of_the_format_before_is_read(tmp_path):
    path = tmp_path / "machine.toml"
    copies = (CopyTime(what="to host, pinned", nbytes=10, seconds=0.2), CopyTime(what="to device", nbytes=1, note="x"))
    whole = replace(MACHINE, host_copies=copies, loader_tokens_per_second=1e6, read_bytes_per_second=1e9)
    write_calibration(whole, path)
    assert read_calibration(path) == whole
    old = replace(MACHINE, cores=None, collectives=())
    write_calibration(old, path)
    path.write_text(path.read_text().replace("format = 3", "format = 2"))
    assert read_calibration(path) == old
