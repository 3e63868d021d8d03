"""Small runs of every kind the engine trains."""

from __future__ import annotations

from hypothesis import strategies as st

from trainledger.spec.model import ModelSpec
from trainledger.spec.optimizers import IMPLEMENTATIONS
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

LLAMA = {
    "norm": "rmsnorm",
    "norm.bias": False,
    "feed_forward.activation": "silu",
    "feed_forward.gated": True,
    "positions": "rope",
    "attention.bias": False,
    "feed_forward.bias": False,
}
GPT2 = {
    "norm": "layernorm",
    "norm.bias": True,
    "feed_forward.activation": "gelu_tanh",
    "feed_forward.gated": False,
    "positions": "learned",
    "attention.bias": True,
    "feed_forward.bias": True,
}


def pick(*values: object) -> st.SearchStrategy[object]:
    return st.sampled_from(values)


@st.composite
def models(draw: st.DrawFn, seq_len: int) -> ModelSpec:
    """Llama-like, GPT-2-like, or any mixture of their parts."""
    family = draw(pick("llama", "gpt2", "mixture"))
    n_heads = draw(pick(1, 2, 3, 4, 6))
    if family == "mixture":
        norm = draw(pick("rmsnorm", "layernorm"))
        parts = {
            "norm": norm,
            "norm.bias": norm == "layernorm" and draw(st.booleans()),
            "feed_forward.activation": draw(pick("silu", "gelu", "gelu_tanh")),
            "feed_forward.gated": draw(st.booleans()),
            "positions": draw(pick("rope", "learned")),
            "attention.bias": draw(st.booleans()),
            "feed_forward.bias": draw(st.booleans()),
        }
    else:
        parts = LLAMA if family == "llama" else GPT2
    heads_per_group = draw(st.sampled_from([each for each in (1, 2, 3, 6) if n_heads % each == 0]))
    return from_fields(
        ModelSpec,
        {
            "vocab_size": draw(pick(5, 17, 64, 301)),
            "d_model": draw(pick(8, 12, 33, 64)),
            "n_layers": draw(pick(1, 2, 3)),
            "attention.n_heads": n_heads,
            "attention.n_kv_heads": None if family == "gpt2" else n_heads // heads_per_group,
            "attention.head_dim": draw(pick(2, 4, 6, 16) if parts["positions"] == "rope" else pick(1, 3, 5, 16)),
            "feed_forward.d_ff": draw(pick(7, 32, 100)),
            "max_seq_len": seq_len + draw(pick(0, 3)),
            "tie_embeddings": draw(st.booleans()),
            **parts,
        },
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A model with a recipe of any precision, attention, checkpointing, accumulation and optimizer."""
    micro_batch, grad_accum = draw(pick(1, 2, 3, 4)), draw(pick(1, 1, 2, 3))
    optimizer = draw(pick("adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop"))  # all: test_optimizers.py
    seq_len = draw(pick(2, 3, 8, 17))
    recipe = from_fields(
        Recipe,
        {
            "seq_len": seq_len,
            "global_batch": micro_batch * grad_accum,
            "micro_batch": micro_batch,
            "steps": 3,
            "precision": draw(pick("fp32", "bf16-mixed")),
            "attention": draw(pick("sdpa", "math")),
            "activation_checkpointing": draw(pick("none", "full")),
            "dropout": draw(pick(0.0, 0.1)),
            "optimizer": optimizer,
            "optimizer.implementation": draw(pick(*IMPLEMENTATIONS[optimizer])),
            "optimizer.weight_decay": draw(pick(0.0, 0.1)),
            "grad_clip": draw(pick(None, 1.0)),
        },
    )
    return Run(model=draw(models(seq_len)), recipe=recipe)


def run_of(*, gpt2: bool = False, model: dict[str, object] | None = None, **recipe: object) -> Run:
    """A given small run: Llama-like unless ``gpt2``, with any fields changed."""
    sizes = {
        "vocab_size": 1000,
        "d_model": 64,
        "n_layers": 2,
        "attention.n_heads": 4,
        "feed_forward.d_ff": 160,
        "max_seq_len": 32,
    }
    kind = {**GPT2, "tie_embeddings": True} if gpt2 else {**LLAMA, "attention.n_kv_heads": 2}
    batch = {"seq_len": 32, "global_batch": 4, "steps": 10}
    return Run(
        model=from_fields(ModelSpec, {**sizes, **kind, **(model or {})}),
        recipe=from_fields(Recipe, {**batch, **recipe}),
    )


def one_wide(run: Run) -> bool:
    """Whether written-out attention meets a dim of one, where torch may see memory as laid out in two ways."""
    width = run.model.head_size // (2 if run.model.positions.kind == "rope" else 1)
    return run.recipe.attention == "math" and width == 1
