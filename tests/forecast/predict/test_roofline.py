import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import spec_of
from trainledger.catalog import device
from trainledger.forecast.predict.roofline import NoRate, Roofline, hfu, matmul_dtype, mfu, peak_rate, step_peak
from trainledger.forecast.predict.step import step_time
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.spec.calibration import Calibration, KernelTime
from trainledger.spec.device import Device
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

SHEET = Device("d", "a device", {"bf16": 1e12}, memory_bytes_per_second=1e9)


def matmul(m, n, k, dtype="fp32", **fields):
    nbytes = 4 * (m * k + k * n + m * n)
    return Entry("mm", "", "forward", "matmul", flops=2 * m * n * k, read=nbytes, dtype=dtype, **fields)


def kernel(kind, flops, nbytes, seconds, dtype="fp32", phase=""):
    return KernelTime(kind=kind, dtype=dtype, shape=(1,), flops=flops, nbytes=nbytes, seconds=seconds, phase=phase)


def calibration(backend="cpu", **fields):
    kernels = (
        kernel("matmul", 2 * 64**3, 3 * 4 * 64**2, 1e-4),
        kernel("matmul", 2 * 1024**3, 3 * 4 * 1024**2, 1e-2),
        kernel("attention", 10**9, 10**6, 1e-2),
        kernel("attention", 10**9, 10**6, 4e-2, phase="backward"),
        kernel("copy", 0, 10**5, 1e-6),
        kernel("copy", 0, 10**7, 1e-3),
        kernel("softmax", 10**6, 10**6, 1e-3),
    )
    return Calibration(
        title="m", backend=backend, date="today", torch_version="2", threads=1, kernels=kernels,
        **{"operation_seconds": 1e-6, **fields},
    )  # fmt: skip


def test_a_data_sheet_gives_the_slower_of_computing_and_moving():
    roofline = Roofline(SHEET)
    compute = roofline.time(Entry("mm", "", "forward", "matmul", flops=10**12, read=10, dtype="bf16"))
    memory = roofline.time(Entry("add", "", "forward", "elementwise", flops=10, read=10**9, written=10**9))
    assert (compute.seconds, compute.bound) == (1.0, "compute")
    assert (memory.seconds, memory.bound) == (2.0, "memory")


def test_an_entry_counts_as_often_as_it_runs():
    once = Roofline(SHEET).time(Entry("add", "", "forward", "elementwise", read=10**9))
    often = Roofline(SHEET).time(Entry("add", "", "forward", "elementwise", read=10**9, loop=(("a", 3), ("b", 4))))
    assert often.seconds == 12 * once.seconds


def test_a_measured_shape_takes_its_measured_time():
    roofline = Roofline(calibration(operation_seconds=0.0))
    assert roofline.time(matmul(64, 64, 64)).seconds == pytest.approx(1e-4, rel=1e-3)
    assert roofline.time(matmul(1024, 1024, 1024)).seconds == pytest.approx(1e-2, rel=1e-3)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
def test_a_matmul_is_never_faster_than_the_best_nor_slower_than_the_worst_rate(m, n, k):
    machine = calibration(operation_seconds=0.0)
    rates = [each.flops_per_second for each in machine.kernels if each.kind == "matmul"]
    entry = matmul(m, n, k)
    timed = Roofline(machine).time(entry)
    assert timed.seconds >= entry.flops / max(rates) * (1 - 1e-9)
    if timed.bound == "compute":
        assert timed.seconds <= entry.flops / min(rates) * (1 + 1e-9)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_more_bytes_never_take_less_time(few, many):
    few, many = sorted((few, many))
    roofline = Roofline(calibration())
    first, second = (roofline.time(Entry("c", "", "forward", "copy", read=each)).seconds for each in (few, many))
    assert first <= second * (1 + 1e-9)


def test_each_kind_moves_bytes_at_its_own_rate_and_unmeasured_ones_at_that_of_a_copy():
    roofline = Roofline(calibration(operation_seconds=0.0))
    softmax = roofline.time(Entry("s", "", "forward", "softmax", read=10**6))
    norm = roofline.time(Entry("n", "", "forward", "norm", read=10**7))
    assert (softmax.seconds, norm.seconds) == (pytest.approx(1e-3), pytest.approx(1e-3))


