"""Optimizer states: what torch really keeps after a step, and what arrays and symbols of sizes say of it."""

from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import nn

from trainledger.engine.train.optimizer import build_optimizer
from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.model.parameters import leaves_of
from trainledger.ledger.optimizers.states import state_nbytes, state_nbytes_of, states_of
from trainledger.ledger.optimizers.update import update
from trainledger.spec.model import ModelSpec
from trainledger.spec.optimizers import IMPLEMENTATIONS, OPTIMIZERS
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe

OPTIONS: list[dict[str, Any]] = [
    *({"optimizer": name} for name in OPTIMIZERS),
    *({"optimizer": name, "ema.decay": 0.9} for name in ("adamw", "sgd", "muon", "adafactor", "adamw-8bit")),
    {"optimizer": "adamw", "optimizer.amsgrad": True},
    {"optimizer": "rmsprop", "optimizer.momentum": 0.9},
    {"optimizer": "rmsprop", "optimizer.centered": True},
    {"optimizer": "rmsprop", "optimizer.momentum": 0.9, "optimizer.centered": True},
]


def recipe_of(**fields: Any) -> Recipe:
    return from_fields(Recipe, {"seq_len": 8, "global_batch": 1, "steps": 1, **fields})


def label(fields: dict[str, Any]) -> str:
    return " ".join(str(each) for each in fields.values())


SHAPES = {
    "embed_tokens.weight": (70, 64),
    "tall.weight": (130, 40),
    "wide.weight": (40, 130),
    "little.weight": (3, 5),
    "experts.down_proj": (3, 20, 80),
    "experts.down_proj_bias": (3, 20),
    "norm.weight": (64,),
    "long.bias": (5000,),
}


@pytest.mark.parametrize("options", OPTIONS, ids=label)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_are_those_that_the_optimizer_has_after_a_step(options: dict[str, Any], precision: str) -> None:
    recipe = recipe_of(precision=precision, **options)
    model, dtype = nn.Module(), {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, shape in SHAPES.items():
        part, _, last = name.rpartition(".")
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        weight = nn.Parameter(torch.ones(shape, dtype=dtype[precision]))
        weight.grad = torch.ones_like(weight)
        model.get_submodule(part).register_parameter(last, weight)
    optimizer = build_optimizer(model, recipe)
    optimizer.step()
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "uint8"}
    for name, weight in model.named_parameters():
        kept = {key: each for key, each in optimizer.state[weight].items() if each is not None}
        real = {key: (tuple(each.shape), names[each.dtype]) for key, each in kept.items()}
        leaf = Leaf(name, SHAPES[name])
        assert {each.name: (each.shape, each.dtype) for each in states_of(leaf, recipe)} == real
        assert state_nbytes_of(leaf, recipe) == sum(each.nbytes for each in kept.values())


