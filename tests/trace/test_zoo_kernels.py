"""What a trace knows of CPU kernels beyond what dispatch shows, each held against a real run of the kernel."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_compared import built, compare, named

from trainledger.ledger.ledger import Ledger
from trainledger.trace import trace
from trainledger.trace.fakes.results import CPU_RESULTS
from trainledger.trace.fakes.tensors import fake_batch, make_states
from trainledger.trace.fakes.values import ZeroWhereUnknown
from trainledger.trace.operators.table import operator_of
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.storages import tensors_in

pytestmark = pytest.mark.agreement

aten = torch.ops.aten
torch.set_num_threads(1)
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def events_of(run: Any) -> Any:
    """The profiler's tree of what ran, after running it once before."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    del kept
    return profiler.profiler.kineto_results.experimental_event_tree()


def walk(nodes: Any) -> Any:
    for node in nodes:
        yield node
        yield from walk(node.children)


def taken(run: Any) -> int:
    """The most bytes that the allocator gives at once while an operator runs, beyond those of its results."""
    found = sorted(
        (node.start_time_ns, node.extra_fields.alloc_size)
        for node in walk(events_of(run))
        if node.tag.name == "Allocation"
    )
    results = sum(each.untyped_storage().nbytes() for each in tensors_in(run()))
    live = highest = 0
    for _, nbytes in found:
        live += nbytes
        highest = max(highest, live)
    return highest - results


# x, weight, stride, padding, transposed, groups
CONVOLUTIONS = {
    "plain": ((4, 32, 32, 32), (64, 32, 3, 3), 1, 1, False, 1),
    "image": ((4, 3, 32, 32), (64, 3, 3, 3), 1, 1, False, 1),
    "few channels out": ((4, 32, 32, 32), (3, 32, 3, 3), 1, 1, False, 1),
    "odd channels": ((4, 24, 16, 16), (40, 24, 3, 3), 1, 1, False, 1),
    "by one": ((4, 32, 32, 32), (64, 32, 1, 1), 1, 0, False, 1),
    "strided": ((4, 32, 32, 32), (64, 32, 3, 3), 2, 1, False, 1),
    "transposed": ((4, 64, 16, 16), (64, 32, 4, 4), 2, 1, True, 1),
    "of each channel": ((4, 32, 16, 16), (32, 1, 7, 7), 1, 3, False, 32),
    "in groups": ((4, 64, 16, 16), (64, 16, 3, 3), 1, 1, False, 4),
}


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN's blocks are found for AVX512")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_scratch_of_convolutions(kind: str, last: bool) -> None:
    x_shape, w_shape, stride, padding, transposed, groups = CONVOLUTIONS[kind]
    if last and kind in ("image", "few channels out", "odd channels", "transposed", "in groups", "strided"):
        pytest.skip("not among the models of the zoo")
    order = torch.channels_last if last else torch.contiguous_format
    x, w = torch.randn(x_shape).contiguous(memory_format=order), torch.randn(w_shape)
    settings = ([stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], groups)
    y = aten.convolution(x, w, None, *settings)
    grad = torch.randn_like(y)
    forward, backward = (x, w, None, *settings), (grad, x, w, None, *settings, [True, True, False])
    for func, args in ((aten.convolution.default, forward), (aten.convolution_backward.default, backward)):
        rule = operator_of(func).scratch
        assert rule is not None
        real, ours = taken(lambda func=func, args=args: func(*args)), rule(args, func(*args))
        # What else is taken are pads of some tens of KiB.
        assert ours == pytest.approx(real, abs=64 * 1024 if real else 0), (func, real, ours)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mul.Tensor, (torch.randn(100, 50), torch.ones(100, 50, dtype=torch.bool))),
        (aten.add.Tensor, (torch.randn(100, 50), torch.randn(100, 50).bfloat16())),
        (aten.add.Tensor, (torch.randn(100, 50), torch.randn(100, 50))),
        (aten.mul.Tensor, (torch.randn(100, 50).bfloat16(), torch.tensor(2.0))),
        (aten.native_layer_norm.default, (torch.randn(64, 100).t(), [64], None, None, 1e-5)),
    ],
)
def test_scratch_of_mixed_formats_and_orders(func: Any, args: tuple[Any, ...]) -> None:
    rule = operator_of(func).scratch
    assert rule is not None
    assert rule(args, func(*args)) == pytest.approx(taken(lambda: func(*args)), abs=16)


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return tuple(torch.rand(each, dtype=dtype) for each in shapes)


