"""Kinds of code that a forward or a step may have: each is followed as it really runs, or ends in a sentence."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import trainledger as tl
from trainledger.ledger.ledger import Ledger

pytestmark = pytest.mark.torch
D = 16


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x * x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.saved_tensors[0] * grad, None


@torch.library.custom_op("trainledger_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2


@dataclass
class Output:
    loss: Tensor


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Any], other: nn.Module | None = None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D), other or nn.Linear(D, D)
        self.run = forward

    def forward(self, x_BD: Tensor) -> Any:
        return self.run(self, x_BD)


def restored(model: Model, x_BD: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    return model.two(model.one(x_BD))  # type: ignore[no-any-return]


def printed(model: Model, x_BD: Tensor) -> Tensor:
    y_BD: Tensor = model.two(model.one(x_BD))
    assert f"{y_BD.mean():.3f} {y_BD}"
    return y_BD


def toggled(model: Model, x_BD: Tensor) -> Tensor:
    model.one.requires_grad_(False)
    y_BD = model.two(model.one(x_BD))
    model.one.requires_grad_(True)
    return y_BD  # type: ignore[no-any-return]


def in_place(model: Model, x_BD: Tensor) -> Tensor:
    y_BD = model.one(x_BD) * 1
    y_BD[:, 0].mul_(2)
    y_BD.view(-1)[:4].add_(1)
    return model.two(y_BD)  # type: ignore[no-any-return]


def under_autocast(model: Model, x_BD: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.two(model.one(x_BD)).float()  # type: ignore[no-any-return]


FOLLOWED: dict[str, Callable[[], Model]] = {
    "deep copy": lambda: Model(lambda m, x: copy.deepcopy(m.two)(m.one(x)) + m.two(x)),
    "saved and loaded": lambda: Model(restored),
    "printed": lambda: Model(printed),
    "number": lambda: Model(lambda m, x: m.two(m.one(x)) * (2 if x.sum().item() < 0 else 1)),
    "list of numbers": lambda: Model(lambda m, x: sum(m.two(m.one(x))[at] for at in torch.arange(3).tolist())),
    "own function": lambda: Model(lambda m, x: m.two(Square.apply(m.one(x), 2.0))),
    "checkpoint": lambda: Model(
        lambda m, x: checkpoint(m.two, m.one(x), use_reentrant=False, preserve_rng_state=False)
    ),
    "vmap": lambda: Model(lambda m, x: torch.func.vmap(lambda row: m.two(m.one(row)))(x)),
    "jvp": lambda: Model(
        lambda m, x: torch.func.jvp(lambda w: F.linear(m.two(x), w), (m.one.weight,), (m.one.weight,))[1]
    ),
    "functional call": lambda: Model(
        lambda m, x: torch.func.functional_call(m.two, dict(m.one.named_parameters()), (x,))
    ),
    "weight norm": lambda: Model(lambda m, x: m.two(m.one(x)), parametrizations.weight_norm(nn.Linear(D, D))),
    "old weight norm": lambda: Model(lambda m, x: m.two(m.one(x)), nn.utils.weight_norm(nn.Linear(D, D))),
    "recurrent": lambda: Model(lambda m, x: m.two(m.one(x)[None])[0], nn.RNN(D, D)),
    "batch norm": lambda: Model(lambda m, x: m.two(m.one(x)), nn.BatchNorm1d(D)),
    "toggled": lambda: Model(toggled),
    "in place": lambda: Model(in_place),
    "autocast": lambda: Model(under_autocast),
    "dataclass": lambda: Model(lambda m, x: Output(m.two(m.one(x)).mean())),
    "generator": lambda: Model(lambda m, x: sum(m.two(m.one(x)) * at for at in (1, 2))),
    "complex": lambda: Model(lambda m, x: torch.view_as_real(torch.complex(m.one(x), m.two(x)))),
    "other data": lambda: Model(
        lambda m, x: (setattr(m.one.weight, "data", m.one.weight.data.clone()), m.two(m.one(x)))[1]
    ),
}


def books(ledger: Ledger) -> tuple[int, int, int]:
    return ledger.parameters, ledger.by("kind").get("matmul", 0), ledger.kept_nbytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FOLLOWED)
@pytest.mark.long
def test_a_kind_of_code_has_the_books_of_its_real_step_and_changes_nothing(kind: str) -> None:
    model, x_BD = FOLLOWED[kind](), torch.randn(4, D)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())

    def loss(output: Any) -> Tensor:
        value: Tensor = output.loss if isinstance(output, Output) else output.float().square().mean()
        return value

    traced = tl.trace(model, x_BD, loss=loss, optimizer=optimizer)
    assert traced.partial == ""
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    with tl.meter(model, optimizer) as meter:
        loss(model(x_BD)).backward()
        optimizer.step()
    assert books(traced) == books(meter.ledger)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "numpy": (lambda m, x: m.one(x) * float(m.one(x).detach().numpy().mean()), "a numpy array needs values"),
    "pickle": (lambda m, x: m.one(x) + copy.copy(__import__("pickle").dumps(x)), "pickling a tensor reads its values"),
    "operator": (lambda m, x: without_fake(m.one(x)), "There was no fake impl registered"),
    "packed": (
        lambda m, x: nn.utils.rnn.pack_padded_sequence(m.one(x)[None], [4], batch_first=True).data,
        "how large its result is depends on values",
    ),
    "jagged": (
        lambda m, x: torch.nested.nested_tensor([m.one(x)[:1], x], layout=torch.jagged),
        "a jagged tensor's sizes are values, which fake tensors do not have",
    ),
    "error": (lambda m, x: m.one(x)[:, None] + m.two(x).missing, "AttributeError"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_followed_is_a_sentence_with_its_line(kind: str) -> None:
    forward, why = REFUSED[kind]
    model = Model(lambda m, x: forward(m, m.two(x)))
    ledger = tl.trace(model, torch.zeros(4, D), loss=torch.mean)
    assert ledger.partial.startswith("forward ended at tests/trace/test_kinds_of_code.py:")
    assert why in ledger.partial
    assert "\n" not in ledger.partial
