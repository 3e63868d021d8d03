"""Every kind of attention that the engine builds: the closed form tells what the trace of the modules tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_runs import live_nbytes, pick, shared_nbytes, unrolled
from test_closed_form_equals_trace import facts, same_peak, same_totals

from trainledger.ledger.step import account
from trainledger.measure.step import rehearse, rehearse_really
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

torch.set_num_threads(1)


def heads(draw: st.DrawFn) -> dict[str, Any]:
    """Ordinary heads, shared by 1 to 6 queries, normalized or not, under any positions, windows and sinks."""
    n_heads = draw(pick(1, 2, 3, 4, 6))
    shared = draw(st.sampled_from([each for each in (1, 2, 3, 6) if n_heads % each == 0]))
    positions = draw(pick("rope", "rope", "rope", "learned", "alibi", "none"))
    qk_norm = draw(pick(None, "head", "width"))
    odd = (1, 3, 5) if qk_norm is None else (3, 5)  # of a width of one torch leaves out sums that have nothing to sum
    fields: dict[str, Any] = {
        "attention.n_heads": n_heads,
        "attention.n_kv_heads": n_heads // shared,
        "attention.head_dim": draw(pick(2, 4, 6, 16) if positions == "rope" else pick(*odd, 16)),
        "positions": positions,
        "attention.bias": draw(st.booleans()),
        "attention.output_bias": draw(pick(None, True, False)),
        "attention.qk_norm": qk_norm,
        "attention.window": draw(pick(None, 1, 2, 5, 16)),
    }
    if positions == "rope":
        fields["positions.dim"] = draw(st.sampled_from([None, *range(2, fields["attention.head_dim"] + 1, 2)]))
        fields["positions.interleaved"] = draw(st.booleans())
        fields["positions.skip_every"] = draw(pick(None, None, 1, 2))
        scaling = draw(pick(None, "llama3", "linear", "yarn"))
        if scaling is not None:
            fields |= {"positions.scaling": scaling, "positions.scaling.factor": 4.0}
    if fields["attention.window"] is not None:
        fields["attention.global_every"] = draw(pick(None, 2, 3))
        fields["positions.local_theta"] = draw(pick(None, 500.0)) if positions == "rope" else None
    return fields


def latents(draw: st.DrawFn) -> dict[str, Any]:
    """Latent attention with values narrower than keys, as wide, and wider."""
    return {
        "attention.n_heads": draw(pick(1, 2, 3)),
        "attention": "latent",
        "attention.kv_rank": draw(pick(2, 5, 16)),
        "attention.q_rank": draw(pick(None, 2, 7)),
        "attention.nope_head_dim": draw(pick(1, 4, 6)),
        "attention.rope_head_dim": draw(pick(2, 4)),
        "attention.v_head_dim": draw(pick(1, 6, 8, 12)),
        "attention.bias": draw(st.booleans()),
        "positions.interleaved": draw(st.booleans()),
    }


@st.composite
def runs(draw: st.DrawFn) -> Run:
    latent = draw(pick(False, False, True))
    fields = latents(draw) if latent else heads(draw)
    fields["attention.scale"] = draw(pick(None, 0.3))
    attention = draw(pick("sdpa", "math"))
    if attention == "math" and not latent:
        fields["attention.sinks"] = draw(st.booleans())
        fields["attention.softcap"] = draw(pick(None, 20.0))
    norm = draw(pick("rmsnorm", "layernorm"))
    seq_len = draw(pick(1, 2, 3, 8, 17))
    micro_batch = draw(pick(1, 2, 3))
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": 17,
            "d_model": draw(pick(2, 8, 33)),
            "n_layers": draw(pick(1, 2, 3)),
            "feed_forward.d_ff": 7,
            "max_seq_len": seq_len + draw(pick(0, 3)),
            "norm": norm,
            "norm.bias": norm == "layernorm" and draw(st.booleans()),
            "norm.plus_one": norm == "rmsnorm" and draw(st.booleans()),
            **fields,
        },
    )
    recipe = Recipe(
        seq_len=seq_len,
        global_batch=micro_batch * draw(pick(1, 1, 2)),
        micro_batch=micro_batch,
        steps=3,
        attention=attention,
        precision=draw(pick("fp32", "bf16-mixed")),
        activation_checkpointing=draw(pick("none", "full")),
        dropout=draw(pick(0.0, 0.1)),
        attention_dropout=draw(pick(0.0, 0.0, 0.1)),
        optimizer="sgd",
    )
    return Run(model=model, recipe=recipe)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(runs())
def test_every_kind_of_attention_costs_what_its_trace_shows(run: Run) -> None:
    assert not list(run_problems(run))
    predicted, traced = account(run), rehearse(run)
    ours, theirs = unrolled(predicted), unrolled(traced)
    for mine, other in zip(ours, theirs, strict=False):
        assert facts(mine) == facts(other)
    assert len(ours) == len(theirs)
    same_totals(predicted, traced)
    loose = shared_nbytes(run)
    for at, (mine, other) in enumerate(zip(live_nbytes(predicted), live_nbytes(traced), strict=True)):
        assert abs(mine - other) <= loose, (at, mine, other)
    if loose == 0:
        same_peak(predicted, traced)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs())
def test_and_the_trace_what_a_real_step_does(run: Run) -> None:
    fake, real = rehearse(run), rehearse_really(run)
    assert fake.resident == real.resident
    assert [replace(each, seconds=None) for each in fake] == [replace(each, seconds=None) for each in real]