without_bf16_instructions = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or torch.cpu._is_avx512_bf16_supported(),
    reason="found for processors with AVX512 and no bf16",
)


@without_bf16_instructions
@pytest.mark.parametrize("channels", [3, 16, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_scratch_of_transposed_convolutions_in_bf16_without_bf16_instructions(channels: int, bias: bool) -> None:
    x, w, b = matrices((16, 32, 16, 16), (32, channels, 4, 4), (channels,))
    args = (x, w, b if bias else None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    func = aten.convolution.default
    rule = operator_of(func).scratch
    assert rule is not None
    assert rule(args, func(*args)) == pytest.approx(taken(lambda: func(*args)), abs=512)


@without_bf16_instructions
@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, matrices((100, 50), (50, 70))),
        (aten.mm.default, matrices((128, 64), (64, 1))),
        (aten.mm.default, matrices((16, 16), (16, 16))),
        (aten.mm.default, matrices((100, 50), (50, 70), dtype=torch.float32)),
        (aten.addmm.default, matrices((70,), (100, 50), (50, 70))),
        (aten.bmm.default, matrices((3, 100, 50), (3, 50, 70))),
        (aten.baddbmm.default, matrices((3, 100, 70), (3, 100, 50), (3, 50, 70))),
    ],
)
def test_scratch_of_matmuls_in_bf16_without_bf16_instructions(func: Any, args: tuple[Any, ...]) -> None:
    rule = operator_of(func).scratch
    assert rule is not None
    assert rule(args, func(*args)) == pytest.approx(taken(lambda: func(*args)), abs=512)


# Results


def halves(*shape: int) -> Tensor:
    return torch.rand(shape).bfloat16()


tokens, images, ones = halves(6, 8), halves(2, 8, 4, 4), torch.ones(8)
RESULTS = [
    (aten.native_layer_norm.default, (tokens, [8], ones, ones, 1e-5)),
    (aten.native_layer_norm.default, (tokens, [8], ones.bfloat16(), ones.bfloat16(), 1e-5)),
    (aten.native_layer_norm.default, (torch.rand(8, 6).t(), [8], ones, ones, 1e-5)),
    (aten.native_group_norm.default, (images, ones, ones, 2, 8, 16, 4, 1e-5)),
    (aten.native_batch_norm.default, (images, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5)),
    (aten.mse_loss.default, (torch.rand(30, 20), torch.rand(30, 20))),
    (aten.mse_loss.default, (torch.rand(30, 20), torch.rand(30, 20), 0)),
    (aten.binary_cross_entropy.default, (torch.rand(30, 20), torch.rand(30, 20))),
    (aten.smooth_l1_loss.default, (torch.rand(30, 20), torch.rand(30, 20), 2)),
    (aten.soft_margin_loss.default, (torch.rand(30, 20), torch.rand(30, 20))),
]


@pytest.mark.parametrize(("func", "args"), RESULTS)
def test_results_of_fake_tensors_are_as_large_as_real_ones(func: Any, args: tuple[Any, ...]) -> None:
    assert func in CPU_RESULTS
    real = func(*args)
    with FakeTensorMode() as mode, ZeroWhereUnknown(results=CPU_RESULTS):
        fake = func(*fake_batch(args, mode))
    assert [form(each) for each in tensors_in(fake)] == [form(each) for each in tensors_in(real)]


