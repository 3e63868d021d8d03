"""Every kind of block, attention, expert and precision: the closed form and the trace of each agree.

Each table covers every pair of its settings (`pairwise`); `test_closed_form_equals_trace` draws runs at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch
from agreement import assert_agree, facts, same_totals, unrolled
from pairwise import Case, covering
from random_runs import GPT2, LLAMA, one_wide, run_of

from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse, rehearse_really
from trainledger.spec.block import ACTIVATIONS, ROUTER_SCORES
from trainledger.spec.model import NORM_PLACES, ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.precision import PRECISIONS
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement
torch.set_num_threads(1)


def run_from(case: Case) -> Run:
    """The run of a case: settings of the recipe begin with ``recipe.``; ``accumulated`` micro-batches make a step."""
    recipe = {name.removeprefix("recipe."): value for name, value in case.items() if name.startswith("recipe.")}
    spec = {name: value for name, value in case.items() if not name.startswith("recipe.")}
    recipe["global_batch"] = recipe["micro_batch"] * recipe.pop("accumulated", 1)
    spec["max_seq_len"] = recipe["seq_len"] + spec.pop("spare_positions", 0)
    return Run(model=from_fields(ModelSpec, spec), recipe=from_fields(Recipe, {"steps": 3, **recipe}))


def norms(random: Random) -> Case:
    """Which norm, and where it is."""
    norm, block = random.choice(("rmsnorm", "layernorm")), random.choice(("serial", "parallel", "parallel-two-norms"))
    if norm == "rmsnorm":
        own: Case = {"norm.plus_one": random.choice((True, False))}
    else:
        weight = random.choice((True, True, False))
        own = {"norm.weight": weight, "norm.bias": weight and random.choice((True, False))}
    place = random.choice(NORM_PLACES) if block == "serial" else "pre"
    return {"norm": norm, **own, "block": block, "norm_place": place}


def ends(random: Random) -> Case:
    """What comes before the first block and after the last, and how many layers have which positions."""
    choice, positions = random.choice, random.choice(("rope", "learned", "none"))
    own: Case = {}
    if positions == "learned":
        own = {"positions.extra_rows": choice((0, 2))}
    elif positions == "rope":
        own = {"positions.skip_every": choice((None, None, 1, 2, 3))}
    return {
        "positions": positions, **own, "embedding_scale": choice((1.0, 5.5)), "embedding_norm": choice((True, False)),
        "vocab_multiple": choice((1, 8, 64)), "head_bias": choice((True, False)), "logit_scale": choice((1.0, 0.25)),
        "logit_softcap": choice((None, 30.0)), "tie_embeddings": choice((True, False)),
        "n_layers": choice((1, 2, 3, 5, 6)),
    }  # fmt: skip


def recipes(random: Random, **more: Any) -> Case:
    choice = random.choice
    drawn = {
        "micro_batch": choice((1, 2, 3)), "accumulated": choice((1, 1, 2)), "seq_len": choice((2, 3, 8)),
        "precision": choice(("fp32", "bf16-mixed")), "activation_checkpointing": choice(("none", "full")),
        "dropout": choice((0.0, 0.1)),
    }  # fmt: skip
    return {f"recipe.{name}": value for name, value in (drawn | more).items()}


def blocks(random: Random) -> Case:
    """Blocks of every kind with their norms, MLPs and ends."""
    choice, gated = random.choice, random.choice((True, False))
    activations = [each for each in ACTIVATIONS if gated or each != "clamped_swish"]
    return {
        "vocab_size": choice((5, 17, 64)), "d_model": choice((8, 12, 33)), "attention.n_heads": choice((1, 2)),
        "attention.head_dim": choice((2, 4)), "attention.bias": choice((True, False)),
        "feed_forward.d_ff": choice((7, 32)), "feed_forward.gated": gated, "feed_forward.bias": choice((True, False)),
        "feed_forward.activation": choice(activations), "spare_positions": choice((0, 3)), **ends(random),
        **norms(random), **recipes(random, optimizer="adamw", **{"optimizer.implementation": choice(("fused",
        "loop"))}),
    }  # fmt: skip


def combined(random: Random) -> Case:
    """Blocks of every kind with experts in some layers, windows on some, and tokens predicted ahead."""
    case, choice = blocks(random), random.choice
    if choice((True, True, False)) and case["feed_forward.activation"] in ("silu", "gelu", "relu2"):
        case |= {
            "feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.every": choice((1, 2, 3)),
            "feed_forward.n_dense_layers": choice((0, 1)), "feed_forward.n_shared": choice((0, 1)),
        }  # fmt: skip
    if choice((True, False)):
        case |= {"attention.window": 2, "attention.global_every": choice((None, 2, 3))}
        if case["positions"] == "rope":
            case["positions.local_theta"] = 100.0
    if choice((True, False)) and case["recipe.seq_len"] > 3:
        case["n_mtp_layers"] = choice((1, 2))
    return case


def attention(random: Random) -> Case:
    """Heads shared by 1 to 6 queries, normalized or not, under any positions, windows and sinks; latent attention."""
    choice = random.choice
    kernel = choice(("sdpa", "math"))
    fields = latent(random) if choice((True, False, False)) else heads(random, kernel)
    norm = choice(("rmsnorm", "layernorm"))
    return {
        "vocab_size": 17, "d_model": choice((2, 8, 33)), "n_layers": choice((1, 2, 3)), "feed_forward.d_ff": 7,
        "spare_positions": choice((0, 3)), "norm": norm, "attention.scale": choice((None, 0.3)),
        **({"norm.bias": choice((True, False))} if norm == "layernorm" else {}), **fields,
        **recipes(random, attention=kernel, seq_len=choice((1, 2, 3, 8, 17)), optimizer="sgd",
                  attention_dropout=choice((0.0, 0.0, 0.1))),
    }  # fmt: skip


def heads(random: Random, kernel: str) -> Case:
    choice = random.choice
    n_heads, positions = choice((1, 2, 3, 4, 6)), choice(("rope", "rope", "learned", "alibi", "none"))
    turned = ("turned",) if positions == "rope" else ()
    qk_norm, window = choice((None, "head", "width", *turned)), choice((None, 1, 2, 5, 16))
    value_norm = choice((True, False))
    # Of a width of one torch leaves out sums that have nothing to sum.
    odd = (1, 3, 5) if qk_norm is None and not value_norm else (3, 5)
    width = choice((2, 4, 6, 16) if positions == "rope" else (*odd, 16))
    fields: Case = {
        "attention.n_heads": n_heads, "attention.head_dim": width, "positions": positions,
        "attention.n_kv_heads": n_heads // choice([each for each in (1, 2, 3, 6) if n_heads % each == 0]),
        "attention.bias": choice((True, False)), "attention.output_bias": choice((None, True, False)),
        "attention.qk_norm": qk_norm, "attention.window": window,
    }  # fmt: skip
    if positions == "rope":
        fields |= {
            "positions.dim": choice([None, *range(2, width + 1, 2)]), "positions.interleaved": choice((True, False)),
            "positions.skip_every": choice((None, None, 1, 2)),
        }  # fmt: skip
        scaling = choice((None, "llama3", "linear", "yarn", "proportional"))
        if scaling == "proportional":
            fields |= {"positions.scaling": scaling, "positions.scaling.turned": 0.5}
        elif scaling is not None:
            fields |= {"positions.scaling": scaling, "positions.scaling.factor": 4.0}
    if window is not None:
        fields |= {"attention.global_every": choice((None, 2, 3)), "attention.chunked": choice((True, False))}
        if positions == "rope":
            fields["positions.local_theta"] = choice((None, 500.0))
    values = choice(("own", "own", "keys", "narrow"))
    fields |= {"attention.value_norm": value_norm, "attention.value_scale": choice((1.0, 0.7))}
    fields |= {"attention.keys_as_values": values == "keys", "attention.v_head_dim": 3 if values == "narrow" else None}
    if window is not None and fields.get("positions.local_theta", "any") is not None and choice((True, False)):
        others = {"n_kv_heads": n_heads, "head_dim": choice((None, 18)), "keys_as_values": values != "narrow" or None}
        fields |= {f"attention.in_global.{name}": value for name, value in others.items()}
        if positions == "rope":
            fields["positions.local_dim"] = choice((None, 2))
    if kernel == "math":
        fields |= {"attention.sinks": choice((True, False)), "attention.softcap": choice((None, 20.0))}
    return fields


def latent(random: Random) -> Case:
    """Latent attention with values narrower than keys, as wide, and wider."""
    choice = random.choice
    return {
        "attention": "latent", "attention.n_heads": choice((1, 2, 3)), "attention.kv_rank": choice((2, 5, 16)),
        "attention.q_rank": choice((None, 2, 7)), "attention.nope_head_dim": choice((1, 4, 6)),
        "attention.rope_head_dim": choice((2, 4)), "attention.v_head_dim": choice((1, 6, 8, 12)),
        "attention.bias": choice((True, False)), "positions.interleaved": choice((True, False)),
    }  # fmt: skip


def experts(random: Random) -> Case:
    """Experts of every kind, how they are chosen and how tokens reach them, and tokens predicted ahead."""
    choice, gated, seq_len = random.choice, random.choice((True, False)), random.choice((1, 2, 5, 8))
    groups, size = choice(((1, 4), (1, 5), (2, 1), (2, 3), (4, 2)))
    shared, n_layers, own = choice((0, 1, 2)), choice((1, 2, 3)), choice((False, False, True))
    top_groups, capacity = random.randint(1, groups), choice((None, None, 0.4, 1.0, 1.25, 3.0))
    return {
        "vocab_size": choice((5, 17)), "d_model": choice((6, 8, 16)), "attention.n_heads": 2, "attention.head_dim": 4,
        "n_layers": n_layers, "tie_embeddings": choice((True, False)),
        "n_mtp_layers": choice((0, 1, 2)) if seq_len > 3 else 0,
        "feed_forward": "experts", "feed_forward.d_ff": choice((7, 16)), "feed_forward.gated": gated,
        "feed_forward.bias": choice((True, False)), "feed_forward.expert_d_ff": choice((None, 3, 8)),
        "feed_forward.expert_d_model": choice((None, None, 4, 8)),
        "feed_forward.own_norms": own, "norm_place": "sandwich" if own else choice(("pre", "sandwich")),
        "feed_forward.activation": choice(("silu", "clamped_swish") if gated else ("gelu", "relu2")),
        "feed_forward.n_experts": groups * size, "feed_forward.per_token": random.randint(1, min(3, size * top_groups)),
        "feed_forward.n_shared": shared, "feed_forward.shared_gate": shared > 0 and not own and choice((True, False)),
        "feed_forward.n_dense_layers": choice((0, 0, 1, n_layers)), "feed_forward.every": choice((1, 1, 2)),
        "feed_forward.router.groups": groups, "feed_forward.router.top_groups": top_groups,
        "feed_forward.router.scores": choice(ROUTER_SCORES), "feed_forward.router.bias": choice((True, False)),
        "feed_forward.router.normalize": choice((True, False)), "feed_forward.router.scale": choice((1.0, 2.5)),
        "feed_forward.router.correction": choice((True, False)),
        **recipes(
            random, seq_len=seq_len, dropout=0.0, expert_dispatch="capacity" if capacity else "dropless",
            load_balance_loss=choice((0.0, 0.01)), optimizer=choice(("sgd", "adamw")), grad_clip=choice((None, 1.0)),
            **{"expert_dispatch.factor": capacity, "optimizer.implementation": choice(("fused", "loop"))},
        ),
    }  # fmt: skip


BY_MASTER = {"bf16": (False, True), "fp16": (True,), "fp8-tensorwise": (False, True), "fp8-rowwise": (False, True)}
CACHING = ("fp8-tensorwise", "fp8-rowwise")
TRAINED = tuple(name for name in PRECISIONS if not name.startswith(("fp8-block", "mxfp8", "nvfp4")))


def precisions(random: Random) -> Case:
    """Llama-like and GPT-2-like models in every precision, of sizes that 8-bit matmuls take."""
    choice, precision, gpt2 = random.choice, random.choice(TRAINED), random.choice((True, False))
    (n_kv_heads, width), master = choice(((2, 8), (4, 8), (4, 16), (1, 16))), choice(BY_MASTER.get(precision, (False,)))
    return {
        **(GPT2 if gpt2 else LLAMA), "vocab_size": choice((17, 64, 301)), "d_model": choice((16, 48)),
        "n_layers": choice((1, 2, 3)), "attention.n_heads": 4, "attention.n_kv_heads": None if gpt2 else n_kv_heads,
        "attention.head_dim": width, "feed_forward.d_ff": choice((32, 80)), "tie_embeddings": choice((True, False)),
        **recipes(
            random, micro_batch=choice((1, 2, 4)), accumulated=choice((1, 1, 2, 3)), seq_len=choice((16, 32)),
            precision=precision, attention=choice(("sdpa", "math")), optimizer=choice(("adamw", "sgd")),
            grad_clip=choice((None, 1.0)),
            **{"optimizer.weight_decay": choice((0.0, 0.1)),
            "precision.weight_caching": precision in CACHING and choice((True, False)),
            "precision.master_weights": master, "precision.gradient_dtype": choice((None,
            "fp32")) if master else None, "optimizer.implementation": choice(("fused", "foreach", "loop"))},
        ),
    }  # fmt: skip


def test_cases_cover_every_pair_and_are_few() -> None:
    axes = {"a": (1, 2, 3), "b": (True, False), "c": "xyz", "d": (0, 1)}
    cases = covering(lambda random: {name: random.choice(values) for name, values in axes.items()})
    assert len(cases) < 14 < 3 * 2 * 3 * 2
    for one, other in combinations(axes, 2):
        assert len({(each[one], each[other]) for each in cases}) == len(axes[one]) * len(axes[other])


@pytest.mark.parametrize("draw", [blocks, combined, attention, experts, precisions])
def test_every_pair_of_settings_agrees(draw: Callable[[Random], Case]) -> None:
    for case in covering(draw):
        run = run_from(case)
        try:
            if one_wide(run):
                same_totals(account(run), rehearse(run))
            else:
                assert_agree(run)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_and_the_trace_is_what_a_real_step_does() -> None:
    for case in covering(attention)[::4]:
        fake, real = (made(run_from(case)) for made in (rehearse, rehearse_really))
        assert fake.resident == real.resident
        assert [replace(each, seconds=None) for each in fake] == [replace(each, seconds=None) for each in real]


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp8-rowwise"])
@pytest.mark.parametrize(
    "keep",
    [("mm", "grouped_mm"), ("_scaled_mm",), ("_scaled_mm", "mm", "grouped_mm", "attention"), ("matmuls", "_scaled_mm")],
)
def test_matmuls_of_experts_and_in_8_bits_may_be_kept(precision: str, keep: tuple[str, ...]) -> None:
    own = {
        "vocab_size": 32, "d_model": 32, "n_layers": 2, "attention.n_heads": 2, "attention.head_dim": 16,
        "feed_forward": "experts", "feed_forward.d_ff": 32, "feed_forward.n_experts": 4, "feed_forward.per_token": 2,
        "feed_forward.expert_d_ff": 16, "feed_forward.n_dense_layers": 1,
    }  # fmt: skip
    recipe = {"precision": precision, "activation_checkpointing.keep": keep, "activation_checkpointing": "selective"}
    case = {**LLAMA, **own, "recipe.seq_len": 16, "recipe.micro_batch": 2}
    predicted, _ = assert_agree(run_from(case | {f"recipe.{name}": value for name, value in recipe.items()}))
    kept = {each.name for each in predicted if each.kind == "matmul" and each.phase == "recompute"}
    assert not kept & set(keep)


@pytest.mark.parametrize("layers", [2, 4])
def test_two_rounds_of_recomputed_blocks_before_modules_ahead(layers: int) -> None:
    """The module reads the first round's input again and the last one's result is kept: no round is left between."""
    case = {
        **LLAMA, "vocab_size": 64, "d_model": 32, "n_layers": layers, "attention.n_heads": 2, "feed_forward.d_ff": 64,
        "n_mtp_layers": 1, "tie_embeddings": True, "recipe.seq_len": 16, "recipe.micro_batch": 2,
        "recipe.precision": "bf16", "recipe.precision.master_weights": True, "recipe.activation_checkpointing": "full",
        "recipe.activation_checkpointing.every": layers // 2,
    }  # fmt: skip
    assert_agree(run_from(case))


@pytest.mark.parametrize("precision", TRAINED)
@pytest.mark.parametrize("master", [False, True])
def test_real_tensors_leave_the_same_ledger(precision: str, master: bool) -> None:
    if master not in BY_MASTER.get(precision, (False,)):
        pytest.skip("no such pair")
    if "rowwise" in precision and torch.__version__ < (2, 12):
        pytest.skip("torch scales by row on a CPU since 2.12")
    wide = "fp32" if master else None
    run = run_of(
        precision=precision,
        micro_batch=2,
        dropout=0.1,
        **{"precision.master_weights": master, "precision.gradient_dtype": wide},
    )
    predicted, measured = account(run), rehearse_really(run)
    same_totals(predicted, measured)
    assert predicted.peak().nbytes == measured.peak().nbytes
    assert [facts(each) for each in unrolled(predicted)] == [facts(each) for each in unrolled(measured)]


def test_low_precision_saves_what_it_promises() -> None:
    """What a micro-batch keeps: half of fp32 in bf16, but for what a norm and the loss take in fp32."""
    kept = {name: account(run_of(gpt2=True, precision=name)).kept_nbytes for name in TRAINED if name != "fp16"}
    assert kept["bf16"] < kept["bf16-sharded"] < kept["bf16-mixed"]
    assert kept["bf16"] < 0.75 * kept["fp32"] == 0.75 * kept["tf32"]
    assert kept["fp16-mixed"] == kept["bf16-mixed"] + 4  # the scaled loss
    assert kept["fp8-rowwise"] < kept["bf16-mixed"]  # no 16-bit copies of the weights of linear layers
    assert kept["fp8-rowwise-sharded"] == kept["bf16-sharded"]  # inputs and gathered copies, both in bf16
    for name in ("fp8-block", "fp8-block-sharded"):
        block = account(run_of(gpt2=True, precision=name)).kept_nbytes
        assert block < kept[name.replace("block", "rowwise")]  # inputs of linear layers in 8 bits
