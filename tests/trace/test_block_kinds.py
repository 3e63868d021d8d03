"""Every way to compose a block, its norms and its MLP: the closed form tells of each what the trace sees."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_runs import live_nbytes, pick, shared_nbytes, unrolled

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.measure.step import rehearse
from trainledger.spec.feed_forward import ACTIVATIONS
from trainledger.spec.model import NORM_PLACES, ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.model import model_problems
from trainledger.spec.run import Run

torch.set_num_threads(1)


@st.composite
def norms(draw: st.DrawFn) -> dict[str, Any]:
    """Which norm, and where it stands."""
    norm = draw(pick("rmsnorm", "layernorm"))
    weight = norm == "rmsnorm" or draw(pick(True, True, False))
    block = draw(pick("serial", "serial", "parallel", "parallel-two-norms"))
    return {
        "norm": norm,
        "norm.weight": weight,
        "norm.bias": norm == "layernorm" and weight and draw(st.booleans()),
        "norm.plus_one": norm == "rmsnorm" and draw(st.booleans()),
        "block": block,
        "norm_place": draw(st.sampled_from(NORM_PLACES)) if block == "serial" else "pre",
    }


@st.composite
def ends(draw: st.DrawFn) -> dict[str, Any]:
    """What stands before the first block and after the last."""
    positions = draw(pick("rope", "learned", "none"))
    return {
        "positions": positions,
        "positions.extra_rows": draw(pick(0, 2)) if positions == "learned" else None,
        "embedding_scale": draw(pick(1.0, 5.5)),
        "embedding_norm": draw(st.booleans()),
        "vocab_multiple": draw(pick(1, 8, 64)),
        "head_bias": draw(st.booleans()),
        "logit_scale": draw(pick(1.0, 0.25)),
        "logit_softcap": draw(pick(None, 30.0)),
        "tie_embeddings": draw(st.booleans()),
    }


@st.composite
def layers(draw: st.DrawFn, positions: str) -> dict[str, Any]:
    """How many layers, and which pattern of positions they have."""
    skipped = draw(pick(None, None, 1, 2, 3)) if positions == "rope" else None
    return {"n_layers": draw(pick(1, 2, 3, 5, 6)), "positions.skip_every": skipped}


@st.composite
def models(draw: st.DrawFn, seq_len: int) -> ModelSpec:
    gated = draw(st.booleans())
    edges = draw(ends())
    return from_fields(
        ModelSpec,
        {
            "vocab_size": draw(pick(5, 17, 64)),
            "d_model": draw(pick(8, 12, 33)),
            "attention.n_heads": draw(pick(1, 2)),
            "attention.head_dim": draw(pick(2, 4)),
            "feed_forward.d_ff": draw(pick(7, 32)),
            "max_seq_len": seq_len + draw(pick(0, 3)),
            "feed_forward.gated": gated,
            "feed_forward.activation": draw(
                st.sampled_from([each for each in ACTIVATIONS if gated or each != "clamped_swish"])
            ),
            "attention.bias": draw(st.booleans()),
            "feed_forward.bias": draw(st.booleans()),
            **edges,
            **draw(norms()),
            **draw(layers(edges["positions"])),
        },
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    micro_batch, grad_accum, seq_len = draw(pick(1, 2, 3)), draw(pick(1, 1, 2)), draw(pick(2, 3, 8))
    recipe = Recipe(
        seq_len=seq_len, global_batch=micro_batch * grad_accum, micro_batch=micro_batch, steps=3,
        precision=draw(pick("fp32", "bf16-mixed")), activation_checkpointing=draw(pick("none", "full")),
        dropout=draw(pick(0.0, 0.1)), optimizer="adamw", optimizer_loop=draw(pick("fused", "loop")),
    )  # fmt: skip
    return Run(model=draw(models(seq_len)), recipe=recipe)


@settings(
    max_examples=160,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(runs())
def test_every_kind_of_block_is_traced_as_it_is_accounted_for(run: Run) -> None:
    assert not list(model_problems(run.model))
    same_step(account(run), rehearse(run), run)


def same_step(predicted: Ledger, traced: Ledger, run: Run) -> None:
    """Operation by operation, and the live bytes at each.

    Rotary angles in low precision die when the first layer that reads them is through with its backward, which a
    loop followed once cannot say; and two scalars while micro-batches add up their losses.
    """
    assert traced.uncounted == ()
    assert predicted.parameters == traced.parameters
    assert dict(predicted.resident) == dict(traced.resident)
    ours, theirs = unrolled(predicted), unrolled(traced)
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        assert facts(mine) == facts(other), at
    assert len(ours) == len(theirs)
    loose = shared_nbytes(run)
    for at, (mine, other) in enumerate(zip(live_nbytes(predicted), live_nbytes(traced), strict=True)):
        assert abs(mine - other) <= loose, (at, mine, other)


def facts(each: Entry) -> tuple[object, ...]:
    path = ".".join("*" if part.isdigit() else part for part in each.path.split("."))
    amounts = (each.flops, each.model_flops, each.read, each.written, each.kept, dict(each.allocated))
    return each.name, path, each.phase, each.kind, each.dtype, each.shape, each.basis, *amounts
