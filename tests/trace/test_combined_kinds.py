"""Kinds of blocks together with experts, windows and prediction modules: what each test of its own leaves out."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from test_block_kinds import runs, same_step

from trainledger.ledger.step import account
from trainledger.measure.step import rehearse
from trainledger.spec.parts import with_fields
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

torch.set_num_threads(1)


@st.composite
def combined(draw: st.DrawFn) -> Run:
    """A run of `test_block_kinds` with experts in some layers, windows on some, and tokens predicted ahead."""
    run = draw(runs())
    model, more = run.model, {}
    if draw(st.booleans()):
        more |= {
            "feed_forward": "experts",
            "feed_forward.n_experts": 4,
            "feed_forward.n_dense_layers": draw(st.integers(0, model.n_layers)),
            "feed_forward.every": draw(st.integers(1, 3)),
            "feed_forward.n_shared": draw(st.integers(0, 1)),
        }
    if draw(st.booleans()):
        theta = 100.0 if model.positions.kind == "rope" else None
        more |= {
            "attention.window": 2,
            "attention.global_every": draw(st.sampled_from([None, 2, 3])),
            "positions.local_theta": theta,
        }
    if draw(st.booleans()):
        more["n_mtp_layers"] = draw(st.integers(1, 2))
    return replace(run, model=with_fields(model, more))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(combined())
def test_kinds_together_are_traced_as_they_are_accounted_for(run: Run) -> None:
    assume(not list(run_problems(run)))
    same_step(account(run), rehearse(run), run)
