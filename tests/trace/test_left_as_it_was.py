"""A trace leaves model, optimizer and batch as they were, whatever the traced code does to them."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainledger as tl

pytestmark = pytest.mark.torch


class Careless(nn.Module):
    """Keeps things of its forward in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.angles: Tensor | None = None
        self.past: list[Tensor] = []
        self.by_name: dict[str, list[Tensor]] = {"all": []}

    def forward(self, x: Tensor) -> Tensor:
        if self.angles is None:
            self.angles = torch.arange(8).float().cos()
            self.register_buffer("scale", torch.ones(8))
            self.extra = nn.Linear(8, 8)
            self.eval()
        y, _ = self.recurrent(self.inner(x)[None])
        self.last = y
        self.past.append(y)
        self.by_name["all"].append(y)
        return (y * self.angles).sum()


def facts(module: nn.Module) -> Any:
    names = [name for name, _ in module.named_modules()], list(module.state_dict()), module.training
    return names, {key: id(value) for key, value in vars(module).items()}


def test_a_module_is_as_before_and_runs() -> None:
    model, x = Careless(), torch.randn(3, 8)
    before = facts(model)
    first, second = tl.trace(model, x), tl.trace(model, x)
    assert facts(model) == before
    assert (model.past, model.by_name, model.angles) == ([], {"all": []}, None)
    assert (first.kept_nbytes, first.peak().nbytes) == (second.kept_nbytes, second.peak().nbytes)
    assert torch.isfinite(model(x))
    assert not any("Fake" in type(each).__name__ for each in (*model.past, model.angles))


def test_also_after_an_error() -> None:
    class Raising(Careless):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("lost")

    model = Raising()
    before = facts(model)
    with pytest.warns(RuntimeWarning, match="forward ended at .*KeyError"):
        tl.trace(model, torch.randn(3, 8))
    assert facts(model) == before


def test_an_optimizer_that_the_step_changes_is_as_before() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})

    tl.trace_step(step, model, torch.zeros(2, 4), optimizers=optimizer)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.1
    assert [id(each) for each in group["params"]] == [id(each) for each in model.parameters()]


def test_a_batch_that_wants_gradients_gets_them() -> None:
    model, x = nn.Linear(64, 64), torch.zeros(8, 64, requires_grad=True)
    matmuls = tl.trace(model, x, loss=Tensor.sum).by("kind")["matmul"]
    assert matmuls == 3 * 2 * 8 * 64 * 64
    assert x.grad is None


Pair = namedtuple("Pair", ["left", "right"])


class Kind(dict[str, Any]):
    """A dict of a kind of its own."""


def test_what_a_batch_holds_keeps_its_kind() -> None:
    seen: list[Any] = []

    class Looks(nn.Linear):
        def forward(self, pair: Any, several: Any, named: Any) -> Tensor:
            seen.extend(type(each) for each in (pair, several, named))
            return super().forward(pair.left + several[0] + named["x"]).sum()

    x = torch.zeros(2, 4)
    tl.trace(Looks(4, 4), (Pair(x, x), [x], Kind(x=x)))
    assert seen == [Pair, list, Kind]


def test_optimizers_that_cannot_be_asked_for_their_state_leave_a_ledger() -> None:
    class Odd(torch.optim.SGD):
        def step(self, more: int) -> None:  # type: ignore[override]
            """Wants what nobody gives."""

    model = nn.Linear(4, 4)
    with pytest.warns(RuntimeWarning):
        ledger = tl.trace(model, torch.zeros(2, 4), loss=Tensor.sum, optimizer=Odd(model.parameters()))
    assert ledger.partial.startswith("optimizer ended")
    assert "more" in ledger.partial
    assert any("the optimizer's state could not be made before" in each for each in ledger.notes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"grad_accum": 0}, "grad_accum must be a whole number from 1, not 0"),
        ({"grad_accum": 1.5}, "grad_accum must be a whole number"),
        ({"autocast": torch.int8}, "autocast must be torch.bfloat16 or torch.float16"),
        ({"autocast": "bf16"}, "autocast must be torch.bfloat16"),
        ({"optimizer": "adamw"}, "optimizer must be a torch optimizer of the model's parameters"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "has none of the model's parameters"),
        ({"kernels": "tpu"}, "kernels must be one of cpu, cuda"),
    ],
)
def test_what_cannot_be_a_step(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tl.trace(nn.Linear(4, 4), torch.zeros(2, 4), loss=Tensor.sum, **options)


@pytest.mark.parametrize(("model", "told"), [(3, "not 3"), (nn.ReLU, "not the class ReLU; make one")])
def test_what_is_no_model(model: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"model must be an nn.Module, {told}"):
        tl.trace(model, torch.zeros(2, 4), loss=Tensor.sum)


def test_a_module_without_shapes_is_told() -> None:
    with pytest.raises(ValueError, match="weight has no shape before a first forward: run the model once"):
        tl.trace(nn.LazyLinear(4), torch.zeros(2, 4), loss=Tensor.sum)
