"""Steps of modules that were not written for us, traced on fake tensors and then run for real."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_runs import run_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import sizes as model_fields
from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.observe.measure.meter import AllocatorPeak
from trainledger.trace import trace
from trainledger.trace.fakes.tensors import make_states

pytestmark = pytest.mark.torch

torch.set_num_threads(1)


class Output(dict[str, Tensor]):
    """What Hugging Face models return: a mapping with attributes."""

    __getattr__ = dict.__getitem__


class Scorer(nn.Module):
    """Two layers; gives logits, or a dict with the loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.down(F.gelu(self.up(x)))
        return y if labels is None else Output(loss=F.cross_entropy(y, labels), logits=y)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.GELU(), nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


def cross_entropy(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda logits: F.cross_entropy(logits, targets)


def allocated(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, step: Callable[[], None]) -> int:
    """The peak of a real steady-state step by the allocator's own events; ``batch`` bytes are there before."""
    make_states(model, optimizer)
    states = [each for state in optimizer.state.values() for each in state.values()]
    there = {each.untyped_storage()._cdata: each for each in (*model.parameters(), *model.buffers(), *states)}
    before = batch + sum(each.untyped_storage().nbytes() for each in there.values())
    with AllocatorPeak(torch.device("cpu"), live_nbytes=before) as peak:
        step()
    assert peak.nbytes is not None
    return peak.nbytes


# What can be traced


def test_convolutions_by_hand() -> None:
    model, images = convolutions(), torch.randn(4, 3, 32, 32)
    ledger = trace(model, images, loss=cross_entropy(torch.zeros(4, dtype=torch.int64)))
    first, second = 2 * 4 * 16 * 32 * 32 * 3 * 9, 2 * 4 * 32 * 7 * 7 * 16 * 9
    linear = 2 * 4 * 32 * 7 * 7 * 10
    assert ledger.uncounted == ()
    forward = ledger.filter(lambda each: each.phase == "forward" and each.kind == "matmul")
    assert [(each.path, each.flops) for each in forward] == [("0", first), ("4", second), ("7", linear)]
    # The images need no gradient, so the first convolution's backward is one matmul and the others' are two.
    assert ledger.matmul_flops == ledger.model_flops == 2 * first + 3 * second + 3 * linear
    assert ledger.parameters == sum(each.numel() for each in model.parameters())


def test_peak_of_convolutions() -> None:
    model, images, targets = convolutions(), torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    ledger = trace(model, images, loss=cross_entropy(targets), optimizer=optimizer)

    def step() -> None:
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()

    assert ledger.peak().nbytes == pytest.approx(allocated(model, optimizer, images.nbytes, step), rel=0.005)


def test_peak_and_flops_of_a_transformers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 512, (4, 128))
    ledger = trace(model, {"input_ids": ids, "labels": ids}, optimizer=optimizer)
    assert ledger.uncounted == ()
    assert ledger.tokens == 4 * 128
    sizes = model_fields(V=512, D=128, F=256, L=3, H=4, T=256)
    ours = account(run_of(model=sizes, seq_len=128))
    assert ledger.parameters == ours.parameters
    assert ledger.model_flops == ours.model_flops

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    assert ledger.peak().nbytes == pytest.approx(allocated(model, optimizer, ids.nbytes, step), rel=0.005)


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "loop"])
def test_our_own_model_through_the_public_door(optimizer: str) -> None:
    run = run_of(grad_clip=None, **{"optimizer.implementation": optimizer})
    model = build(run.model, run.recipe)
    ids = torch.zeros(4, 32, dtype=torch.int64)
    ledger = trace(
        model, (ids,), loss=lambda logits: next_token_loss(logits, ids), optimizer=build_optimizer(model, run.recipe)
    )
    same_account(ledger, account(run))


def test_targets_that_only_the_loss_knows_count_once() -> None:
    targets = torch.zeros(2, 4, dtype=torch.int64)
    ledger = trace(Scorer(), torch.randn(8, 64), loss=lambda y: F.cross_entropy(y, targets.flatten()))
    assert ledger.uncounted == ()
    assert dict(ledger.resident)["batch"] == 4 * 8 * 64 + 8 * 8
    assert (
        ledger.filter(lambda each: each.path == "loss" and each.phase == "forward").total("kept") == 4 * 8 * 32 + 2 * 4
    )


