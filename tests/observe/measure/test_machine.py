import json
import os
import subprocess
import sys
import time

import pytest
import torch

import trainledger as tl
from trainledger.catalog import device_of_driver
from trainledger.cli import main
from trainledger.ledger.ledger import read_ledger
from trainledger.ledger.rules import matmul_flops
from trainledger.observe.measure.hardware import (
    ProcessorUse,
    Sample,
    memory_nbytes,
    others_between,
    processor_use,
    watched,
)
from trainledger.observe.measure.kernels import ColdPool, kernels
from trainledger.observe.measure.machine import measure_machine, storage_bytes_per_second
from trainledger.observe.measure.meter import QuietSteps
from trainledger.observe.measure.rounds import Block, Timing, busy_sentence
from trainledger.spec.calibration import COLLECTIVES, KINDS, Calibration, Fit, read_calibration, write_calibration

BUSY = Sample(others=1.0, crowded=True)
needs_proc_stat = pytest.mark.skipif(processor_use() is None, reason="this system has no /proc/stat")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A quick calibration by the command itself, in a process of its own."""
    path = tmp_path_factory.mktemp("machine") / "machine.toml"
    fit = Fit(date="2026-01-02", runs=("a",), error_before=0.2, error_after=0.1, factors={})
    write_calibration(
        Calibration(title="", backend="cpu", date="", torch_version="", threads=1, kernels=(), fits=(fit,)), path
    )
    command = [sys.executable, "-m", "trainledger", "measure", "machine", "--quick", "--json", "--output", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return json.loads(done.stdout), read_calibration(path), done.stderr


@pytest.mark.process
def test_the_command_prints_what_it_keeps(measured):
    printed, kept, errors = measured
    assert printed["peak_flops_per_second"] == kept.peak_flops_per_second
    assert printed["title"] == kept.title
    assert len(printed["kernels"]) == len(kept.kernels)
    assert errors == "1 fit to past runs went with the old rates; reconcile --update fits the new ones\n"
    assert kept.fits == ()


@pytest.mark.process
def test_a_calibration_has_every_kind_that_a_roofline_asks_for(measured):
    _, kept, _ = measured
    assert {each.kind for each in kept.kernels} == set(KINDS)
    assert {each.phase for each in kept.kernels if each.kind == "attention"} == {"", "backward"}
    assert kept.threads == 1
    assert kept.torch_version == torch.__version__
    assert kept.basis == "measured"
    assert 0 < kept.operation_seconds < 1e-2
    # Both are differences of times: where other processes disturbed them, either may come out as nothing.
    assert min(kept.update_seconds, kept.update_tensor_seconds) >= 0
    assert kept.busy or kept.discarded or kept.update_seconds + kept.update_tensor_seconds > 0
    assert kept.memory_nbytes == memory_nbytes(torch.device("cpu"))


@pytest.mark.process
def test_a_quick_calibration_has_disk_and_loader_and_no_collectives(measured):
    _, kept, _ = measured
    assert kept.read_bytes_per_second > 0
    assert kept.loader_tokens_per_second > 0
    assert kept.cores == len(os.sched_getaffinity(0))
    assert kept.collectives == ()
    assert kept.host_copies == ()


@pytest.mark.process
def test_the_peak_is_the_best_matmul(measured):
    _, kept, _ = measured
    rates = [each.flops_per_second for each in kept.kernels if (each.kind, each.dtype) == ("matmul", "fp32")]
    assert kept.peak_flops_per_second["fp32"] == max(rates)


@pytest.mark.process
def test_disturbed_samples_are_counted_and_a_busy_machine_is_told(measured):
    _, kept, _ = measured
    assert 0 <= kept.discarded <= kept.samples
    assert 0 < kept.pace_seconds < 0.1
    assert kept.busy == any("kept the machine busy" in each for each in kept.notes)


@pytest.mark.long
def test_every_kernel_of_an_accelerator_can_be_called():
    for each in kernels(torch.device("meta"), ["fp32", "bf16"]):  # the sizes of an accelerator, without its memory
        call = each.build()
        call()
        call()


def test_no_operand_fades_to_subnormals_however_often_kernels_run(monkeypatch):
    made = []

    class Kept(ColdPool):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr("trainledger.observe.measure.kernels.ColdPool", Kept)
    for each in kernels(torch.device("cpu"), ["fp32", "bf16"], quick=True):
        if each.kind in ("elementwise", "copy"):
            call = each.build()
            for _ in range(12):
                call()
    assert len(made) >= 2
    assert all(0.2 < float(each._buffer[: 2**20].float().mean()) < 0.6 for each in made)  # of values in [0, 1)


def test_flops_of_the_kernels_are_those_of_the_ledgers_rules():
    for each in kernels(torch.device("cpu"), ["fp32"]):
        if each.kind == "matmul":
            m, n, k = each.shape
            assert each.flops == matmul_flops(m, n, k)
            assert each.build()().shape == (m, n)


def test_the_fastest_sample_stands_in_where_all_were_disturbed():
    kernel = kernels(torch.device("cpu"), ["fp32"], quick=True)[0]
    busy = [Block(3.0, 2.0, BUSY), Block(2.5, 2.2, BUSY)]
    timing = Timing(kernel, kernel.build(), busy)
    assert timing.best() == (2.0, 1.0)
    timing.blocks += [
        Block(9.0, 1.0, Sample()),
        Block(5.0, 1.0, Sample(others=0.1)),
        Block(7.0, 1.0, Sample(others=0.0)),
    ]
    assert timing.best() == (7.0, 0.0)


def test_company_in_all_blocks_together_is_told_where_no_block_shows_it():
    kernel = kernels(torch.device("cpu"), ["fp32"], quick=True)[0]
    quiet = Timing(kernel, kernel.build(), [Block(3.0, 2.0, Sample(others=0.1))])
    busy = Timing(kernel, kernel.build(), [Block(3.0, 2.0, BUSY)])
    assert busy_sentence([quiet, quiet], Sample(3.0, 0.05)) is None
    assert "they took 0.6 cores from it" in busy_sentence([quiet], Sample(3.0, 0.6, crowded=True))
    assert "1 of 2 kernels have no undisturbed sample" in busy_sentence([quiet, busy], Sample(3.0, 0.05))
    mostly = Timing(kernel, kernel.build(), [*quiet.blocks, *busy.blocks, *busy.blocks])
    assert "2 of 3 samples were disturbed, and the others may be slowed" in busy_sentence([mostly], Sample(3.0, 0.05))


@needs_proc_stat
def test_another_process_is_seen_and_our_own_work_is_not():
    cores = len(os.sched_getaffinity(0))
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        time.sleep(0.2)
        with watched(cores) as sample:
            time.sleep(0.5)
        steps = QuietSteps()
        with steps.around_step(7):
            time.sleep(0.5)
    finally:
        for each in hogs:
            each.kill()
            each.wait()
    assert sample.others > 0.5 * cores
    assert sample.disturbed
    assert steps.disturbed == {7}
    assert not steps.unknown


@needs_proc_stat
def test_own_work_and_idle_cores_are_not_company():
    cores = len(os.sched_getaffinity(0))
    before = ProcessorUse(0.0, 0.0, 0.0)
    assert others_between(before, ProcessorUse(1.0, 1.0, 1.0), threads=1) == 0
    assert others_between(before, ProcessorUse(1.0, 1.0 + cores - 1, 1.0), threads=1) == 0
    assert others_between(before, ProcessorUse(1.0, 2.0, 1.0), threads=cores) == 1.0


def test_unknown_is_not_undisturbed():
    assert others_between(None, None, threads=1) is None


def test_storage_that_cannot_be_written_is_unknown(tmp_path):
    assert storage_bytes_per_second(1000, str(tmp_path)) > 0
    assert list(tmp_path.iterdir()) == []
    assert storage_bytes_per_second(1000, str(tmp_path / "absent")) is None


@pytest.mark.process
def test_a_backend_that_is_not_there_is_a_sentence():
    if torch.cuda.is_available():
        pytest.skip("this machine has the accelerator that the test asks for in vain")
    command = [sys.executable, "-m", "trainledger", "measure", "machine", "--backend", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "finds no such device on this machine; nearest that works: cpu" in done.stderr


def test_one_real_step_is_measured_operation_by_operation(tmp_path, capsys):
    run = tmp_path / "run.toml"
    sizes = (
        "vocab_size = 32\nd_model = 16\nn_layers = 2\nattention.n_heads = 2\nfeed_forward.d_ff = 32\nmax_seq_len = 8"
    )
    run.write_text(f"[model]\n{sizes}\n[recipe]\nseq_len = 8\nglobal_batch = 4\nmicro_batch = 2\nsteps = 1\n")
    kept = tmp_path / "ledger.json.gz"
    assert main(["measure", "step", str(run), "--json", "--output", str(kept)]) == 0
    printed = json.loads(capsys.readouterr().out)
    ledger = read_ledger(kept)
    assert printed["flops"]["matmul"] == ledger.by("kind")["matmul"]
    assert printed["parameters"] == ledger.parameters
    assert all(each.seconds is not None for each in ledger)
    assert set(printed["seconds_by_kind"]) == {each.kind for each in ledger}


@pytest.mark.process
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_a_whole_calibration_has_collectives_that_give_ranks_a_step_time(tmp_path, monkeypatch):
    path = tmp_path / "machine.toml"
    command = [sys.executable, "-m", "trainledger", "measure", "machine", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "all-reduce" in done.stdout
    kept = read_calibration(path)
    assert {each.name for each in kept.collectives} == set(COLLECTIVES)
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(path))
    spread = {"layout.shard": 2, "cluster.count": 2, "cluster.backend": "cpu", "recipe.seq_len": 64}
    forecast = tl.plan("teach-10m", spread | {"recipe.global_batch": 4, "recipe.steps": 1}).forecast
    assert forecast.step_seconds > 0
    assert forecast.step_causes["exposed communication"] > 0


@pytest.mark.gpu
def test_no_kernel_is_faster_than_the_data_sheet(tmp_path):
    """Kernels are timed by the device, as the program calls small ones more slowly than they run."""
    found = measure_machine("cuda", quick=True)
    sheet = device_of_driver(torch.cuda.get_device_name())
    if sheet is None:
        pytest.skip("a device that the catalog has no data sheet of")
    for each in found.kernels:
        if each.kind == "matmul":
            assert each.flops_per_second < 1.02 * sheet.peak_flops_per_second[each.dtype], each
        if each.kind == "copy" and each.nbytes > 2 * 10**8:
            assert each.bytes_per_second < sheet.memory_bytes_per_second, each
