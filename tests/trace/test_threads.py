"""Models whose forward runs in threads: the same operations and the same memory as one after the other."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import Setup
from zoo_compared import kept_by, truth

import trainledger as tl
from trainledger.ledger.ledger import Ledger

pytestmark = pytest.mark.torch

Run = Callable[[Callable[[nn.Module], Tensor], list[nn.Module]], list[Tensor]]


class Towers(nn.Module):
    """Two towers of one input, run by whatever runs them."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.run(lambda tower: tower(x), [self.a, self.b])
        return (one * other).mean()


def in_turn(call: Any, towers: Any) -> list[Tensor]:
    return [call(each) for each in towers]


def threads(call: Any, towers: Any) -> list[Tensor]:
    results: dict[int, Tensor] = {}
    several = [threading.Thread(target=lambda at=at: results.update({at: call(towers[at])})) for at in range(2)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    return [results[0], results[1]]


def pool(call: Any, towers: Any) -> list[Tensor]:
    with ThreadPoolExecutor(2) as workers:
        return list(workers.map(call, towers))


def old_pool(call: Any, towers: Any) -> list[Tensor]:
    with ThreadPool(2) as workers:
        return workers.map(call, towers)


def made_before() -> Run:
    workers = ThreadPoolExecutor(2)
    assert [workers.submit(abs, -1).result() for _ in range(2)] == [1, 1]
    return lambda call, towers: list(workers.map(call, towers))


def traced(run: Run) -> Ledger:
    model = Towers(run)
    return tl.trace(model, torch.randn(32, 64), optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("run", [threads, pool, old_pool, "made before"])
@pytest.mark.long
def test_what_threads_run_is_recorded(run: Any) -> None:
    ledger, plain = traced(made_before() if run == "made before" else run), traced(in_turn)
    assert ledger.partial == ""
    (note,) = ledger.notes
    assert "calls ran in threads of their own" in note
    assert plain.notes == ()
    model = Towers(in_turn)
    real = truth(Setup(model, torch.optim.AdamW(model.parameters()), torch.randn(32, 64)), None)
    assert sum(each.flops for each in ledger if each.kind == "matmul") == sum(real.flops.values())
    assert kept_by(ledger) == pytest.approx(real.kept, abs=64)
    assert ledger.peak().nbytes == pytest.approx(real.peak, rel=0.001)
    assert sorted(each.name for each in ledger) == sorted(each.name for each in plain)
    paths = {each.path for each in ledger if each.name == "addmm"}
    assert paths == {"a.0", "a.2", "b.0", "b.2"}


def test_what_a_thread_computes_that_was_there_before_is_missing_and_told() -> None:
    work: queue.Queue[Any] = queue.Queue()
    done: queue.Queue[Any] = queue.Queue()

    def serve() -> None:
        while (call := work.get()) is not None:
            done.put(call())

    server = threading.Thread(target=serve, daemon=True)
    server.start()

    def elsewhere(call: Any, towers: Any) -> list[Tensor]:
        work.put(lambda: call(towers[0]))
        return [done.get(), call(towers[1])]

    ledger = traced(elsewhere)
    work.put(None)
    server.join()
    assert {each.path for each in ledger if each.name == "addmm"} == {"b.0", "b.2"}
    assert any("come from operations that were not recorded" in each for each in ledger.notes)


class Blocks(nn.Module):
    """Checkpointed blocks, whose recomputation makes nodes in the thread that runs the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))
        self.head = nn.Linear(16, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = checkpoint(each, x, use_reentrant=self.reentrant)
        y: Tensor = self.head(x).mean()
        return y


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_in_a_thread_of_its_own_belongs_to_the_modules_of_its_forward(reentrant: bool) -> None:
    """As on an accelerator; each thread counts its nodes for itself."""
    before = torch.autograd._engine_run_backward

    def in_a_thread(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return before(*args, **kwargs)  # a backward inside of a backward stays in its thread
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(before(*args, **kwargs)))
        thread.start()
        thread.join()
        return results[0]

    ledgers = []
    for run in (before, in_a_thread):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.autograd, "_engine_run_backward", run)
            x = torch.randn(4, 16, requires_grad=True)
            ledgers.append(tl.trace(Blocks(reentrant=reentrant), x))
    here, elsewhere = (Counter((each.name, each.path, each.phase) for each in ledger) for ledger in ledgers)
    assert elsewhere == here
    assert {path for _, path, phase in here if phase == "backward"} >= {"blocks.1.0", "blocks.1.1", "head"}


def test_threads_and_pools_are_as_before_after_a_trace() -> None:
    before = threading.Thread.start, ThreadPoolExecutor.submit
    traced(pool)
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == before
