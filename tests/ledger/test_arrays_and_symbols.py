"""The account written once: ints give one run, arrays many runs, symbols a formula."""

from typing import Any

import numpy as np
import pytest
import sympy

from models import spec_of
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.step import account
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

GPT2 = {
    "norm": "layernorm",
    "norm.bias": True,
    "feed_forward.activation": "gelu",
    "feed_forward.gated": False,
    "positions": "learned",
    "attention.bias": True,
    "feed_forward.bias": True,
    "tie_embeddings": True,
}
KINDS: list[dict[str, Any]] = [
    {},
    {
        "attention": "math",
        "precision": "bf16-mixed",
        "activation_checkpointing": "full",
        "optimizer.implementation": "loop",
    },
    {
        "precision": "bf16",
        "precision.master_weights": True,
        "precision.gradient_dtype": "fp32",
        "activation_checkpointing": "full",
    },
    {"precision": "fp16-mixed", "model": GPT2},
    {"precision": "bf16-sharded", "optimizer.implementation": "foreach"},
    {"precision": "fp8-block", "precision.master_weights": True},
    {"model": GPT2, "optimizer": "rmsprop", "optimizer.implementation": "foreach", "dropout": 0.1, "grad_clip": None},
]


def ledger_of(kind: dict[str, Any], *, micro_batch: Any = 2, grad_accum: Any = 3, **sizes: Any) -> Ledger:
    recipe = {name: value for name, value in kind.items() if name != "model"}
    given = {"d_model": 40, "n_layers": 3, "d_ff": 48, "vocab_size": 100, "max_seq_len": 16, "seq_len": 16, **sizes}
    given["feed_forward.d_ff"] = given.pop("d_ff")
    seq_len = given.pop("seq_len")
    model = from_fields(
        ModelSpec,
        {"attention.n_heads": 4, "attention.n_kv_heads": 2, "attention.head_dim": 8, **given, **kind.get("model", {})},
    )
    batch = {"global_batch": micro_batch * grad_accum, "micro_batch": micro_batch, "seq_len": seq_len, "steps": 1}
    return account(Run(model=model, recipe=from_fields(Recipe, {**batch, **recipe})))


def figures(ledger: Ledger) -> list[Any]:
    amounts = [ledger.total(each) for each in ("flops", "model_flops", "read", "written", "kept")]
    return [*amounts, ledger.kept_nbytes, ledger.parameters, ledger.tokens, peak_nbytes(ledger)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "values"),
    [
        ("micro_batch", [2, 3, 8]),
        ("grad_accum", [2, 3, 5]),
        ("n_layers", [1, 2, 3, 31]),
        ("d_ff", [1, 33, 64]),
        ("d_model", [8, 33, 40]),
        ("vocab_size", [2, 17, 1000]),
        ("seq_len", [2, 7, 16]),
    ],
)
def test_an_array_gives_what_each_of_its_ints_gives(kind: dict[str, Any], size: str, values: list[int]) -> None:
    together = figures(ledger_of(kind, **{size: np.array(values)}))
    for at, value in enumerate(values):
        alone = figures(ledger_of(kind, **{size: value}))
        assert [int(np.broadcast_to(each, len(values))[at]) for each in together] == alone


def test_arrays_broadcast_against_each_other() -> None:
    batches, layers = np.array([[2], [4]]), np.array([1, 2, 3])
    peaks = peak_nbytes(ledger_of({}, micro_batch=batches, n_layers=layers))
    assert peaks.shape == (2, 3)
    assert peaks[1, 2] == peak_nbytes(ledger_of({}, micro_batch=4, n_layers=3))


def test_a_batch_of_one_among_others_where_kernels_are_the_same() -> None:
    together = figures(ledger_of({}, micro_batch=np.array([1, 2])))
    assert [int(np.broadcast_to(each, 2)[0]) for each in together] == figures(ledger_of({}, micro_batch=1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_formula_gives_what_its_numbers_give(kind: dict[str, Any]) -> None:
    names = ("micro_batch", "grad_accum", "n_layers", "d_ff", "d_model", "vocab_size", "seq_len")
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in names}
    formulas = figures(ledger_of(kind, **symbols))
    for numbers in ((2, 2, 2, 7, 12, 5, 3), (3, 4, 5, 48, 40, 100, 16)):
        put = {symbols[name]: sympy.Integer(each) for name, each in zip(names, numbers, strict=True)}
        ints = figures(ledger_of(kind, **dict(zip(names, numbers, strict=True))))
        assert [each.xreplace(put) for each in formulas] == ints


def test_the_formula_of_the_parameters() -> None:
    L, D, F, V = sympy.symbols("L D F V", integer=True, positive=True)
    spec = spec_of(V=V, D=D, L=L, H=4, K=8, F=F, T=16)
    assert sympy.expand(parameters(spec).total - (2 * V * D + L * (4 * 32 * D + 3 * D * F + 2 * D) + D)) == 0


def test_the_account_does_not_grow_with_the_layers() -> None:
    for kind in KINDS:
        assert len(ledger_of(kind, n_layers=2)) == len(ledger_of(kind, n_layers=200))
        assert len(ledger_of(kind, grad_accum=2)) == len(ledger_of(kind, grad_accum=64))
