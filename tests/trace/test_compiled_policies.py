"""Compiled blocks that run again but for what a policy keeps: the closed form, the compiler's own code, and a real run.

The checkpoint stands inside of the compiled block, as torchtitan has it, and the partitioner honours the policy.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_cases import Case, closed_form, measured, run_of_ours, traced
from test_compiled_closed_form import KINDS, compiled_step

from trainledger.ledger.step import account
from trainledger.observe.measure.meter import with_sums
from trainledger.spec.parts import with_fields
from trainledger.spec.run import Run

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.agreement,
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
    ),
]
NEAR = 0.01 if torch.__version__ >= (2, 12) else 0.03  # the compiler of 2.11 joins other loops
SMALL = Case(compiled="blocks", checkpointing=True, selective=True, tokens=128, width=128)


@pytest.mark.parametrize(("model", "precision"), [("llama", "bf16"), ("gpt", "fp32")])
def test_kept_and_peak_of_a_policy_are_those_of_the_compiled_step(model: str, precision: str) -> None:
    case = replace(SMALL, model=model, precision=precision)
    predicted, compiled = closed_form(case), traced(case)
    assert predicted is not None
    assert (predicted.notes, compiled.notes) == ((), ())
    assert predicted.kept_nbytes == compiled.kept_nbytes
    assert with_sums(predicted).peak().nbytes == pytest.approx(compiled.peak().nbytes, rel=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_run_says_the_same(model: str, precision: str) -> None:
    case = replace(SMALL, model=model, precision=precision)
    predicted, run = closed_form(case), measured(case)
    assert predicted is not None
    assert predicted.kept_nbytes == run.kept
    assert predicted.peak().nbytes == pytest.approx(run.peak, rel=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_a_model_that_is_compiled_whole_runs_as_the_trace_says(model: str) -> None:
    case = replace(SMALL, model=model, compiled="model")
    told, run = traced(case), measured(case)
    assert told.kept_nbytes == run.kept
    assert told.peak().nbytes == pytest.approx(run.peak, rel=NEAR)


# Other kinds of blocks, other policies. What a kernel writes for a CPU's sake, the tanh of GELU, is not followed: it
# shows where its two uses lie apart, as where the block ends with a norm.

PRECISIONS = ("fp32", "bf16", "bf16-mixed")
WIDER = {"norms on the sums": 0.12}
POLICIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "attention": ("llama", {"attention.n_kv_heads": 2}, ("attention",)),
    "attention, gpt2": ("gpt", {}, ("attention",)),
    "matmuls": ("llama", {}, ("mm", "attention")),
    "matmuls with biases": ("gpt", {}, ("mm", "addmm", "attention")),
    "nothing": ("llama", {}, ()),
    "nothing, gpt2": ("gpt", {}, ()),
    "gated, with biases": ("gpt", {"feed_forward.gated": True, "feed_forward.activation": "gelu"}, ("matmuls",)),
    "parallel": ("gpt", {"block": "parallel"}, ("matmuls",)),
    "clamped": ("llama", {"feed_forward.activation": "clamped_swish", "feed_forward.bias": True}, ("matmuls",)),
}


def agree(run: Run, precision: str, near: float, **recipe: Any) -> None:
    told = {**recipe, "precision": precision, "activation_checkpointing": "selective"}
    run = replace(run, recipe=with_fields(run.recipe, told))
    predicted, compiled = account(run), compiled_step(run)
    assert predicted.notes == ()
    assert predicted.kept_nbytes == compiled.kept_nbytes
    assert with_sums(predicted).peak().nbytes == pytest.approx(compiled.peak().nbytes, rel=near)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "kind", [kind for kind, (_, _, recipe) in KINDS.items() if "activation_checkpointing" not in recipe]
)
def test_other_blocks_keep_the_same(kind: str, precision: str) -> None:
    run, model, recipe = KINDS[kind]
    agree(replace(run, model=with_fields(run.model, model)), precision, WIDER.get(kind, 0.05), **recipe)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_other_policies_keep_the_same(policy: str, precision: str) -> None:
    name, model, keep = POLICIES[policy]
    run = run_of_ours(replace(SMALL, model=name))
    agree(replace(run, model=with_fields(run.model, model)), precision, 0.05, **{"activation_checkpointing.keep": keep})


@pytest.mark.slow
def test_every_other_block_runs_again() -> None:
    run = run_of_ours(replace(SMALL, layers=4))
    agree(run, "bf16-mixed", NEAR, **{"activation_checkpointing.every": 2})
