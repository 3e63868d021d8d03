"""The time of kernels by shape: what more of anything may do to it, and where it stands beside measured kernels."""

import csv
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger import catalog
from trainledger.answers.load import load
from trainledger.forecast.predict.kernel import attention_seconds, computed_share, matmul_seconds
from trainledger.forecast.predict.roofline import Roofline
from trainledger.forecast.predict.step import CAUSES, step_time
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.rules import attention_flops, matmul_flops
from trainledger.ledger.step import account
from trainledger.spec.device import SHARES, Efficiency

H100 = catalog.device("h100-sxm")
CALIBRATED = sorted(name for name in catalog.device_names() if catalog.device(name).efficiency is not None)
OF_LINKS = ("straggler_share", "contention_share", "network_share")
OF_KERNELS = [each.name for each in fields(Efficiency) if each.name not in ("source", "date", *OF_LINKS)]
GEMMS = Path(__file__).parents[3] / "tools/published" / "measured_gemm_tflops.csv"

eights = st.integers(1, 700).map(lambda each: 8 * each)
shares = st.floats(0.05, 1.0)
efficiencies = st.builds(
    Efficiency, **dict.fromkeys(SHARES, shares), depth=st.floats(0, 500), attention_length=st.floats(0, 2000),
    kernel_seconds=st.floats(0, 1e-5), launch_seconds=st.floats(0, 1e-4),
)  # fmt: skip
shapes = st.tuples(st.integers(1, 9), eights, eights, eights)
workers = st.one_of(st.none(), st.integers(1, 200))


@given(shapes, st.sampled_from(["bf16", "fp32", "e4m3"]), efficiencies, workers)
def test_no_matmul_is_faster_than_the_peak(shape, dtype, efficiency, multiprocessors):
    batch, m, n, k = shape
    seconds = matmul_seconds(shape, dtype, 1e12, efficiency, multiprocessors)
    assert 0 < matmul_flops(m, n, k, batch) / 1e12 <= seconds * (1 + 1e-12)


@given(shapes, st.tuples(*[st.integers(0, 99)] * 4), efficiencies, workers)
def test_a_larger_matmul_is_never_faster(shape, more, efficiency, multiprocessors):
    step = (1, 8, 8, 8)
    larger = tuple(size + each * by for size, each, by in zip(shape, more, step, strict=True))
    small, large = (matmul_seconds(each, "bf16", 1e12, efficiency, multiprocessors) for each in (shape, larger))
    assert small <= large * (1 + 1e-12)


heads = st.sampled_from([16, 32, 64, 96, 128, 256])
attentions = st.tuples(st.integers(1, 600), st.integers(1, 9000), st.integers(1, 9000), heads, heads, st.booleans())


@given(attentions, efficiencies, workers, st.sampled_from(["flash_attention", "efficient_attention_backward"]))
def test_no_attention_is_faster_than_the_pairs_that_it_computes(shape, efficiency, multiprocessors, name):
    sequences, queries, keys, width, value_width, causal = shape
    flops = attention_flops(1, sequences, queries, keys, width, value_width)
    seconds = attention_seconds(name, "bf16", shape, flops, 1e12, efficiency, multiprocessors)
    assert seconds >= flops * computed_share(queries, keys, causal) / 1e12 * (1 - 1e-12)


@given(attentions, efficiencies)
def test_narrow_heads_take_the_time_of_those_that_fill_a_systolic_array(shape, efficiency):
    """Of 256 rows: heads of 128 take as long as heads of 256 with twice their FLOPs; no softmax is timed here."""
    for width, times in ((128, 2), (256, 1)):
        seconds = attention_seconds(
            "flash_attention", "bf16", (*shape[:3], width, width, shape[5]), width, 1e12, efficiency, None,
            matrix_unit=256,
        )  # fmt: skip
        wide = attention_seconds(
            "flash_attention", "bf16", (*shape[:3], 256, 256, shape[5]), times * width, 1e12, efficiency, None
        )
        assert seconds == pytest.approx(wide)


@given(st.integers(1, 5000), st.integers(1, 5000), st.booleans())
def test_what_a_causal_kernel_computes_is_at_least_the_pairs_that_count(queries, keys, causal):
    counted = sum(min(keys, place + 1) for place in range(queries)) if queries >= keys else None
    share = computed_share(queries, keys, causal)
    assert 0 < share <= 1
    if causal and counted is not None:
        assert share >= counted / (queries * keys) * (1 - 1e-12)


