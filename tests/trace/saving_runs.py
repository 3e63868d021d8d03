"""Small runs that save memory in some way, of which closed form and trace must agree."""

from __future__ import annotations

from typing import Any

from agreement import assert_agree
from hypothesis import strategies as st
from random_runs import GPT2, LLAMA, pick

from trainledger.ledger.ledger import Ledger
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.savings import CHECKPOINTING, LOSSES


@st.composite
def saving_models(draw: st.DrawFn, seq_len: int, most_layers: int = 5) -> ModelSpec:
    """Llama-like and GPT-2-like, local and global layers in turn, heads of several kinds."""
    gpt2 = draw(st.booleans())
    n_heads = draw(pick(1, 2, 4))
    parts: dict[str, Any] = {**(GPT2 if gpt2 else LLAMA), "norm_place": draw(pick("pre", "pre", "post", "sandwich"))}
    if not gpt2:
        parts["attention.n_kv_heads"] = n_heads // draw(
            st.sampled_from([each for each in (1, 2) if n_heads % each == 0])
        )
    if draw(pick(False, False, True)):
        parts |= {"attention.window": draw(pick(2, 3)), "attention.global_every": draw(pick(2, 3))}
    return from_fields(
        ModelSpec,
        {
            "vocab_size": draw(pick(5, 64, 301)),
            "vocab_multiple": draw(pick(1, 8)),
            "d_model": draw(pick(8, 24)),
            "n_layers": draw(st.integers(1, most_layers)),
            "attention.n_heads": n_heads,
            "attention.head_dim": draw(pick(4, 6)),
            "feed_forward.d_ff": draw(pick(7, 32)),
            "max_seq_len": seq_len,
            "tie_embeddings": draw(st.booleans()),
            "head_bias": draw(pick(False, False, True)),
            "logit_softcap": draw(pick(None, None, 5.0)),
            "logit_scale": draw(pick(1.0, 1.0, 0.5)),
            **parts,
        },
    )


@st.composite
def saving_runs(draw: st.DrawFn, **recipe: Any) -> Run:
    """A model with a recipe; fields given as strategies are drawn."""
    seq_len, micro_batch, grad_accum = draw(pick(4, 6)), draw(pick(2, 3)), draw(pick(1, 1, 3))
    usual = {
        "precision": pick("fp32", "bf16-mixed", "bf16"), "attention": pick("sdpa", "math"), "dropout": pick(0.0, 0.1),
        "grad_clip": pick(None, 1.0), "optimizer": pick("adamw", "sgd"),
    }  # fmt: skip
    chosen = {name: draw(each) if isinstance(each, st.SearchStrategy) else each
              for name, each in {**usual, **recipe}.items()}  # fmt: skip
    if chosen.get("activation_checkpointing") == "from-start" and chosen["precision"] == "bf16-mixed":
        chosen["precision"] = "bf16"
    if chosen.get("loss.chunks") in ("half", "all"):
        chosen["loss.chunks"] = micro_batch * seq_len // (2 if chosen["loss.chunks"] == "half" else 1)
    kinds = {"loss": LOSSES, "activation_checkpointing": CHECKPOINTING}
    for path in [each for each in chosen if each.partition(".")[0] in kinds and "." in each]:
        part, _, field = path.partition(".")
        kind = kinds[part][chosen[part]] if part in chosen else next(iter(kinds[part].values()))
        if field not in kind.__dataclass_fields__:
            del chosen[path]
    model = draw(saving_models(seq_len))
    batch = {"seq_len": seq_len, "micro_batch": micro_batch, "global_batch": micro_batch * grad_accum, "steps": 3}
    return Run(model=model, recipe=from_fields(Recipe, {**batch, **chosen}))


def same_ledgers(run: Run, *, in_order: bool = True) -> tuple[Ledger, Ledger]:
    """`assert_agree`, within the bytes that all blocks share."""
    return assert_agree(run, in_order=in_order, within_nbytes=shared_by_blocks(run))


def shared_by_blocks(run: Run) -> int:
    """Bytes of the rotary angles and masks that all blocks read, and of two scalars."""
    tokens, width = run.recipe.seq_len, run.model.rotary_size if run.model.positions.kind == "rope" else 0
    return 4 * (tokens * width + 2 * tokens * tokens) + 8