def same_account(traced: Ledger, predicted: Ledger) -> None:
    assert traced.parameters == predicted.parameters
    assert traced.matmul_flops == predicted.matmul_flops
    assert traced.kept_nbytes == predicted.kept_nbytes
    # The engine's batch holds targets of their own.
    assert traced.peak().nbytes == pytest.approx(predicted.peak().nbytes, abs=8 * 4 * 32)


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_a_model_that_has_no_memory(where: str) -> None:
    run = run_of(grad_clip=None, precision="bf16-mixed")
    mode = FakeTensorMode()
    with torch.device("meta") if where == "meta" else mode:
        model = build(run.model, run.recipe)
        optimizer = build_optimizer(model, run.recipe)
    ids = torch.zeros(4, 32, dtype=torch.int64)
    ledger = trace(
        model, (ids,), loss=lambda logits: next_token_loss(logits, ids), optimizer=optimizer, autocast=torch.bfloat16
    )
    same_account(ledger, account(run))


# How it is called


def test_batch_and_loss_in_every_form() -> None:
    model, x, labels = Scorer(), torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    loss = cross_entropy(torch.zeros(8, dtype=torch.int64))
    ledgers = [
        trace(model, x, loss=loss),
        trace(model, (x,), loss=loss),
        trace(model, [x], loss=loss),
        trace(model, {"x": x}, loss=loss),
        trace(model, {"x": x, "labels": labels}),
        trace(model, (x, labels)),
        trace(model, (x, labels), loss=lambda output: output.loss),
    ]
    for ledger in ledgers:
        assert ledger.matmul_flops == 2 * 8 * 64 * 128 * 2 + 2 * 8 * 128 * 32 * 3
        assert ledger.by("phase").keys() == {"forward", "backward"}
        assert ledger.kept_nbytes == ledgers[0].kept_nbytes


def test_a_model_whose_output_is_the_loss() -> None:
    class Mean(Scorer):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(x).mean()

    assert trace(Mean(), torch.randn(8, 64)).flops > 0


@pytest.mark.parametrize(
    ("batch", "loss", "found"),
    [
        (torch.randn(8, 64), None, "fp32[8,32]"),
        (torch.randn(8, 64), lambda y: {"nll": y}, "a dict of (.nll) fp32[8,32], of a model that returned fp32[8,32]"),
        (torch.randn(8, 64), lambda y: 1.0, "float, of a model that returned fp32[8,32]"),
    ],
)
def test_no_scalar_no_ledger(batch: Tensor, loss: Any, found: str) -> None:
    with pytest.raises(ValueError) as error:
        trace(Scorer(), batch, loss=loss)
    assert str(error.value) == f"the loss must be a scalar tensor, not {found}; give one with loss="