LONG_SHORT = [(64, 8, 128, 256), (1, 1, 16, 16), (20, 7, 33, 47), (30, 4, 300, 100), (9, 2, 448, 64), (17, 5, 250, 383)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("steps", "batch", "width", "hidden"), LONG_SHORT)
def test_what_a_recurrent_layer_keeps_for_backward(
    steps: int, batch: int, width: int, hidden: int, dtype: torch.dtype
) -> None:
    layer, x = nn.LSTM(width, hidden, dtype=dtype), torch.randn(steps, batch, width, dtype=dtype)
    kept = []

    class Kept(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is aten.mkldnn_rnn_layer.default:
                kept.append(form(out[3]))
            return out

    with Kept():
        layer(x)
    if not kept:
        pytest.skip("this processor has no such kernel of oneDNN for the format")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, ZeroWhereUnknown(results=CPU_RESULTS), Kept():
        layer(mode.from_tensor(x))
    real, fake = kept
    assert fake == real


def form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def test_other_kernels_have_their_own_results() -> None:
    model, x = nn.Linear(8, 8), torch.randn(16, 8)
    cpu, cuda = (trace(model, x, loss=lambda y: F.mse_loss(y, x), kernels=each) for each in ("cpu", "cuda"))
    assert cpu.kept_nbytes - cuda.kept_nbytes == 4 * 16 * 8 - 4


# Gradients that are added up


@pytest.mark.parametrize("name", ["swin", "linear attention", "graph network", "own function, hooks, in place"])
def test_gradients_are_added_up_where_autograd_does_so(name: str) -> None:
    """As often in the memory of one of them as the profiler sees the engine do it."""
    setup = built(named(name))
    make_states(setup.model, *setup.optimizers)

    def run() -> None:
        setup.model.zero_grad()
        setup.run(None, lambda _: nullcontext())

    engine = [each for each in walk(events_of(run)) if each.name.startswith("autograd::engine::evaluate_function")]
    added = [node.name for each in engine if "AccumulateGrad" not in each.name for node in each.children]
    sums = [each for each in compare(name, "fp32").ledger if each.name == "add" and each.phase == "backward"]
    assert sum(not each.allocated for each in sums) == added.count("aten::add_") > 0
    assert sum(bool(each.allocated) for each in sums) >= added.count("aten::add")


def test_a_sum_in_place_is_an_entry_that_allocates_nothing() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.map(x)
            return (y.exp() + y.sin()).sum()

    model, x = Twice(), torch.randn(16, 32)
    ledger = trace(model, x)
    (total,) = [each for each in ledger if each.name == "add" and each.phase == "backward"]
    assert (total.allocated, total.written, total.flops) == ((), 4 * 16 * 32, 16 * 32)
    live = dict(ledger.resident)
    for each in ledger:
        for category, nbytes in each.allocated:
            live[category] = live.get(category, 0) + nbytes
        for category, nbytes in each.freed:
            live[category] -= nbytes
        assert all(nbytes >= 0 for nbytes in live.values())
    assert live.get("scratch", 0) == 0


def test_without_what_is_hidden_a_recorder_tells_what_dispatch_shows() -> None:
    model, x = nn.Conv2d(16, 16, 3), torch.randn(2, 16, 8, 8)
    told = []
    for hidden in (True, False):
        recorder = Recorder(model, hidden=hidden)
        with recorder:
            (model(x) * 2).sum().backward()
        told.append(sum(each.scratch for each in recorder.ledger(tokens=0, writer="measure")))
        model.zero_grad(set_to_none=True)
    assert told[0] > told[1] == 0


# Batches, states, and ways that transformers takes


def test_tensors_of_a_batch_that_share_memory_share_it_in_the_trace() -> None:
    words = torch.randint(0, 9, (4, 17))
    batch = {"ids": words[:, :-1], "labels": words[:, 1:], "again": words[:, 1:], "own": torch.zeros(3)}
    with FakeTensorMode() as mode:
        fakes = fake_batch(batch, mode)
    sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in fakes.values()}
    assert sum(sizes.values()) == words.nbytes + 12
    for name, each in batch.items():
        assert (fakes[name].shape, fakes[name].stride()) == (each.shape, each.stride())


def test_the_state_of_the_generator_is_kept_by_a_checkpointed_block() -> None:
    ledger = compare("checkpointed", "fp32").ledger
    states = [each for each in ledger if each.name == "get_rng_state"]
    assert [each.kept for each in states if each.phase == "forward"] == [torch.get_rng_state().nbytes] * 3


