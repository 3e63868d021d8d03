"""Sparse gradients of tables, followed row by row, beside the allocator's own events of a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import Setup
from zoo_compared import kept_by, quiet, traced, truth
from zoo_own_code import sparse_clicks

import trainledger as tl
from trainledger.trace.fakes.results import results_of
from trainledger.trace.fakes.tensors import FakeTensorMode
from trainledger.trace.fakes.values import ZeroWhereUnknown

pytestmark = pytest.mark.torch


class Words(nn.Module):
    """A table whose gradient is sparse, and a layer whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(1000, 64, sparse=True), nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layer(self.table(ids))
        return out


def words(**options: Any) -> Setup:
    """Each word once: where entries of the same row are added up none disappears."""
    torch.manual_seed(0)
    model, ids = Words(), torch.randperm(1000)[: options.pop("rows", 256)].clone()
    kind = options.pop("kind", "SGD")
    if kind != "SparseAdam":
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        return Setup(model, optimizer, ids, lambda out: out.square().mean())
    several = torch.optim.SparseAdam([model.table.weight]), torch.optim.AdamW(model.layer.parameters())

    def step(batch: Any, phase: Any) -> None:
        with phase("forward"):
            loss = model(*batch).square().mean()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            for each in several:
                each.step()

    return Setup(model, several, (ids,), step=step)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, False),
        ({"momentum": 0.9}, False),
        ({"kind": "Adagrad"}, True),
        ({"kind": "SparseAdam"}, True),
        ({"kind": "Adagrad", "rows": 1}, False),
        ({"table": "bags"}, False),
    ],
)
@pytest.mark.long
def test_steps_on_sparse_gradients_are_as_they_run(options: dict[str, Any], said: bool) -> None:
    setup = sparse_clicks() if "table" in options else words(**options)
    with quiet():
        ledger, real = traced(setup, None), truth(setup, None)
    assert ledger.partial == ""
    assert ledger.uncounted == ()
    assert ledger.peak().nbytes == pytest.approx(real.peak, rel=0.003)
    assert kept_by(ledger) == pytest.approx(real.kept, abs=64)
    assert [each for each in ledger.notes if "keep all its rows" not in each] == []
    assert bool(ledger.notes) == said


def test_the_gradient_of_a_table_is_as_large_as_its_batch() -> None:
    setup = words()
    ledger = tl.trace(setup.model, setup.batch, loss=setup.loss, optimizer=setup.optimizer)
    gradients = [each for each in ledger.tensors if each.category == "gradients" and each.shape == (256, 64)]
    assert sum(each.nbytes for each in gradients) == 256 * 64 * 4
    assert not any(each.category == "gradients" and each.shape == (1000, 64) for each in ledger.tensors)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, dense: x.clone(), lambda x, dense: x * 2, lambda x, dense: x / 2, lambda x, dense: x.pow(2),
        lambda x, dense: dense.sparse_mask(x), lambda x, dense: (-x).sqrt(),
        lambda x, dense: x.coalesce(),
    ],
)  # fmt: skip
def test_rows_of_results_are_those_of_real_ones(operation: Any) -> None:
    def rows() -> tuple[int, int]:
        where = torch.arange(7)[None]
        made = operation(torch.sparse_coo_tensor(where, torch.ones(7, 4), (10, 4), check_invariants=False),
                         torch.ones(10, 4))  # fmt: skip
        return made._values().shape, made._indices().shape

    with FakeTensorMode(), ZeroWhereUnknown(results=results_of("cpu")):
        fake = rows()
    assert fake == rows()
