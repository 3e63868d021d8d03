"""Optimizers that evaluate the model by a closure: as many passes as are told, and their memory, as in a real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import trainledger as tl
from trainledger.ledger.ledger import Ledger
from trainledger.observe.measure.meter import AllocatorPeak

pytestmark = pytest.mark.torch


class Descent:
    """Least squares, which is convex, so that L-BFGS goes on as long as it may."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.y = nn.Linear(64, 64), torch.randn(256, 64), torch.randn(256, 64)
        self.optimizer = torch.optim.LBFGS(
            self.model.parameters(), tolerance_grad=0, tolerance_change=0, **options
        )  # fmt: skip
        self.evaluations = 0

    def loss(self, out: Tensor) -> Tensor:
        return (out - self.y).square().mean()

    def step(self, x: Tensor) -> None:
        def closure() -> Tensor:
            self.evaluations += 1
            self.optimizer.zero_grad()
            loss = self.loss(self.model(x))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]


def before(ledger: Ledger) -> int:
    return sum(nbytes for _, nbytes in ledger.resident)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("taken", "options"),
    [
        (0, {"max_iter": 4}),
        (1, {"max_iter": 4}),
        (1, {"max_iter": 3, "max_eval": 2}),
        (2, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    ],
)
def test_lbfgs_is_traced_as_it_runs(own: bool, taken: int, options: dict[str, Any]) -> None:
    each = Descent(**options)
    for _ in range(taken):
        each.step(each.x)
    each.optimizer.zero_grad()
    weights = [parameter.clone() for parameter in each.model.parameters()]
    if own:
        ledger = tl.trace_step(each.step, each.model, each.x, optimizers=each.optimizer, first_step=not taken)
    else:
        ledger = tl.trace(each.model, each.x, loss=each.loss, optimizer=each.optimizer, first_step=not taken)
    assert all(map(torch.equal, weights, each.model.parameters()))
    each.evaluations = 0
    with AllocatorPeak(torch.device("cpu")) as real:
        each.step(each.x)
    assert ledger.partial == ""
    (note,) = ledger.notes
    assert f"as often as values ask for: {each.evaluations} evaluations are in this step" in note
    pairs = len(each.optimizer.state[each.model.weight]["old_dirs"])
    assert f"ends with {pairs} pairs" in note
    assert ledger.peak().nbytes - before(ledger) == pytest.approx(real.nbytes, abs=64)
    with FlopCounterMode(display=False) as counter:
        each.loss(each.model(each.x)).backward()  # type: ignore[no-untyped-call]
    matmuls = sum(entry.flops for entry in ledger if entry.kind == "matmul" and entry.phase != "optimizer")
    assert matmuls == each.evaluations * counter.get_total_flops()


def test_the_kept_bytes_of_every_evaluation() -> None:
    each = Descent(max_iter=3)
    plain = tl.trace(each.model, each.x, loss=each.loss)
    ledger = tl.trace(each.model, each.x, loss=each.loss, optimizer=each.optimizer, grad_accum=2)
    assert ledger.total("kept") == 3 * 2 * plain.total("kept")
    assert ledger.micro_batches == 6


def test_the_steady_state_of_lbfgs_is_a_full_history() -> None:
    each = Descent(max_iter=2, history_size=7)
    ledger = tl.trace(each.model, each.x, loss=each.loss, optimizer=each.optimizer)
    vector = sum(parameter.nbytes for parameter in each.model.parameters())
    # Directions and steps, the last direction and the last gradient; single numbers beside.
    assert dict(ledger.resident)["optimizer state"] == pytest.approx((2 * 7 + 2) * vector, abs=64)
    assert each.optimizer.param_groups[0]["max_iter"] == 2
    assert not each.optimizer.state
    assert all(type(parameter) is nn.Parameter for parameter in each.optimizer._params)


class Twice(torch.optim.SGD):
    """Plain descent by the sum of two evaluations, as people write it."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
            closure()
        super().step()


def test_an_own_optimizer_that_needs_a_closure() -> None:
    model = nn.Linear(8, 8)
    ledger = tl.trace(model, torch.zeros(2, 8), loss=Tensor.sum, optimizer=Twice(model.parameters(), lr=0.1))
    assert ledger.partial == ""
    assert ledger.notes == ("Twice evaluates the model as often as values ask for: 2 evaluations are in this step",)
    assert sum(each.kind == "matmul" for each in ledger) == 2 * 2


def test_a_closure_that_an_optimizer_can_do_without() -> None:
    model = nn.Linear(8, 8)
    for name in ("SGD", "Adam"):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)

        def step(x: Tensor, optimizer: Any = optimizer) -> None:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)

        ledger = tl.trace_step(step, model, torch.zeros(2, 8), optimizers=optimizer)
        assert ledger.notes == ()
        assert {each.phase for each in ledger if each.kind == "matmul"} == {"forward", "backward"}
