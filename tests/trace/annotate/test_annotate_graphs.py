"""Graphs that no backward uses are told, in loops and alone, and those that one uses later are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainledger.trace.annotate.annotate import annotate
from trainledger.trace.annotate.annotation import PROBLEM, REMARK, Annotation, Finding

torch.set_num_threads(1)
KINDS = ("graph kept alive", "unused graph")
CLEAN = sorted((Path(__file__).parent / "programs").glob("clean_*.py"))


def told(annotation: Annotation) -> list[Finding]:
    assert annotation.ended == ""
    return [each for each in annotation.findings if each.kind in KINDS]


def line_of(function: Callable[..., object], words: str) -> str:
    first = function.__code__.co_firstlineno
    text = Path(function.__code__.co_filename).read_text().splitlines()
    return str(next(at for at, each in enumerate(text[first - 1 :], first) if words in each))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def train(network: nn.Module, count: int = 5) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        network(torch.ones(32, 64)).square().mean().backward()
        optimizer.step()


# Told


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_validation_loop_that_collects_its_losses(fake: bool) -> None:
    def program() -> None:
        network = model()
        train(network)
        losses = []
        for _ in range(5):
            loss = network(torch.ones(32, 64)).square().mean()
            losses.append(loss)

    (found,) = told(annotate(program, fake=fake))
    assert (found.kind, found.weight) == ("graph kept alive", PROBLEM)
    assert found.line.endswith(f":{line_of(program, 'losses.append')}")
    assert "`losses` (list) holds the graphs of 5 iterations" in found.what
    assert "keep `loss.detach()` in `losses`" in found.instead
    # Of each: the activations of 256 (the matmul and its relu) and of 64, the input of 64 and the mask of none.
    most = 4 * 32 * (256 + 256 + 64 + 64)
    assert 4 * 32 * (256 + 64) <= found.nbytes // 5 <= most


def test_without_any_optimizer_and_in_a_function_of_its_own() -> None:
    network = model()

    def evaluate() -> Tensor:
        losses = []
        for _ in range(6):
            losses.append(network(torch.ones(32, 64)).square().mean())
        return torch.stack(losses).mean()

    def program() -> None:
        for _ in range(3):
            evaluate().item()

    (found,) = told(annotate(program))
    assert found.line.endswith(f":{line_of(evaluate, 'losses.append')}")
    assert "6 iterations" in found.what


def test_a_sum_of_losses_and_an_attribute() -> None:
    class Meter:
        def __init__(self) -> None:
            self.values: list[Tensor] = []

    def summed() -> None:
        network = model()
        total = torch.zeros(())
        for _ in range(6):
            total += network(torch.ones(32, 64)).square().mean()

    def metered() -> None:
        network, meter = model(), Meter()
        for _ in range(6):
            loss = network(torch.ones(32, 64)).square().mean()
            meter.values.append(loss)

    (found,) = told(annotate(summed))
    assert found.line.endswith(f":{line_of(summed, 'total +=')}")
    (found,) = told(annotate(metered))
    assert "`meter.values` (attribute)" in found.what


def test_evaluation_without_no_grad_is_a_remark() -> None:
    def program() -> None:
        network = model()
        train(network)
        F.mse_loss(network(torch.ones(32, 64)), torch.ones(32, 64)).item()

    (found,) = told(annotate(program))
    assert (found.kind, found.weight) == ("unused graph", REMARK)
    assert found.line.endswith(f":{line_of(program, 'F.mse_loss')}")
    assert "2 matmul or attention calls and 2.097 MFLOP" in found.what  # 2 x 32 x 64 x 256 twice
    assert found.times == 2


def test_of_a_program_that_ended_early_it_is_a_remark_or_nothing() -> None:
    def program(in_loop: bool) -> None:
        network, losses = model(), []
        for at in range(6):
            losses.append(network(torch.ones(32, 64)).square().mean())
            if in_loop and at == 5:
                raise ValueError
        raise ValueError

    for in_loop in (False, True):
        annotation = annotate(program, [in_loop], on_error=lambda text: None)
        assert annotation.ended
        assert annotation.problems == ()
        assert {each.weight for each in annotation.findings} <= {REMARK}


# Not told


def in_time() -> None:
    cell, state = nn.RNNCell(64, 64), torch.zeros(32, 64)
    states = []
    for _ in range(6):
        state = cell(torch.ones(32, 64), state)
        states.append(state)
    torch.stack(states).mean().backward()


def several_losses_at_once() -> None:
    network, losses = model(), []
    for _ in range(6):
        losses.append(network(torch.ones(32, 64)).square().mean())
    sum(losses).backward()


def only_additions() -> None:
    """Nodes of additions run no operation in backward."""
    network = model()
    terms = [network(torch.ones(32, 64)) for _ in range(6)]
    sums, total = [], torch.zeros(32, 64)
    for each in terms:
        total = total + each
        sums.append(total)
    (sums[-1] + sums[0]).mean().backward()


def an_episode() -> None:
    policy = model()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for _ in range(3):
        chosen = []
        for _ in range(5):
            chosen.append(policy(torch.ones(8, 64)).log_softmax(-1)[:, 0])
        optimizer.zero_grad()
        (-torch.stack(chosen).mean()).backward()
        optimizer.step()


def a_gradient_through_gradients() -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    fast, path = weight, []
    for _ in range(5):
        loss = (torch.ones(32, 64) @ fast).square().mean()
        (gradient,) = torch.autograd.grad(loss, fast, create_graph=True)
        fast = fast - 0.1 * gradient
        path.append(fast)
    (torch.ones(32, 64) @ fast).square().mean().backward()


def checkpointed() -> None:
    for reentrant in (False, True):
        network, x = model(), torch.ones(32, 64, requires_grad=True)
        for _ in range(4):
            x = checkpoint(network, x, use_reentrant=reentrant)
        x.mean().backward()


def without_gradients() -> None:
    network, losses = model(), []
    with torch.no_grad():
        for _ in range(6):
            losses.append(network(torch.ones(32, 64)).square().mean())


def detached() -> None:
    network, losses = model(), []
    for _ in range(6):
        loss = network(torch.ones(32, 64)).square().mean()
        loss.backward()
        losses.append(loss.detach())


def in_functional_style() -> None:
    weight = torch.ones(64, 64)
    for _ in range(5):
        weight = weight - 0.1 * torch.func.grad(lambda w: (torch.ones(32, 64) @ w).square().mean())(weight)


def gradients_of_samples() -> None:
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: (x @ w).square().mean()), in_dims=(None, 0))
    per_sample(torch.ones(64, 64), torch.ones(8, 4, 64))


def frozen_below() -> None:
    backbone, head = model().requires_grad_(False), nn.Linear(64, 4)
    for _ in range(5):
        head(backbone(torch.ones(32, 64))).mean().backward()
        head.zero_grad()


PROGRAMS = (
    in_time, several_losses_at_once, only_additions, an_episode, a_gradient_through_gradients, checkpointed,
    without_gradients, detached, in_functional_style, gradients_of_samples, frozen_below,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=[each.__name__ for each in PROGRAMS])
def test_what_a_backward_uses_is_let_alone(program: Callable[[], None]) -> None:
    assert told(annotate(program)) == []


@pytest.mark.parametrize("file", CLEAN, ids=[each.stem for each in CLEAN])
@pytest.mark.long
def test_clean_programs_have_none(file: Path) -> None:
    assert told(annotate(file)) == []


def test_a_backward_through_additions_alone_is_seen() -> None:
    """They run no operation; what is beside them in the loop is not used."""

    def program() -> None:
        network = model()
        terms = [network(torch.ones(32, 64)) for _ in range(6)]
        sums, beside, total = [], [], torch.zeros(32, 64)
        for each in terms:
            total = total + each
            sums.append(total)
            beside.append(network(torch.ones(32, 64)).repeat(1, 2))
        sums[-1].mean().backward()

    (found,) = [each for each in told(annotate(program)) if each.kind == "graph kept alive"]
    assert "`beside` (list)" in found.what


def test_other_memory_that_grows_is_not_the_graphs() -> None:
    def program() -> None:
        network, losses, batches = model(), [], []
        for _ in range(6):
            batches.append(torch.ones(32, 64))
            loss = network(batches[-1]).square().mean()
            loss.backward()
            network.zero_grad()
            losses.append(loss)

    assert told(annotate(program)) == []


# Steps


def test_too_few_steps_are_said() -> None:
    notes = {count: " ".join(annotate(lambda count=count: train(model(), count)).notes) for count in (2, 3, 4)}
    assert "too few steps to judge: 2; a graph kept alive is found from 4 on, a sync" in notes[2]
    assert "too few steps to judge: 3" in notes[3]
    assert "too few" not in notes[4]
    assert "synchronization" not in notes[3]


# Conversions


def test_a_conversion_back_and_forth() -> None:
    def program() -> None:
        x = torch.ones(64, 64)
        x.float().double().float()
        x.bfloat16().float()
        half = x.bfloat16()
        half.float().bfloat16()
        half.float().mul(2).bfloat16()
        wide = x.double()
        wide.add_(1)
        wide.float()

    found = [each for each in annotate(program).problems if each.kind == "conversion back and forth"]
    assert {each.line.rpartition(":")[2] for each in found} == {
        line_of(program, "x.float().double()"), line_of(program, "half.float().bfloat16()"),
    }  # fmt: skip
    assert sorted(each.nbytes for each in found) == [64 * 64 * (4 + 2), 64 * 64 * (8 + 4)]


# Books


def test_nothing_is_alive_less_than_none() -> None:
    """The gradient that backward starts from is made before it is known that one begins."""

    def program() -> None:
        network = model()
        optimizer = torch.optim.AdamW(network.parameters())
        for _ in range(4):
            F.mse_loss(network(torch.ones(8, 64)), torch.ones(8, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()

    lines = [each for file in annotate(program).files for each in file.lines]
    assert {min(each.alive, each.at_end, each.alive_of_backward) for each in lines if each.backward.operations} == {0}
    assert min(min(each.alive, each.at_end, each.alive_of_backward) for each in lines) == 0


def test_what_costs_most_comes_first() -> None:
    def program() -> None:
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = weight.sum()
            loss.backward()
            optimizer.step()
            losses.append(loss)
            torch.ones(4, 1, 64).expand(4, 64, 64).reshape(-1)
            loss.item()

    assert [each.kind for each in annotate(program).problems] == [
        "broadcast written out", "graph kept alive", "synchronization in a loop",
    ]  # fmt: skip