@pytest.mark.parametrize("name", ["bart", "llama, padded", "experts by one-hot"])
def test_operations_of_the_trace_are_those_of_a_real_step(name: str) -> None:
    setup = built(named(name))
    fake = compare(name, "fp32").ledger
    make_states(setup.model, *setup.optimizers)
    recorder = Recorder(setup.model, setup.optimizers)
    recorder.resident(tensors_in(setup.batch), "batch")
    with recorder:
        setup.run(None, recorder.phase)
    real = recorder.ledger(tokens=0, writer="measure")
    # A real `one_hot` looks whether there are numbers beyond its classes, before torch 2.13 for least and most apart.
    looks = ("aminmax", "min", "max", "_local_scalar_dense") if name == "experts by one-hot" else ()
    assert facts(fake, looks) == facts(real, looks)


def facts(ledger: Ledger, but: tuple[str, ...]) -> list[tuple[object, ...]]:
    """What each operation does, and to memory."""
    return [
        (each.name, each.phase, dict(each.allocated), each.kept, each.scratch)
        for each in ledger
        if each.name not in but
    ]


def test_a_mask_without_values_is_taken_to_hide_something() -> None:
    setup = built(named("llama"))
    full = torch.ones_like(setup.batch["input_ids"])
    plain = trace(setup.model, setup.batch, optimizer=setup.optimizers[0])
    seen = trace(setup.model, {**setup.batch, "attention_mask": full}, optimizer=setup.optimizers[0])
    unseen = trace(setup.model, {**setup.batch, "attention_mask": full.to("meta")}, optimizer=setup.optimizers[0])
    assert seen.kept_nbytes == plain.kept_nbytes < unseen.kept_nbytes


# Rules of operators


def test_flops_of_recurrent_layers_and_transforms_by_hand() -> None:
    lstm = nn.LSTM(16, 32)
    ledger = trace(lstm, torch.randn(5, 3, 16), loss=lambda out: out[0].sum())
    matmuls = 2 * 5 * 3 * 4 * 32 * (16 + 32)
    assert ledger.matmul_flops == 3 * matmuls
    real, whole = torch.randn(4, 64), torch.randn(4, 64, dtype=torch.complex64)
    assert operator_of(aten._fft_c2c.default).flops((whole, [1]), whole) == 5 * 4 * 64 * 6
    half = torch.fft.rfft(real)
    assert operator_of(aten._fft_r2c.default).flops((real, [1]), half) == 5 * 4 * 64 * 6 // 2
    assert operator_of(aten._fft_c2r.default).flops((half, [1]), real) == 5 * 4 * 64 * 6 // 2
    bag = nn.EmbeddingBag(10, 8, mode="sum")
    bags = trace(bag, torch.zeros(4, 5, dtype=torch.int64), loss=Tensor.sum)
    assert next(each.flops for each in bags if each.name == "_embedding_bag") == 4 * 5 * 8
    assert bags.uncounted == ()


@pytest.mark.parametrize(
    "layer", [nn.CELU, nn.ELU, nn.Hardsigmoid, nn.Hardtanh, nn.LeakyReLU, nn.SELU], ids=lambda each: each.__name__
)
def test_what_some_versions_of_torch_do_not_tag_as_pointwise_is_counted(layer: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer(inplace=True))  # type: ignore[call-arg]
    ledger = trace(model, torch.randn(8, 4), loss=Tensor.sum)
    assert ledger.uncounted == ()
    (in_place,) = (each for each in ledger if each.path == "1" and each.phase == "forward" and each.flops)
    assert in_place.kind == "elementwise"
    assert dict(in_place.allocated) == {}


def test_an_unknown_operator_is_told_of() -> None:
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.pdist(x).sum() + F.linear(x, x).sum()

    ledger = trace(Cube(), torch.randn(4, 4, requires_grad=True), backward=False)
    assert [name for name, _ in ledger.uncounted] == ["aten::_pdist_forward"]