def test_a_loss_by_its_name_is_that_function() -> None:
    x, label = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    totals = [
        [(each.name, each.flops, each.kept, each.allocated) for each in trace(Scorer(), x, loss=loss)]
        for loss in ("mean", torch.mean, "sum", torch.sum)
    ]
    assert totals[0] == totals[1] != totals[2] == totals[3]
    named, given = (trace(Scorer(), x, loss=each, label=label) for each in ("cross_entropy", F.cross_entropy))
    assert (named.flops, named.kept_nbytes, named.peak()) == (given.flops, given.kept_nbytes, given.peak())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (7, "loss must be a function of the output, .*, not 7$"),
        ("meen", "loss = 'meen': is no loss of torch.nn.functional, nor mean, sum, or"),
        ("cross_entropy", "label: cross_entropy needs one to compare the output with$"),
    ],
)
def test_what_is_no_loss(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        trace(Scorer(), torch.randn(8, 64), loss=loss)


def test_the_first_step_makes_the_optimizers_state() -> None:
    model, x = Scorer(), torch.randn(8, 64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    later, first = (trace(model, x, loss=Tensor.sum, optimizer=optimizer, first_step=each) for each in (False, True))
    states = 8 * later.parameters + 4 * 4
    assert dict(later.resident)["optimizer state"] == states
    assert "optimizer state" not in dict(first.resident)
    made = first.filter(lambda each: each.phase == "optimizer" and each.kind == "copy")
    assert made.total("written") >= states - 16


def test_autocast_computes_in_low_precision() -> None:
    model, x = Scorer(), torch.randn(8, 64)
    for dtype, name in ((None, "fp32"), (torch.bfloat16, "bf16")):
        ledger = trace(model, x, loss=lambda y: y.float().sum(), autocast=dtype)
        assert {each.dtype for each in ledger if each.kind == "matmul"} == {name}


def test_a_model_without_a_gradient_for_some() -> None:
    model = Scorer()
    model.up.requires_grad_(False)
    ledger = trace(model, torch.randn(8, 64), loss=Tensor.sum)
    assert ledger.matmul_flops == 2 * 8 * 64 * 128 + 2 * 8 * 128 * 32 * 2


def test_recomputation_is_told_from_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(Scorer):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return self.down(checkpoint(lambda x: F.gelu(self.up(x)), x, use_reentrant=False))

    ledger = trace(Again(), torch.randn(8, 64), loss=Tensor.sum)
    plain = trace(Scorer(), torch.randn(8, 64), loss=Tensor.sum)
    assert ledger.by("phase")["recompute"] > 0
    assert ledger.model_flops == plain.model_flops
    assert ledger.matmul_flops == plain.matmul_flops + 2 * 8 * 64 * 128
    # What is run again is not kept: what [8, 128] elements were before the GELU. The generator's state is.
    assert ledger.kept_nbytes == plain.kept_nbytes - 4 * 8 * 128 + torch.get_rng_state().nbytes


# What it counts


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.head(self.embed(ids))
            return logits.sum()

    model, ids = Tied(), torch.zeros(4, 8, dtype=torch.int64)
    ledger = trace(model, ids, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
    assert ledger.parameters == 50 * 16
    assert dict(ledger.resident)["parameters"] == 4 * 50 * 16
    update = ledger.filter(lambda each: each.phase == "optimizer")
    assert update.flops == 50 * 16


def test_an_operator_without_a_rule_is_listed_and_not_guessed() -> None:
    @torch.library.custom_op("trainledger_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    torch.library.register_autograd("trainledger_tests::twice", lambda ctx, g: g * 2, setup_context=lambda **_: None)

    class Doubled(Scorer):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return torch.ops.trainledger_tests.twice(super().forward(x)) + torch.ops.trainledger_tests.twice(x[:, :32])

    ledger = trace(Doubled(), torch.randn(8, 64), loss=Tensor.sum)
    assert ledger.uncounted == (("trainledger_tests::twice", 2),)
    unknown = ledger.filter(lambda each: each.kind == "unknown")
    assert unknown.flops == 0
    assert unknown.total("written") == 2 * 4 * 8 * 32


def test_paths_of_backward_are_those_of_forward() -> None:
    ledger = trace(Scorer(), torch.randn(8, 64), loss=cross_entropy(torch.zeros(8, dtype=torch.int64)))
    for phase in ("forward", "backward"):
        matmuls = ledger.filter(lambda each, phase=phase: each.phase == phase and each.kind == "matmul")
        assert {each.path for each in matmuls} == {"up", "down"}
    assert {each.phase for each in ledger if each.path == "loss"} == {"forward", "backward"}


def test_everything_is_freed_in_the_end_but_what_stays() -> None:
    model = Scorer()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    ledger = trace(model, torch.randn(8, 64), loss=Tensor.sum, optimizer=optimizer)
    live = dict(ledger.resident)
    for each in ledger:
        for category, nbytes in each.allocated:
            live[category] = live.get(category, 0) + nbytes
        for category, nbytes in each.freed:
            live[category] -= nbytes
    left = {category: nbytes for category, nbytes in live.items() if category not in dict(ledger.resident) and nbytes}
    assert left.pop("gradients") == 4 * ledger.parameters
    assert left.pop("logits and loss", 0) <= 4 * 8 * 32 + 4  # the caller still holds the loss
    assert not left


# What it leaves alone


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_caller_changes(fails: bool) -> None:
    model, x = convolutions(), torch.randn(4, 3, 32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    F.cross_entropy(model(x), torch.zeros(4, dtype=torch.int64)).backward()
    optimizer.step()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    objects = [id(each) for each in (*model.parameters(), *model.buffers())]
    gradients = [each.grad.clone() for each in model.parameters()]
    random = torch.get_rng_state()
    loss = (lambda y: y) if fails else cross_entropy(torch.zeros(4, dtype=torch.int64))
    if fails:
        with pytest.raises(ValueError, match="must be a scalar"):
            trace(model, x, loss=loss, optimizer=optimizer)
    else:
        trace(model, x, loss=loss, optimizer=optimizer)
    assert objects == [id(each) for each in (*model.parameters(), *model.buffers())]
    assert all(torch.equal(each.grad, kept) for each, kept in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert equal(before, [model.state_dict(), optimizer.state_dict()])
    optimizer.step()  # the optimizer still knows its parameters
    assert not equal(before[0], model.state_dict())


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(*each) for each in zip(a, b, strict=True))
    return bool(a == b)