def test_published_bytes_of_a_parameter() -> None:
    """Of a matrix of 4096 x 4096, the step counter left out."""
    n, leaf = 4096 * 4096, Leaf("up_proj.weight", (4096, 4096))
    expected = {
        "sgd": 0, "momentum": 4 * n, "nesterov": 4 * n, "adagrad": 4 * n + 4, "rmsprop": 4 * n + 4,
        "adam": 8 * n + 4, "adamw": 8 * n + 4, "lion": 4 * n, "muon": 4 * n,
        "adafactor": 4 * (4096 + 4096) + 4,  # Shazeer and Stern 2018, section 3: a row and a column
        "adam-8bit": 2 * (n + 4 * n // 256) + 4, "adamw-8bit": 2 * (n + 4 * n // 256) + 4,
    }  # fmt: skip
    assert {name: state_nbytes_of(leaf, recipe_of(optimizer=name)) for name in OPTIMIZERS} == expected


def test_a_frozen_parameter_has_no_state() -> None:
    leaf = Leaf("up_proj.weight", (64, 64), trained=False)
    assert all(state_nbytes_of(leaf, recipe_of(**each)) == 0 for each in OPTIONS)


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_shards_by_rows_have_the_states_of_the_whole(options: dict[str, Any]) -> None:
    """But for each shard's own step counter, and each shard's own columns of Adafactor's second moment."""
    recipe, leaf, ranks = recipe_of(**options), Leaf("up_proj.weight", (512, 256)), 4
    whole = state_nbytes_of(leaf, recipe)
    parts = ranks * state_nbytes_of(leaf, recipe, shape=(512 // ranks, 256))
    counters = 4 * any(each.name == "step" for each in states_of(leaf, recipe))
    columns = 4 * 256 if recipe.optimizer.kind == "adafactor" else 0
    assert parts == whole + (ranks - 1) * (counters + columns)


def test_arrays_of_sizes_have_what_each_has_alone() -> None:
    widths = np.array([3, 63, 64, 65, 512])  # of which squares are small, just large enough, and large
    for options in OPTIONS:
        recipe = recipe_of(**options)
        together = state_nbytes_of(Leaf("up_proj.weight", (widths, widths)), recipe)
        alone = [state_nbytes_of(Leaf("up_proj.weight", (int(each),) * 2), recipe) for each in widths]
        assert np.broadcast_to(together, 5).tolist() == alone, options


def sizes_of(recipe: Recipe, **sizes: Any) -> list[Any]:
    """Figures of clipping's successor, the update alone: FLOPs, bytes moved, peak, state, trained elements."""
    given = {"d_model": 40, "n_layers": 3, "feed_forward.d_ff": 200, "vocab_size": 300, **sizes}
    spec = from_fields(
        ModelSpec,
        {"attention.n_heads": 4, "attention.n_kv_heads": 2, "attention.head_dim": 40, "max_seq_len": 16, **given},
    )
    leaves, tape = leaves_of(spec), Tape(recipe.precision)
    with tape.during("optimizer"):
        update(tape, leaves, recipe)
    resident = (("parameters", 4 * leaves.trained().elements),)
    ledger = tape.ledger(resident=resident, parameters=0, tokens=0, micro_batches=1)
    moved = [ledger.total(each) for each in ("flops", "read", "written")]
    return [*moved, peak_nbytes(ledger), state_nbytes(leaves, recipe), leaves.trained().elements]


WAYS = [
    {**options, "optimizer.implementation": loop}
    for options in OPTIONS
    for loop in IMPLEMENTATIONS[options["optimizer"]]
]


@pytest.mark.parametrize("options", WAYS, ids=label)
def test_an_update_of_arrays_and_symbols(options: dict[str, Any]) -> None:
    """Sizes at which no matrix is small: of which there are some, arrays and symbols do as large ones do."""
    recipe = recipe_of(**options)
    values = {"d_model": [4097, 5000], "n_layers": [1, 4], "feed_forward.d_ff": [104, 300], "vocab_size": [103, 1000]}
    for size, sizes in values.items():
        more = {} if size == "d_model" else {"d_model": 4100}
        together = sizes_of(recipe, **more, **{size: np.array(sizes)})
        for at, value in enumerate(sizes):
            alone = sizes_of(recipe, **more, **{size: value})
            assert [int(np.broadcast_to(each, 2)[at]) for each in together] == alone, size
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in values}
    formulas = sizes_of(recipe, **symbols)
    numbers = {"d_model": 4100, "n_layers": 5, "feed_forward.d_ff": 111, "vocab_size": 999}
    put = {symbols[name]: sympy.Integer(each) for name, each in numbers.items()}
    assert [sympy.sympify(each).xreplace(put) for each in formulas] == sizes_of(recipe, **numbers)


def test_the_kernel_of_8_bit_adam_has_no_scratch_and_moves_each_state_once() -> None:
    loop, fused = (
        sizes_of(recipe_of(optimizer="adamw-8bit", **{"optimizer.implementation": each})) for each in ("loop", "fused")
    )
    _, read, written, peak, states, elements = fused
    counters = 4 * leaves_of(spec_of(3, d_model=40, vocab_size=300, **{"feed_forward.d_ff": 200})).trained().tensors
    assert peak == 4 * elements < loop[3]
    assert (read, written) == (8 * elements + states - counters, 4 * elements + states - counters)
    assert states == loop[4]


@pytest.mark.parametrize("options", WAYS, ids=label)
def test_the_update_does_not_grow_with_the_layers(options: dict[str, Any]) -> None:
    def length(n_layers: int) -> int:
        leaves, tape = leaves_of(spec_of(n_layers)), Tape(recipe_of(**options).precision)
        update(tape, leaves, recipe_of(**options))
        return len(tape.events)

    assert length(2) == length(200)


def spec_of(n_layers: int, **sizes: Any) -> ModelSpec:
    given = {"d_model": 64, "feed_forward.d_ff": 100, "vocab_size": 100, **sizes}
    return from_fields(ModelSpec, {"n_layers": n_layers, "attention.n_heads": 4, "max_seq_len": 16, **given})