def test_attention_backward_has_its_own_rate():
    roofline = Roofline(calibration(operation_seconds=0.0))
    entry = {"name": "sdpa", "path": "", "kind": "attention", "flops": 10**9, "read": 10**6, "dtype": "fp32"}
    assert roofline.time(Entry(phase="forward", **entry)).seconds == pytest.approx(1e-2, rel=1e-3)
    assert roofline.time(Entry(phase="recompute", **entry)).seconds == pytest.approx(1e-2, rel=1e-3)
    assert roofline.time(Entry(phase="backward", **entry)).seconds == pytest.approx(4e-2, rel=1e-3)


def test_calling_an_operation_costs_on_a_cpu_and_hides_behind_work_on_an_accelerator():
    entry = Entry("c", "", "forward", "copy", read=10**7)
    assert Roofline(calibration("cpu", operation_seconds=5e-4)).time(entry).seconds == pytest.approx(1.5e-3)
    assert Roofline(calibration("cuda", operation_seconds=5e-4)).time(entry).seconds == pytest.approx(1e-3)
    tiny = Roofline(calibration("cuda", operation_seconds=5e-4)).time(Entry("c", "", "forward", "copy", read=8))
    assert (tiny.seconds, tiny.launch_seconds, tiny.bound) == (pytest.approx(8e-11), 5e-4, "overhead")


def test_an_accelerator_waits_for_the_program_only_where_all_launches_take_longer_than_all_kernels():
    small, large = Entry("c", "", "forward", "copy", read=8), Entry("c", "", "forward", "copy", read=10**7)
    machine = calibration("cuda", operation_seconds=5e-4)  # the large copy takes 1 ms
    assert step_time(Ledger((small, large)), machine).seconds == pytest.approx(1e-3)
    waits = step_time(Ledger((small, small, small, large)), machine)
    assert waits.seconds == pytest.approx(2e-3)
    assert waits.causes["launch overhead"] == pytest.approx(1e-3)


def test_a_program_that_waits_for_each_kernel_adds_its_launches_to_the_device_s_time():
    entry = Entry("c", "", "forward", "copy", read=10**7, loop=(("layers", 3),))
    cuda, cpu = (calibration(each, operation_seconds=5e-4) for each in ("cuda", "cpu"))
    waited = Roofline(cuda, blocking=True).time(entry)
    assert (waited.seconds, waited.overhead_seconds, waited.launch_seconds) == (pytest.approx(4.5e-3), 1.5e-3, 0.0)
    assert Roofline(cpu, blocking=True).time(entry) == Roofline(cpu).time(entry)  # nothing runs ahead there


def test_no_other_dtypes_peak_is_used():
    with pytest.raises(NoRate, match=r"a device has no peak for fp32 on record \(it has bf16\)"):
        Roofline(SHEET).time(matmul(8, 8, 8, dtype="fp32"))
    with pytest.raises(NoRate, match=r"no matmul in bf16 was measured on m, only in fp32$"):
        Roofline(calibration()).time(matmul(8, 8, 8, dtype="bf16"))
    with pytest.raises(NoRate, match="no memory bandwidth on record"):
        Roofline(Device("d", "a device", {})).time(Entry("c", "", "forward", "copy", read=8))


def steps():
    entry = st.builds(
        Entry,
        name=st.just("x"),
        path=st.just(""),
        phase=st.sampled_from(["forward", "backward", "optimizer"]),
        kind=st.sampled_from(["matmul", "attention", "elementwise", "softmax", "allocate"]),
        flops=st.integers(0, 10**12),
        read=st.integers(0, 10**9),
        written=st.integers(0, 10**9),
        dtype=st.just("fp32"),
        loop=st.sampled_from([(), (("layers", 3),)]),
    )
    return st.lists(entry, max_size=8).map(lambda entries: Ledger(tuple(entries)))


@given(steps())
def test_the_splits_of_a_step_sum_to_it(ledger):
    time = step_time(ledger, calibration())
    for split in (time.by_phase, time.by_kind, time.by_bound, time.causes):
        assert sum(split.values()) == pytest.approx(time.seconds)
    assert len(time.entries) == len(ledger)


def test_a_data_sheet_time_is_called_a_bound():
    time = step_time(Ledger((matmul(8, 8, 8, dtype="bf16"),)), SHEET)
    assert time.basis == "bound"
    assert "no run is faster" in time.notes[0]
    assert step_time(Ledger(()), calibration()).basis == "assumed"