def run(**recipe):
    return load({
        "model": {"preset": "llama-3.2-1b"},
        "recipe": {"seq_len": 2048, "global_batch": 2, "steps": 1, "precision": "bf16-mixed", **recipe},
    })  # fmt: skip


LEDGER = account(run(), backend="cuda")


@pytest.mark.parametrize("name", CALIBRATED)
def test_a_faster_device_is_never_slower(name):
    device = catalog.device(name)
    if "bf16" not in device.peak_flops_per_second:
        return
    ledger = account(run(global_batch=16, micro_batch=16), backend="cuda")  # launches are faster than its kernels
    seconds = step_time(ledger, device).seconds
    peaks = {each: 2 * rate for each, rate in device.peak_flops_per_second.items()}
    rate = 2 * device.memory_bytes_per_second
    assert step_time(ledger, replace(device, memory_bytes_per_second=rate)).seconds < seconds
    assert step_time(ledger, replace(device, peak_flops_per_second=peaks)).seconds < seconds
    assert step_time(ledger, replace(device, efficiency=None)).seconds < seconds  # the bound


@pytest.mark.parametrize("name", OF_KERNELS)
def test_every_constant_of_an_efficiency_does_something(name):
    given_ = H100.efficiency
    better = min(1.0, 1.2 * getattr(given_, name)) if name in SHARES else getattr(given_, name) / 2
    ledger = LEDGER
    if name == "float8_share":
        given_ = replace(given_, launch_seconds=0.0)  # eager, such a step waits for its program
        ledger = account(run(precision="fp8-tensorwise"), backend="cuda")
    elif name == "odd_share":  # a vocabulary of 50,257
        gpt2 = {"preset": "gpt2"}
        ledger = account(load({"model": gpt2, "recipe": {"seq_len": 1024, "global_batch": 8, "steps": 1,
                                                         "precision": "bf16-mixed"}}), backend="cuda")  # fmt: skip
        given_ = replace(given_, launch_seconds=0.0)
    elif name == "launch_seconds":
        small = load({"model": {"preset": "teach-1m"}, "recipe": {"seq_len": 64, "global_batch": 1, "steps": 1}})
        ledger = account(small, backend="cuda")
    before = step_time(ledger, replace(H100, efficiency=given_)).seconds
    assert step_time(ledger, replace(H100, efficiency=replace(given_, **{name: better}))).seconds < before


def test_more_multiprocessors_than_tiles_help_nobody():
    shape = (1, 256, 128, 4096)
    few, many = (matmul_seconds(shape, "bf16", 132e12, H100.efficiency, each) for each in (132, 264))
    assert few < many  # each of more multiprocessors is the slower, and the tiles are as many


def test_rows_that_begin_anywhere_cost_more():
    odd = matmul_seconds((1, 4096, 50257, 768), "bf16", 1e15, H100.efficiency, 132)
    even = matmul_seconds((1, 4096, 50304, 768), "bf16", 1e15, H100.efficiency, 132)
    assert odd > 1.5 * even
    odd, even = (matmul_seconds((1, 4096, n, 768), "fp32", 67e12, H100.efficiency, 132) for n in (50257, 50304))
    assert odd == even


def test_fp32_has_shares_of_its_own_peak():
    """H200, 2026-11-27: 21.44 ms, 613.9 and 1505.4 microseconds (bench/results)."""
    shape, attention = (1, 8192, 8192, 8192), (128, 1024, 1024, 64, 64, 1)
    assert matmul_seconds(shape, "fp32", 67e12, H100.efficiency, 132) == pytest.approx(21.44e-3, rel=0.03)
    for name, flops, seconds in (("efficient", 4, 613.9e-6), ("efficient_attention_backward", 10, 1505.4e-6)):
        flops *= 128 * 1024**2 * 64
        found = attention_seconds(name, "fp32", attention, flops, 67e12, H100.efficiency, 132)
        assert found == pytest.approx(seconds, rel=0.07)


def test_a_half_full_wave_takes_as_long_as_a_full_one():
    full = matmul_seconds((1, 256 * 11, 128 * 12, 8192), "bf16", 1e15, H100.efficiency, 132)
    one_more = matmul_seconds((1, 256 * 11, 128 * 13, 8192), "bf16", 1e15, H100.efficiency, 132)
    assert one_more > 1.15 * full


