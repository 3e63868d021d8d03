"""Clipping and update of every optimizer: the closed form and what torch runs, operation by operation.

The parameters are those of a drawn model, without the model: what is compared starts where gradients exist.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from agreement import assert_agree, facts, live_nbytes, unrolled
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_runs import GPT2, LLAMA, pick, run_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.engine.train.optimizer import build_optimizer, for_muon
from trainledger.ledger.core.graph import ModelLeaves
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model import parameters as shapes
from trainledger.ledger.model.parameters import leaves_of
from trainledger.ledger.optimizers.states import for_muon as leaf_for_muon
from trainledger.ledger.optimizers.states import state_nbytes
from trainledger.ledger.optimizers.update import clip, update
from trainledger.ledger.optimizers.update_rules import UPDATE_FLOPS_PER_PARAMETER
from trainledger.ledger.rules import matmul_flops
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse, rehearse_really
from trainledger.spec.layers import kind_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.optimizers import ACCOUNTED_ONLY, IMPLEMENTATIONS, OPTIMIZERS
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import recipe_problems
from trainledger.trace import trace
from trainledger.trace.fakes.tensors import make_states
from trainledger.trace.fakes.values import ZeroWhereUnknown
from trainledger.trace.recorder.recorder import Recorder

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def built(optimizer: str) -> list[str]:
    """The ways in which the engine runs an optimizer."""
    return [each for each in IMPLEMENTATIONS[optimizer] if (optimizer, each) not in ACCOUNTED_ONLY]


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Models with parameters of every kind: matrices tall and wide, vectors, stacks of experts and their biases."""
    parts: dict[str, Any] = dict(draw(pick(LLAMA, GPT2)))
    parts["feed_forward.bias"] = draw(st.booleans())
    if draw(st.booleans()):
        parts |= {
            "feed_forward": "experts",
            "feed_forward.n_experts": draw(pick(2, 3)),
            "feed_forward.router.bias": draw(st.booleans()),
            "feed_forward.n_dense_layers": draw(pick(0, 1)),
        }
        parts |= {"feed_forward.n_shared": draw(pick(0, 1))}
    return from_fields(
        ModelSpec,
        {
            "vocab_size": draw(pick(5, 64, 301)),
            "d_model": draw(pick(8, 33, 64)),
            "n_layers": draw(pick(1, 2, 3)),
            "attention.n_heads": 2,
            "attention.head_dim": draw(pick(2, 16)),
            "feed_forward.d_ff": draw(pick(7, 65, 100)),
            "max_seq_len": 8,
            "tie_embeddings": draw(st.booleans()),
            **parts,
        },
    )


@st.composite
def recipes(draw: st.DrawFn, name: str, loop: str) -> Recipe:
    """An optimizer in one of its ways, with any of its options, with and without decay and clipping."""
    more: dict[str, Any] = {}
    if name in ("adam", "adamw"):
        more = {"optimizer.amsgrad": draw(st.booleans())}
    if name == "rmsprop":
        more = {"optimizer.momentum": draw(pick(0.0, 0.5)), "optimizer.centered": draw(st.booleans())}
    recipe = from_fields(Recipe, {
        "seq_len": 8, "global_batch": 1, "steps": 3, "optimizer": name, "optimizer.implementation": loop,
        "precision": draw(pick("fp32", "fp32", "bf16")), "optimizer.weight_decay": draw(pick(0.0, 0.1)),
        "grad_clip": draw(pick(None, 1.0)), **more,
    })  # fmt: skip
    assert not list(recipe_problems(recipe))
    return recipe


@pytest.mark.parametrize(("optimizer", "loop"), [(name, loop) for name in OPTIMIZERS for loop in built(name)])
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(st.data(), models(), st.booleans(), st.booleans())
def test_closed_form_equals_what_torch_runs(
    optimizer: str, loop: str, data: st.DataObject, spec: ModelSpec, foreach: bool, frozen: bool
) -> None:
    """``foreach`` is how clipping goes; ``frozen`` leaves the first and the down projections untrained."""
    recipe = data.draw(recipes(optimizer, loop))
    leaves = leaves_of(spec, recipe)
    for leaf in (leaf for pattern, _ in leaves.in_order() for leaf in pattern):
        leaf.trained = not (frozen and is_frozen(leaf.path))
    predicted, traced = closed_form(leaves, recipe, foreach), followed(spec, recipe, foreach, frozen)
    ours, theirs = unrolled(predicted), unrolled(traced)
    for mine, other in zip(ours, theirs, strict=False):
        assert facts(mine) == facts(other)
    assert len(ours) == len(theirs)
    assert relative(live_nbytes(predicted)) == relative(live_nbytes(traced))
    assert state_nbytes(leaves, recipe) == dict(traced.resident).get("optimizer state", 0)