def test_an_unknown_rate_gives_a_sentence_instead_of_a_number():
    time = step_time(Ledger((matmul(8, 8, 8, dtype="fp32"),)), SHEET)
    assert time.seconds is None
    assert time.notes == ("no step time: a device has no peak for fp32 on record (it has bf16)",)


def test_collectives_and_unknown_operations_are_named_not_guessed():
    ledger = Ledger((Entry("r", "", "collective", "copy", payload=8),), uncounted=(("odd.op", 2),))
    notes = " ".join(step_time(ledger, calibration()).notes)
    assert "1 transfers, collectives and operations of the host are not timed" in notes
    assert "odd.op" in notes


def test_a_busy_calibrations_note_goes_with_the_forecast():
    assert "was busy" in step_time(Ledger(()), calibration(notes=("was busy",))).notes


def test_utilization_and_its_peak():
    assert mfu(50, 1.0, 100) == 0.5
    assert hfu(60, 1.0, 100) == 0.6
    ledger = Ledger((matmul(8, 8, 8, "fp32"), matmul(64, 64, 64, "bf16")))
    assert matmul_dtype(ledger) == "bf16"
    assert step_peak(ledger, SHEET) == 1e12
    assert matmul_dtype(Ledger(())) == ""
    with pytest.raises(NoRate, match="an unnamed dtype"):
        step_peak(Ledger(()), SHEET)


def test_an_optimizer_costs_its_call_and_its_tensors_and_an_accelerator_hides_them():
    update = Entry("_fused_adamw_", "", "optimizer", "update", read=10**7)
    ledger = Ledger((update,), parameters=1, tokens=1)
    costs = {"update_seconds": 1e-4, "update_tensor_seconds": 1e-5}
    plain = step_time(ledger, calibration(), tensors=30).seconds
    called = step_time(ledger, calibration(**costs), tensors=30)
    assert called.seconds == pytest.approx(plain + 4e-4)
    assert called.by_phase == {"optimizer": pytest.approx(called.seconds)}
    assert called.by_bound["overhead"] == pytest.approx(4e-4)
    behind = step_time(ledger, calibration("cuda", **costs), tensors=30)
    assert behind.seconds == pytest.approx(max(step_time(ledger, calibration("cuda")).seconds, 4e-4))


def test_both_8_bit_formats_run_at_the_sheet_s_one_rate_for_them():
    sheet = Device("d", "a device", {"fp8": 2e12, "fp32": 1e12})
    assert peak_rate(sheet, "e4m3") == peak_rate(sheet, "e5m2") == 2e12
    assert peak_rate(Device("d", "a device", {"e5m2": 1e12, "fp8": 2e12}), "e5m2") == 1e12


@pytest.mark.parametrize("dtype", ["tf32", "fp16", "e4m3", "nvfp4"])
def test_a_rate_that_no_sheet_has_is_never_another_dtype_s(dtype):
    with pytest.raises(NoRate, match=f"a device has no peak for {dtype} on record \\(it has bf16\\)"):
        peak_rate(SHEET, dtype)
    entry = Entry("mm", "", "forward", "matmul", flops=1, dtype=dtype)
    result = step_time(Ledger((entry,)), SHEET)
    assert result.seconds is None
    assert result.notes == (f"no step time: a device has no peak for {dtype} on record (it has bf16)",)


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        ("fp32", {"fp32"}), ("tf32", {"tf32"}), ("fp16-mixed", {"fp16"}), ("bf16-sharded", {"bf16"}),
        ("fp8-tensorwise", {"bf16", "e4m3", "e5m2"}), ("fp8-rowwise", {"bf16", "e4m3"}),
        ("fp8-tensorwise-sharded", {"bf16", "e4m3", "e5m2"}),
    ],
)  # fmt: skip
def test_every_precision_of_a_large_model_has_a_rate_on_a_device_that_has_them_all(precision, dtypes):
    model = spec_of(V=512, D=64, L=2, H=4, K=16, F=128, T=16)
    run = Run(
        model=model, recipe=from_fields(Recipe, {"seq_len": 16, "global_batch": 1, "steps": 1, "precision": precision})
    )
    ledger = account(run, backend="cuda")
    assert {each.dtype for each in ledger if each.kind in ("matmul", "attention")} == dtypes
    assert step_time(ledger, device("h100-sxm")).seconds
    on_cpu = {each.dtype for each in account(run) if each.kind == "matmul"}
    assert on_cpu == (dtypes if precision != "tf32" else {"fp32"})
