"""The engine's own ranks traced in a world of any size, against the closed form of the same layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gathering_again import spread_gathering
from rank_witness import model_of, storage_nbytes
from test_parallel_ranks import FOUR, TWO, TWO_MORE, Case, ledgers_by_rank, sent, tables
from torch.distributed.tensor.parallel import loss_parallel

from models import sizes
from trainledger.answers.load import load
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.parallel.mesh import mesh_of
from trainledger.engine.train.parallel.tensor import finish_gradients
from trainledger.engine.train.step import optimizer_step
from trainledger.ledger.ledger import Ledger
from trainledger.spec.run import Run
from trainledger.trace.distributed import trace_rank
from trainledger.trace.distributed.collectives import local

WIDE: dict[str, Any] = sizes(D=1024, F=4096, V=8192, H=16, KV=8, L=3)
THOUSAND: dict[str, Case] = {
    "fsdp": ({"shard": 1024}, WIDE, {"global_batch": 2048, "micro_batch": 1}),
    "fsdp x tensor": ({"shard": 128, "tensor": 8, "sequence_parallel": True}, WIDE, {"global_batch": 256}),
    "gathered again": (
        {"shard": 128, "tensor": 8, "sequence_parallel": True, "sequence_gather": "again"},
        WIDE,
        {"global_batch": 128, "micro_batch": 1},
    ),
    "hybrid": ({"replicate": 8, "shard": 128}, WIDE, {"global_batch": 1024, "micro_batch": 1}),
    "ddp": ({"replicate": 1024}, WIDE, {"global_batch": 1024, "micro_batch": 1}),
    "fsdp x tensor, fp8": (
        {"shard": 128, "tensor": 8, "sequence_parallel": True},
        WIDE,
        {"global_batch": 256, "precision": "fp8-rowwise-sharded"},
    ),
    "hybrid, fp8": (
        {"replicate": 8, "shard": 128},
        WIDE,
        {"global_batch": 1024, "micro_batch": 1, "precision": "fp8-tensorwise-sharded"},
    ),
}


def program_of(run: Run) -> Callable[[], Callable[[], None]]:
    """What each process of the engine does, up to a function that takes a step."""

    def program() -> Callable[[], None]:
        dist.init_process_group("gloo")
        layout = run.layout
        model = model_of(run)
        if run.recipe.compile:  # before it is spread, as torchtitan does
            for block in model.layers:
                block.compile()
        model, again = spread_gathering(model, layout, mesh_of(layout), run.recipe.precision)
        optimizer = build_optimizer(model, run.recipe)
        shape = (run.device_batch, run.recipe.seq_len)
        batches = [
            (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))
            for _ in range(run.grad_accum)
        ]

        @contextmanager
        def clock(phase: str) -> Iterator[None]:
            if phase == "clip":
                finish_gradients(model)
            yield

        def step() -> None:
            with loss_parallel() if layout.tensor > 1 else nullcontext(), again():
                optimizer_step(model, optimizer, batches, run.recipe, clock=clock)
            optimizer.zero_grad(set_to_none=True)

        return step

    return program


def both(case: Case) -> tuple[Ledger, Ledger]:
    """The traced and the closed ledger of the first rank."""
    run = load(tables(case))
    return trace_rank(program_of(run), world_size=run.layout.devices), ledgers_by_rank(run)[0]


def same(traced: Ledger, closed: Ledger) -> None:
    """Equal in what is sent, when, and how much is held and kept; the peak to 1 %."""
    assert not traced.partial
    assert not traced.notes
    assert not traced.uncounted
    assert told(traced) == told(closed)
    assert traced.parameters == closed.parameters
    held, meant = dict(traced.resident), dict(closed.resident)
    assert {key: held[key] for key in ("parameters", "optimizer state")} == {
        key: meant[key] for key in ("parameters", "optimizer state")
    }
    assert held.get("communication", 0) == meant.get("communication", 0)
    batch = meant["batch"]  # a loss that is split keeps another copy of the targets
    assert 0 <= traced.kept_nbytes - closed.kept_nbytes <= batch
    assert dispatched(traced).peak().nbytes == pytest.approx(closed.peak().nbytes, rel=0.01)


def dispatched(traced: Ledger) -> Ledger:
    """Without what kernels of a CPU allocate inside, such as fp32 copies of factors in bf16: no closed form has it."""
    return replace(
        traced, entries=tuple(each if each.kind == "collective" else replace(each, scratch=0) for each in traced)
    )


def told(ledger: Ledger) -> Counter[tuple[str, str, int, int]]:
    """As `sent`; sums that the engine makes after the last backward belong to that in the closed form."""
    found: Counter[tuple[str, str, int, int]] = Counter()
    for (phase, *rest), times in sent(ledger).items():
        found["backward" if phase == "other" else phase, *rest] += times  # type: ignore[index]
    return found


@pytest.mark.parametrize("name", ["fsdp", "fsdp x tensor", "gathered again", "fsdp x tensor, fp8"])
@pytest.mark.long
def test_a_rank_of_a_thousand_is_what_the_closed_form_says(name: str) -> None:
    same(*both(THOUSAND[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid", "ddp", "hybrid, fp8"])
def test_other_ranks_of_a_thousand(name: str) -> None:
    same(*both(THOUSAND[name]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [*TWO.items(), *TWO_MORE.items(), *FOUR.items()])
def test_every_layout_that_real_processes_have_run(name: str, case: Case) -> None:
    same(*both(case))


def test_groups_are_told_by_their_axis_of_the_mesh() -> None:
    traced, closed = both(FOUR["fsdp x tensor"])
    axes = {(each.group, each.ranks) for each in traced if each.kind == "collective"}
    assert axes == {("shard", 2), ("tensor", 2)}
    told_beside = {(each.name, each.group) for each in traced if each.kind == "collective" and each.overlap}
    meant = {(each.name, each.group) for each in closed if each.kind == "collective" and each.overlap}
    assert told_beside == meant


def test_the_local_part_of_a_tensor_is_what_is_counted() -> None:
    traced, _ = both(TWO["fsdp"])
    own = [each for each in traced.tensors if each.category == "parameters"]
    assert sum(each.nbytes for each in own) == dict(traced.resident)["parameters"]
    assert storage_nbytes([local(torch.zeros(3))]) == 12
