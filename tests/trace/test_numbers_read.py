"""Numbers that optimizers read: what is known decides, what only scales is taken for 0, and the rest is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainledger as tl
from trainledger.observe.measure.meter import AllocatorPeak

pytestmark = pytest.mark.torch


def real_and_traced(optimizer_of: Any) -> tuple[int, int]:
    """Peaks of a step on top of what is there before: by the allocator, and traced."""
    model, x = nn.Linear(128, 128), torch.randn(16, 128)
    optimizer = optimizer_of(model.parameters())

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()

    ledger = tl.trace(model, x, loss=torch.mean, optimizer=optimizer)
    assert ledger.notes == ()
    step()
    model.zero_grad()
    with AllocatorPeak(torch.device("cpu")) as real:
        step()
    assert real.nbytes is not None
    return real.nbytes, ledger.peak().nbytes - sum(nbytes for _, nbytes in ledger.resident)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"t0": 0.0}])
def test_asgd_goes_the_way_that_its_numbers_say(options: dict[str, Any]) -> None:
    real, traced = real_and_traced(lambda parameters: torch.optim.ASGD(parameters, **options))
    assert traced == pytest.approx(real, rel=0.001)


def test_asgd_averages_where_its_state_says_so() -> None:
    model, x = nn.Linear(128, 128), torch.randn(16, 128)
    optimizer = torch.optim.ASGD(model.parameters(), t0=0.0)
    ledgers = []
    for _ in range(3):
        ledgers.append(tl.trace(model, x, loss=torch.mean, optimizer=optimizer))
        model(x).mean().backward()
        optimizer.step()
        model.zero_grad()
    averages = [any(each.name == "sub" and each.phase == "optimizer" for each in ledger) for ledger in ledgers]
    assert averages == [False, True, True]


class Clipped(torch.optim.Optimizer):
    """Plain descent that looks at the norm of a gradient first, as a number or as a truth value."""

    def __init__(self, parameters: Any, way: str) -> None:
        super().__init__(parameters, {})
        self.way = way

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                norm: Tensor = each.grad.norm()
                large = False if self.way == "plain" else norm.item() > 1 if self.way == "number" else bool(norm > 1)
                each.sub_(each.grad * 0.5 if large else each.grad)


@pytest.mark.parametrize(("way", "reads"), [("plain", 0), ("number", 2), ("truth", 2)])
def test_what_an_own_optimizer_reads_is_told(way: str, reads: int) -> None:
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    ledger = tl.trace(model, x, loss=torch.mean, optimizer=Clipped(model.parameters(), way))
    assert ledger.partial == ""
    told = [each for each in ledger.notes if "assumed to be 0" in each]
    assert len(told) == min(1, reads)
    assert all(each.startswith(f"{reads} values read at ") and "test_numbers_read.py:" in each for each in told)


@pytest.mark.parametrize("name", ["Adafactor", "Adam", "NAdam", "RAdam"])
def test_numbers_that_torchs_own_optimizers_read_only_scale(name: str) -> None:
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    ledger = tl.trace(model, x, loss=torch.mean, optimizer=getattr(torch.optim, name)(model.parameters()))
    assert ledger.notes == ()