@pytest.mark.parametrize("optimizer", ["adam-8bit", "adamw-8bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_decay_of_8_bit_adam_frees_the_gradient_that_it_replaces(optimizer: str, precision: str) -> None:
    run = run_of(
        optimizer=optimizer,
        precision=precision,
        model={"d_model": 128},
        **{"optimizer.implementation": "loop", "optimizer.weight_decay": 0.1},
    )
    predicted = closed_form(leaves_of(run.model, run.recipe), run.recipe, foreach=False)
    traced = followed(run.model, run.recipe, foreach=False, frozen=False)
    assert relative(live_nbytes(predicted)) == relative(live_nbytes(traced))


def is_frozen(path: str) -> bool:
    return "embed_tokens" in path or "down_proj" in path


def relative(live: list[int]) -> list[int]:
    return [each - live[-1] for each in live]


def closed_form(leaves: ModelLeaves, recipe: Recipe, foreach: bool) -> Ledger:
    tape = Tape(recipe.precision)
    held = []
    if recipe.grad_clip is not None:
        with tape.during("clip"):
            held = clip(tape, leaves, foreach=foreach)
    with tape.during("optimizer"):
        update(tape, leaves, recipe)
    del held
    return tape.ledger(resident=(), parameters=leaves.elements(), tokens=0, micro_batches=1)


def followed(spec: ModelSpec, recipe: Recipe, foreach: bool, frozen: bool) -> Ledger:
    """One clipping and one step of the engine's optimizer on fake tensors."""
    with FakeTensorMode(), ZeroWhereUnknown():
        model = parameters_alone(spec, DTYPES[recipe.precision.parameters])
        for name, each in model.named_parameters():
            each.requires_grad_(not (frozen and is_frozen(name)))
        optimizer = build_optimizer(model, recipe)
        make_states(model, optimizer)
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if each.requires_grad else None
        recorder = Recorder(model, optimizer)
        recorder.resident([each.grad for each in model.parameters() if each.grad is not None], "gradients")
        norm: Tensor | None = None
        with recorder:
            if recipe.grad_clip is not None:
                with recorder.phase("clip"):
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip, foreach=foreach)
            with recorder.phase("optimizer"):
                optimizer.step()
            del norm
    assert not recorder.uncounted
    return recorder.ledger(tokens=0, writer="trace")


def parameters_alone(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """A module with the names and shapes of a model's parameters, layer by layer, and nothing else."""
    named = list(shapes.before_blocks(spec))
    for layer in range(spec.n_layers):
        named += [(f"layers.{layer}.{name}", shape) for name, shape in shapes.block(spec, kind_of(spec, layer))]
    named += shapes.after_blocks(spec)
    root = nn.Module()
    for name, shape in named:
        module, *path = root, *name.split(".")
        for part in path[:-1]:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(path[-1], nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return root


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_whole_step_with_each_optimizer(optimizer: str) -> None:
    for loop in built(optimizer):
        run = run_of(
            optimizer=optimizer, model={"d_model": 24, "attention.head_dim": 6}, **{"optimizer.implementation": loop}
        )
        assert_agree(run)


@pytest.mark.parametrize("optimizer", ["nesterov", "adafactor", "lion", "muon", "adamw-8bit"])
def test_fake_steps_are_real_ones(optimizer: str) -> None:
    for loop in built(optimizer):
        run = run_of(optimizer=optimizer, **{"optimizer.implementation": loop})
        fake, real = rehearse(run), rehearse_really(run)
        assert fake.resident == real.resident
        assert [replace(each, seconds=None) for each in fake] == [replace(each, seconds=None) for each in real]


def test_muon_and_the_engine_choose_the_same_matrices() -> None:
    moe = {
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.router.bias": True,
        "feed_forward.bias": True,
        "feed_forward.activation": "silu",
        "feed_forward.gated": True,
    }
    for spec in (run_of().model, run_of(gpt2=True).model, with_fields(run_of().model, moe)):
        leaves = leaves_of(spec, run_of().recipe)
        ours = {leaf.path for pattern, _ in leaves.in_order() for leaf in pattern if leaf_for_muon(leaf)}
        with FakeTensorMode():
            named = parameters_alone(spec, torch.float32).named_parameters()
            theirs = {name.partition("layers.")[2].partition(".")[2] for name, each in named if for_muon(name, each)}
        assert ours == theirs
        assert not any("embed" in each or "lm_head" in each or "bias" in each or ".experts." in each for each in ours)


def test_the_matrix_matmuls_of_muon() -> None:
    """Five iterations of two matmuls with the long side and one without, in bf16, and none of the model's own."""
    run = run_of(optimizer="muon", model={"n_layers": 1, "tie_embeddings": True})
    ledger = account(run)
    matmuls = ledger.filter(lambda each: each.phase == "optimizer" and each.kind == "matmul")
    expected = 0
    for name, shape in shapes.block(run.model, kind_of(run.model, 0)):
        if name.endswith("proj.weight"):
            short, long = sorted(shape)
            expected += 5 * (2 * matmul_flops(short, short, long) + matmul_flops(short, short, short))
    assert matmuls.flops == expected > 0
    assert matmuls.model_flops == 0
    assert {each.dtype for each in matmuls} == {"bf16"}


def test_every_optimizer_has_a_count_of_its_operations() -> None:
    assert set(OPTIMIZERS) <= set(UPDATE_FLOPS_PER_PARAMETER)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "adamw-8bit"])
def test_anybody_s_step_with_it_can_be_traced(optimizer: str) -> None:
    """Adafactor reads norms off tensors, which are fake: the traced step has them as zero."""
    model = nn.Sequential(nn.Linear(80, 96), nn.Linear(96, 16))
    before = [each.detach().clone() for each in model.parameters()]
    recipe = run_of(optimizer=optimizer).recipe
    ledger = trace(model, torch.zeros(4, 80), loss=Tensor.sum, optimizer=build_optimizer(model, recipe))
    assert ledger.uncounted == ()
    assert ledger.by("phase")["optimizer"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_number_that_decides_in_a_forward_is_told() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() <= 0 else x

    ledger = trace(Deciding(4, 4), torch.ones(2, 4), loss=Tensor.sum)
    (note,) = ledger.notes
    assert "1 value read at" in note
    assert "is unknown and assumed to be 0" in note
