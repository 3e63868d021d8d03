"""What experts and multi-token prediction cost in closed form, against sums written by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import spec_of
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.step import account
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep

SPEC = spec_of(
    V=50,
    D=8,
    L=3,
    H=2,
    F=24,
    T=32,
    feed_forward="experts",
    **{"feed_forward.n_experts": 8, "feed_forward.per_token": 2, "feed_forward.expert_d_ff": 5},
)
RECIPE = Recipe(seq_len=16, global_batch=2, steps=1)


def ledger_of(spec: ModelSpec = SPEC, **recipe: Any) -> Ledger:
    return account(Run(model=spec, recipe=with_fields(RECIPE, recipe)))


def expert_flops(ledger: Ledger, amount: str = "flops") -> Any:
    return ledger.filter(lambda each: each.kind == "matmul" and each.path.endswith("mlp.experts")).total(amount)


def test_every_token_passes_through_its_experts_once() -> None:
    tokens, layers, matmuls = 32, 3, 3  # forward, and two in backward
    per_token = 2 * (8 * 10 + 5 * 8)  # gate and up joined, then down
    ledger = ledger_of()
    assert expert_flops(ledger) == expert_flops(ledger, "model_flops") == matmuls * layers * tokens * 2 * per_token


@pytest.mark.parametrize(("factor", "places"), [(1.25, 10), (1.0, 8), (0.3, 3), (7.0, 56)])
def test_places_are_computed_whether_they_hold_a_token_or_not(factor: float, places: int) -> None:
    ledger = ledger_of(expert_dispatch="capacity", **{"expert_dispatch.factor": factor})
    per_row = 3 * 3 * 2 * (8 * 10 + 5 * 8)
    assert expert_flops(ledger) == 8 * places * per_row
    assert expert_flops(ledger, "model_flops") == min(64, 8 * places) * per_row


def test_masks_of_jax_send_tokens_and_fetch_them_as_einsums_do() -> None:
    """As MaxText's (GShard's): those of torch, counted by its own counter, forward and backward."""
    sizes = {"framework": "jax", "expert_dispatch": "capacity", "expert_dispatch.factor": 1.25}
    masks = ledger_of(**sizes).filter(lambda each: each.name == "einsum")
    x, mask = (torch.zeros(shape, device="meta", requires_grad=True) for shape in ((2, 16, 8), (2, 16, 8, 5)))
    with FlopCounterMode(display=False) as counter:
        placed = torch.einsum("bsm,bsec->ebcm", x, mask.detach())
        torch.einsum("ebcm,bsec->bsm", placed, mask).sum().backward()
    assert masks.total("flops") == SPEC.n_layers * counter.get_total_flops()
    assert masks.total("model_flops") == 0


def test_the_default_capacity_is_that_of_switch() -> None:
    given = ledger_of(expert_dispatch="capacity", **{"expert_dispatch.factor": 1.25})
    absent = ledger_of(expert_dispatch="capacity")
    assert given == absent


def test_more_experts_cost_memory_but_no_matmuls() -> None:
    few, many = ledger_of(), ledger_of(with_fields(SPEC, {"feed_forward": "experts", "feed_forward.n_experts": 64}))
    assert expert_flops(few) == expert_flops(many)
    assert dict(many.resident)["parameters"] > 5 * dict(few.resident)["parameters"]


def test_prediction_ahead_adds_modules_that_see_fewer_tokens() -> None:
    plain, ahead = ledger_of(), ledger_of(with_fields(SPEC, {"n_mtp_layers": 2}))
    own = ahead.filter(lambda each: each.path.startswith("mtp.*.eh_proj"))
    assert own.model_flops == 3 * 2 * 2 * (14 + 13) * 16 * 8  # two sequences of 16 tokens: 14 and 13 are left
    assert (
        ahead.parameters - plain.parameters
        == parameters(with_fields(SPEC, {"n_mtp_layers": 2})).by_component["multi-token prediction"]
    )


SIZES: dict[str, list[int]] = {
    "d_model": [8, 24, 40],
    "feed_forward.expert_d_ff": [1, 5, 9],
    "feed_forward.d_ff": [3, 24, 25],
    "seq_len": [4, 9, 16],
    "global_batch": [2, 3, 7],
}
WAYS: list[dict[str, Any]] = [
    {}, {"expert_dispatch": "capacity", "expert_dispatch.factor": 1.1, "load_balance_loss": 0.01},
    {"expert_dispatch": "capacity", "expert_dispatch.factor": 0.6, "precision": "bf16-mixed"},
]  # fmt: skip


def sized(way: dict[str, Any], sizes: dict[str, Any]) -> list[Any]:
    model = {
        name: each
        for name, each in sizes.items()
        if name in ("d_model", "feed_forward.expert_d_ff", "feed_forward.d_ff")
    }
    spec = with_fields(
        SPEC,
        {
            "attention.head_dim": 4,
            "feed_forward.n_shared": 1,
            "feed_forward.n_dense_layers": 1,
            "n_mtp_layers": 1,
            "feed_forward.router.scores": "sigmoid",
            "feed_forward.router.groups": 4,
            "feed_forward.router.top_groups": 2,
            **model,
        },
    )
    ledger = ledger_of(spec, **way, **{name: each for name, each in sizes.items() if name not in model})
    amounts = [ledger.total(each) for each in ("flops", "model_flops", "read", "written", "kept")]
    return [*amounts, ledger.parameters, peak_nbytes(ledger)]


@pytest.mark.parametrize("way", WAYS)
def test_arrays_give_what_each_of_their_ints_gives(way: dict[str, Any]) -> None:
    together = sized(way, {name: np.array(values) for name, values in SIZES.items()})
    for at in range(3):
        alone = sized(way, {name: values[at] for name, values in SIZES.items()})
        assert [int(each[at]) for each in together] == alone


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
def test_formulas_give_what_their_numbers_give(way: dict[str, Any]) -> None:
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in SIZES}
    formulas = sized(way, symbols)
    for at in range(3):
        put = {symbols[name]: sympy.Integer(values[at]) for name, values in SIZES.items()}
        alone = sized(way, {name: values[at] for name, values in SIZES.items()})
        assert [each.xreplace(put) for each in formulas] == alone


@pytest.mark.parametrize(
    ("model", "recipe", "sentence"),
    [
        (
            {"feed_forward": "dense", "feed_forward.expert_d_ff": None},
            {"load_balance_loss": 0.1},
            "the model has no experts",
        ),
        (
            {"feed_forward": "dense", "feed_forward.expert_d_ff": None},
            {"expert_dispatch": "capacity"},
            "the model has no experts",
        ),
        ({"n_mtp_layers": 15}, {}, "must be at least n_mtp_layers + 2"),
    ],
)
def test_what_does_not_go_together_is_said(model: dict[str, Any], recipe: dict[str, Any], sentence: str) -> None:
    run = Run(model=with_fields(SPEC, model), recipe=with_fields(RECIPE, recipe))
    (problem,) = run_problems(run)
    assert sentence in str(problem.rule)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_prediction_ahead_is_refused_where_it_is_not_accounted_for(axis: str) -> None:
    layout, cluster = Layout(**{axis: 2}), Cluster(count=2)
    spec = with_fields(SPEC, {"feed_forward.expert_d_ff": 6})
    run = Run(model=with_fields(spec, {"n_mtp_layers": 1}), recipe=RECIPE, layout=layout, cluster=cluster)
    assert [(each.field, each.nearest) for each in run_problems(run)] == [(f"layout.{axis}", 1)]
    assert not list(run_problems(replace(run, model=spec)))
