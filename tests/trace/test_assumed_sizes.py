"""The basis of what rests on an assumed count: exactly what another count would change, in the same step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import trainledger as tl
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.trace.distributed.program import trace_rank

pytestmark = pytest.mark.torch
WIDTH, TOKENS = 8, 36
Join = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


class Routed(nn.Module):
    """A layer, and experts that pick their tokens by a mask; ``join`` computes and adds up what they find."""

    def __init__(self, join: Join) -> None:
        super().__init__()
        self.inner, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            out = self.join(expert, x, self.router(x)[:, at] > 0, out)
        return self.inner(out)


def added(expert: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    row = torch.where(mask)[0]
    return out.index_add_(0, row, expert(x[row]).softmax(-1))


def functional(expert: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    row = mask.nonzero()[:, 0]
    return out + torch.zeros_like(x).index_add(0, row, expert(x.index_select(0, row)))


def masked(expert: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    out = out.clone()
    out[mask] = F.gelu(expert(x[mask]))
    return out


def padded(expert: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    row = torch.where(mask)[0]
    picked = F.pad(x[row], (0, 0, 0, 3))
    twice = expert(torch.cat([picked, picked])).view(2, -1, WIDTH).sum(0)
    return out.index_add(0, row, twice[: len(row)])


def by_number(expert: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    row = torch.where(mask)[0]
    place = torch.zeros(len(row), WIDTH)
    return out.index_add(0, row, expert(x[row]) + place)


JOINS = (added, functional, masked, padded, by_number)


def what_it_does(entry: Entry) -> Entry:
    """An entry without its basis and without what is freed after it, which was made elsewhere."""
    return replace(entry, basis="", freed=())


def alone(join: Join, assume: tuple[str, ...]) -> Ledger:
    model = Routed(join)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    x = torch.zeros(TOKENS, WIDTH)
    return tl.trace(model, x, optimizer=optimizer, loss=lambda y: y.square().mean(), assume=assume)


def as_rank(join: Join, assume: tuple[str, ...]) -> Ledger:
    def program() -> None:
        dist.init_process_group("gloo")
        model = Routed(join)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        for _ in range(2):
            model(torch.zeros(TOKENS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return trace_rank(program, world_size=2, assume=assume)


@pytest.mark.parametrize("traced", [alone, as_rank])
@pytest.mark.parametrize("join", JOINS)
def test_what_another_count_changes_is_assumed_and_nothing_else(
    join: Join, traced: Callable[[Join, tuple[str, ...]], Ledger]
) -> None:
    some, more = (traced(join, (f"nonzero={count}",)) for count in (11, 13))
    assert some.partial == more.partial == ""
    assert len(some) == len(more)
    # The FLOPs of a softmax are a convention, and assumed in any case.
    for a, b in zip(some, more, strict=True):
        if a.kind != "softmax":
            same = what_it_does(a) == what_it_does(b)
            assert (a.basis, b.basis) == (("exact",) * 2 if same else ("assumed",) * 2), (a, b)
    assert some.by("basis")["exact"] == more.by("basis")["exact"] > 0


@pytest.mark.parametrize("traced", [alone, as_rank])
@pytest.mark.parametrize("join", [added, functional, masked])
@pytest.mark.long
def test_all_elements_are_a_bound_of_the_same_operations(
    join: Join, traced: Callable[[Join, tuple[str, ...]], Ledger]
) -> None:
    some, most = traced(join, ("nonzero=11",)), traced(join, ())
    for a, b in zip(some, most, strict=True):
        if a.name != "zeros" and a.kind != "softmax":  # of a plain number, which is here that of the tokens
            assert b.basis == ("bound" if a.basis == "assumed" else a.basis), (a, b)
    assert most.by("basis")["bound"] > some.by("basis")["assumed"] > 0


@pytest.mark.slow
def test_a_compiled_expert_rests_on_the_count_as_well() -> None:
    def through_kernels(expert: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
        row = torch.where(mask)[0]
        return out.index_add(0, row, torch.compile(lambda y: F.gelu(y * 2).tanh() + y)(x[row]))

    ledger = alone(through_kernels, ("nonzero=11",))
    kernels = [each for each in ledger if each.source == "torch._inductor"]
    assert kernels
    assert {each.basis for each in kernels} == {"assumed"}