def test_arrays_give_what_their_elements_give():
    sizes = np.array([256, 1000, 4096])
    shape = (1, sizes, 4096, 2 * sizes)
    each = [matmul_seconds((1, int(n), 4096, 2 * int(n)), "bf16", 1e15, H100.efficiency, 132) for n in sizes]
    assert matmul_seconds(shape, "bf16", 1e15, H100.efficiency, 132) == pytest.approx(each)
    entry = Entry(
        "mm", "", "forward", "matmul", flops=2 * sizes**2 * 2 * 4096, read=sizes * 10**5, dtype="bf16", shape=shape
    )  # fmt: skip
    timed = Roofline(H100).time(entry)
    assert timed.seconds.shape == (3,)
    waited = np.maximum(timed.seconds, timed.launch_seconds)
    assert step_time(Ledger((entry,)), H100).seconds == pytest.approx(waited)


CARDS = {"NVIDIA A100 SXM4 80GB": "a100-sxm-80gb", "NVIDIA A100 40GB": "a100-sxm-40gb"}
CARDS |= {"NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA Tesla V100-SXM2-16GB": "v100-sxm-16gb"}


def test_the_best_square_matmul_is_at_most_the_measured_one_and_not_far_below():
    with open(GEMMS, newline="", encoding="utf-8") as file:
        measured = [row for row in csv.DictReader(file) if row["device"] in CARDS]
    assert len(measured) >= len(CARDS)
    for row in measured:
        device = catalog.device(CARDS[row["device"]])
        for dtype in ("fp16", "bf16"):
            if dtype not in device.peak_flops_per_second or device.efficiency is None:
                continue
            peak = device.peak_flops_per_second[dtype]
            rates = [
                2 * n**3 / matmul_seconds((1, n, n, n), dtype, peak, device.efficiency, device.multiprocessors) / 1e12
                for n in range(1024, 10241, 1024)
            ]
            # A matmul alone may run at clocks that a training step, on which the shares are fitted, does not hold.
            assert 0.65 < max(rates) / float(row[dtype]) < 1.1, (row["device"], dtype, max(rates))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_causes_sum_to_the_step(checkpointing):
    time = step_time(account(run(activation_checkpointing=checkpointing), backend="cuda"), H100)
    assert tuple(time.causes) == CAUSES
    assert sum(time.causes.values()) == pytest.approx(time.seconds)
    assert (time.causes["recomputation"] > 0) == (checkpointing == "full")
    assert time.causes["ideal"] == pytest.approx(LEDGER.model_flops / 989.5e12)
    assert time.basis == "assumed"


def test_a_share_beyond_one_is_refused_with_the_field():
    found = list(replace(H100.efficiency, matmul_share=1.2, depth=-1.0).problems())
    assert [str(each) for each in found] == [
        "matmul_share = 1.2: must be above 0 and at most 1",
        "depth = -1.0: must not be negative; nearest that works: 0.0",
    ]


def test_only_dims_that_lie_in_memory_side_by_side_must_be_aligned():
    efficiency = H100.efficiency
    assert efficiency is not None

    def seconds(*shape):
        return matmul_seconds(shape, "bf16", 989.5e12, efficiency, 132)

    assert seconds(256, 2, 4096, 4096) == seconds(256, 8, 4096, 4096)  # rows of an expert
    assert seconds(256, 8, 4096, 4090) > 2 * seconds(256, 8, 4096, 4096)
    assert seconds(1, 4090, 4096, 4096) > seconds(1, 4096, 4096, 4096)  # a weight's dim in its gradient
    rows = np.array([2, 8])
    assert seconds(256, rows, 4096, 4096).tolist() == [seconds(256, 2, 4096, 4096), seconds(256, 8, 4096, 4096)]


def test_tokens_of_a_forward_matmul_fill_up_a_tile_and_features_must_be_aligned():
    def seconds(phase, m, n=4096, k=4096):
        entry = Entry("mm", "", phase, "matmul", flops=2 * 2**36, dtype="bf16", shape=(1, m, n, k))
        return Roofline(H100).time(entry).seconds

    for phase in ("forward", "recompute"):
        assert seconds(phase, 4095) == seconds(phase, 4096)
        for size, share in ((4094, 0.6), (4095, H100.efficiency.odd_share)):
            assert seconds(phase, 4096, n=size) == pytest.approx(seconds(phase, 4096) / share, rel=0.01)
            assert seconds(phase, 4096, k=size) == pytest.approx(seconds(phase, 4096) / share, rel=0.01)
    assert seconds("backward", 4094) == pytest.approx(seconds("forward", 4094) / 0.6, rel=0.01)
