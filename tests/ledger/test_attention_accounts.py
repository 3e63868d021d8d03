"""Accounts of attention that no CPU can witness step by step, and accounts of many sizes at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from thinned import thinned
from trainledger.ledger import rules
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.step import account
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep

HEADS: dict[str, Any] = {"attention.n_heads": 4, "attention.n_kv_heads": 2, "attention.head_dim": 8}
LATENT: dict[str, Any] = {
    "attention.n_heads": 4,
    "attention": "latent",
    "attention.kv_rank": 12,
    "attention.nope_head_dim": 8,
    "attention.rope_head_dim": 4,
    "attention.v_head_dim": 8,
}


def run_of(model: dict[str, Any], *, seq_len: Any = 64, micro_batch: Any = 2, **rest: Any) -> Run:
    given = {"d_model": 40, "n_layers": 3, "feed_forward.d_ff": 48, "vocab_size": 100}
    recipe: dict[str, Any] = {"precision": "bf16-mixed"}
    for name, value in rest.items():
        (given if name in given else recipe)[name] = value
    batch = {"global_batch": micro_batch, "micro_batch": micro_batch, "seq_len": seq_len, "steps": 1}
    return Run(
        model=from_fields(ModelSpec, {"max_seq_len": 4096, **given, **model}), recipe=from_fields(Recipe, {**batch,
        **recipe})
    )  # fmt: skip


def fused(ledger: Ledger, phase: str = "forward") -> list[Entry]:
    return [each for each in ledger.entries if each.kind == "attention" and each.phase == phase]


# Kernels of accelerators


@pytest.mark.parametrize(
    "fields",
    [
        {"attention.window": 16},
        {"attention.softcap": 20.0},
        {"positions": "alibi"},
        {"attention.window": 7, "attention.global_every": 2},
    ],
)
def test_flash_stores_no_scores_and_no_masks(fields: dict[str, Any]) -> None:
    plain = account(run_of(HEADS, attention="flash"), backend="cuda")
    special = account(run_of({**HEADS, **fields}, attention="flash"), backend="cuda")
    B, T, H, G, K, layers = 2, 64, 4, 2, 8, 3
    per_layer = 2 * B * T * K * (2 * H + 2 * G) + 4 * B * H * T + 24  # q, out, k, v in bf16, a logsumexp
    assert sum(each.written * each.times for each in fused(plain)) + 2 * B * T * K * (H + 2 * G) * layers == (
        per_layer * layers
    )
    assert [each.read for each in fused(special)] == [fused(plain)[0].read] * len(fused(special))
    assert {each.name for each in fused(special)} == {"_scaled_dot_product_flash_attention"}
    if "positions" not in fields:
        assert special.kept_nbytes == plain.kept_nbytes


def test_sinks_in_flash_are_read_and_learn() -> None:
    plain = account(run_of(HEADS, attention="flash"), backend="cuda")
    sinks = account(run_of({**HEADS, "attention.sinks": True}, attention="flash"), backend="cuda")
    assert sinks.parameters - plain.parameters == 3 * 4
    assert fused(sinks)[0].read - fused(plain)[0].read == 4 * 4
    gradients = fused(sinks, "backward")[0].written - fused(plain, "backward")[0].written
    assert gradients == 4 * 4


def test_a_window_spares_work_only_where_the_kernel_knows_it() -> None:
    def flops(attention: str, **fields: Any) -> int:
        ledger = account(run_of({**HEADS, **fields}, attention=attention), backend="cuda")
        return sum(each.flops * each.times for each in fused(ledger))

    whole = 3 * rules.attention_flops(2, 4, 64, 64, 8, 8)
    assert flops("flash") == flops("sdpa") == flops("sdpa", **{"attention.window": 16}) == whole
    assert flops("flash", **{"attention.window": 16}) == whole // 4
    assert flops("flash", **{"attention.window": 16, "attention.global_every": 3}) == whole // 3 + 2 * whole // 12
    assert flops("flash", **{"attention.window": 1000}) == whole


def test_on_accelerators_sdpa_runs_the_kernel_that_pytorch_takes() -> None:
    def names(**rest: Any) -> set[str]:
        model = rest.pop("model", HEADS)
        return {
            each.name.removeprefix("_scaled_dot_product_")
            for each in fused(account(run_of(model, **rest), backend="cuda"))
        }

    assert names() == names(attention_dropout=0.1) == {"flash_attention"}
    assert names(precision="fp32") == {"efficient_attention"}
    assert names(model={**HEADS, "attention.window": 16}) == {"efficient_attention"}
    assert names(model={**HEADS, "attention.window": 64}) == {"flash_attention"}, (
        "a window that hides nothing needs no mask"
    )
    assert names(model={**HEADS, "attention.window": 16, "attention.global_every": 2}) == {
        "efficient_attention",
        "flash_attention",
    }
    assert names(model={**HEADS, "positions": "alibi"}) == {"efficient_attention"}
    assert names(model=LATENT) == {"efficient_attention"}
    assert names(model={**LATENT, "attention.v_head_dim": 12}) == {"flash_attention"}


def test_a_mask_is_kept_once_for_all_layers_and_its_kernel_wants_every_head_of_its_own() -> None:
    few, many = (
        account(run_of({**HEADS, "attention.window": 16}, n_layers=n, attention="efficient"), backend="cuda")
        for n in (1, 9)
    )
    plain_few, plain_many = (account(run_of(HEADS, n_layers=n, attention="flash"), backend="cuda") for n in (1, 9))
    mask = 2 * 64 * 64
    copied = 2 * 2 * 2 * 64 * 8 * (4 - 2)  # k and v of four heads instead of two, in bf16
    state = 16 - 24  # of the generators
    assert few.kept_nbytes - plain_few.kept_nbytes == mask + copied + state
    assert many.kept_nbytes - plain_many.kept_nbytes == mask + 9 * (copied + state)


@pytest.mark.parametrize(
    ("fields", "attention", "backend", "sentence"),
    [
        ({"attention.softcap": 2.0}, "sdpa", "cpu", "capped scores.* math"),
        ({"attention.softcap": 2.0}, "efficient", "cuda", "capped scores.* flash"),
        ({"attention.sinks": True}, "sdpa", "cuda", "attention sinks.* flash"),
        ({"attention.softcap": 2.0}, "flash", "cpu", "not of a CPU.* math"),
        ({}, "efficient", "cpu", "not of a CPU.* sdpa"),
        ({}, "flash", "cuda", "for 16 bits.* fp32 here.* efficient"),
        ({"attention.sinks": True}, "cudnn", "sm90", "for 16 bits.* fp32 here.* math"),
        ({"attention.softcap": 2.0}, "sdpa", "sm90", "capped scores.* math"),
    ],
)
def test_what_no_kernel_does_has_no_account(fields, attention, backend, sentence):
    precision = "bf16-mixed" if sentence.endswith("flash") else "fp32"
    run = run_of({**HEADS, **fields}, attention=attention, precision=precision)
    with pytest.raises(InvalidInput, match=sentence):
        account(run, backend=backend)
    nearest = replace(run, recipe=replace(run.recipe, attention=sentence.split()[-1]))
    assert account(nearest, backend=backend).kept_nbytes > 0


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_counted_one_by_one(tokens: int, window: int | None) -> None:
    seen = [(t, s) for t in range(tokens) for s in range(tokens) if s <= t and (window is None or t - s < window)]
    assert rules.attended_pairs(tokens, window) == len(seen)
    assert rules.attended_pairs(tokens, window, causal=False) == tokens * min(tokens, window or tokens)


# Arrays and symbols

KINDS: dict[str, dict[str, Any]] = {
    "latent": {"model": LATENT, "precision": "fp32"},
    "low-rank queries, written out": {
        "model": {**LATENT, "attention.q_rank": 6, "positions.interleaved": True},
        "attention": "math",
        "attention_dropout": 0.1,
    },
    "windows": {
        "model": {
            **HEADS,
            "attention.window": 8,
            "attention.qk_norm": "head",
            "positions.dim": 4,
            "n_layers": 4,
            "attention.global_every": 2,
        }
    },
    "alibi": {
        "model": {**HEADS, "positions": "alibi", "attention.qk_norm": "width"},
        "activation_checkpointing": "full",
    },
    "sinks and caps": {
        "model": {**HEADS, "attention.sinks": True, "attention.softcap": 9.0, "attention.window": 8},
        "attention": "math",
        "activation_checkpointing": "full",
    },
    "flash in windows": {"model": {**HEADS, "attention.window": 16}, "attention": "flash", "backend": "cuda"},
    "masks on an accelerator": {"model": {**HEADS, "attention.window": 8}, "backend": "cuda"},
}


def figures(kind: dict[str, Any], **sizes: Any) -> list[Any]:
    fields = {name: value for name, value in kind.items() if name not in ("model", "backend")}
    ledger = account(run_of(kind["model"], **fields, **sizes), backend=kind.get("backend", "cpu"))
    amounts = [ledger.total(each) for each in ("flops", "model_flops", "read", "written", "kept")]
    return [*amounts, ledger.kept_nbytes, ledger.parameters, ledger.tokens, peak_nbytes(ledger)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("size", "values"), [("micro_batch", [2, 3, 8]), ("d_model", [8, 33]), ("seq_len", [9, 16, 40])]
)
def test_an_array_gives_what_each_of_its_ints_gives(kind: dict[str, Any], size: str, values: list[int]) -> None:
    together = figures(kind, **{size: np.array(values)})
    for at, value in enumerate(values):
        assert [int(np.broadcast_to(each, len(values))[at]) for each in together] == figures(kind, **{size: value})


@pytest.mark.parametrize("kind", thinned(KINDS.values()), ids=KINDS)
def test_a_formula_gives_what_its_numbers_give(kind: dict[str, Any]) -> None:
    names = ("micro_batch", "d_model", "seq_len")
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in names}
    formulas = figures(kind, **symbols)
    for numbers in ((2, 12, 9), (4, 40, 33)):
        put = {symbols[name]: sympy.Integer(each) for name, each in zip(names, numbers, strict=True)}
        ints = figures(kind, **dict(zip(names, numbers, strict=True)))
        assert [each.xreplace(put) for each in formulas] == ints


def test_a_window_that_hides_nothing_costs_nothing() -> None:
    for attention in ("sdpa", "math"):
        plain, wide = (run_of(each, attention=attention) for each in (HEADS, {**HEADS, "attention.window": 64}))
        assert account(plain).peak().nbytes == account(wide).peak().nbytes
        assert len(account(plain)) == len(account(wide))


def test_the_account_does_not_grow_with_equal_layers() -> None:
    run = run_of({**HEADS, "attention.window": 8, "attention.global_every": 4})
    few, many = (len(account(replace(run, model=replace(run.model, n_layers=n)))) for n in (8, 800))
    assert few == many


@pytest.mark.parametrize("attention", ["sdpa", "cudnn"])
def test_cudnns_kernel_takes_masks_and_every_query_has_its_own_key_then(attention: str) -> None:
    ledger = account(run_of({**HEADS, "attention.window": 16}, attention=attention), backend="sm90")
    kernels = {(each.name, each.shape[-1]) for each in fused(ledger)}
    assert kernels == {("_scaled_dot_product_cudnn_attention", 0)}
    heads, mask = 2 * 4 * 64 * 8, 64 * 64
    assert {each.read for each in fused(ledger)} == {2 * (3 * heads + mask)}


# What a device lacks


@pytest.mark.parametrize(
    ("backend", "precision", "framework", "kernel"),
    [
        ("cuda", "fp16-mixed", "torch", "_scaled_dot_product_flash_attention"),
        ("other", "bf16-mixed", "torch", "_scaled_dot_product_flash_attention"),
        ("sm70", "fp16-mixed", "torch", "_scaled_dot_product_efficient_attention"),
        ("sm70", "fp32", "torch", "_scaled_dot_product_efficient_attention"),
        ("sm70", "bf16-mixed", "torch", None),
        ("sm70", "fp16", "megatron-core", None),
        ("cuda", "fp16", "megatron-core", "_scaled_dot_product_flash_attention"),
    ],
)
def test_sdpa_is_a_kernel_that_the_device_has_or_unfused(
    backend: str, precision: str, framework: str, kernel: str | None
) -> None:
    run = run_of(HEADS, precision=precision, framework=framework)
    ledger = account(run, backend=backend)
    assert {each.name for each in fused(ledger)} == ({kernel} if kernel else set())
    if kernel is None:
        same = replace(run, recipe=replace(run.recipe, attention="math"))
        assert ledger.peak() == account(same, backend=backend).peak()


@pytest.mark.parametrize(
    ("kernel", "backend", "precision", "nearest"),
    [
        ("flash", "sm70", "fp16-mixed", "sdpa"),
        ("cudnn", "sm70", "fp16-mixed", "sdpa"),
        ("efficient", "sm70", "bf16-mixed", "sdpa"),
        ("cudnn", "other", "bf16-mixed", "sdpa"),
        ("efficient", "cpu", "bf16-mixed", "sdpa"),
    ],
)
def test_a_kernel_that_a_device_lacks_is_refused_with_one_that_works(
    kernel: str, backend: str, precision: str, nearest: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        account(run_of(HEADS, attention=kernel, precision=precision), backend=backend)
    (problem,) = refused.value.problems
    assert (problem.field, problem.nearest) == ("recipe.attention", nearest)
    account(run_of(HEADS, attention=nearest, precision=precision), backend=backend)
