"""Optimizer states by parameter, with shapes and formats, and what low precision adds to a step on a tape.

Master copies, gradient buffers and loss scaling are the same operations as in `engine.train.precision`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import mul
from typing import Any

from trainledger.ledger.core.graph import Array, Leaf, ModelLeaves
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops.linear import float8_linear
from trainledger.ledger.optimizers.update_rules import RULES, for_muon, moments_of
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.precision import IN_16_BITS, Float8, Precision
from trainledger.spec.recipe import Recipe
from trainledger.spec.units import ceil_div

# 8-bit Adam: elements that share a scale (bitsandbytes since 0.44; 2,048 in Dettmers et al. 2022, section 2.2), and
# how many a tensor must have for its moments to be stored so (bitsandbytes' min_8bit_size).
BLOCK = 256
SMALLEST_IN_8_BITS = 4096


@frozen
class State:
    """One tensor of a parameter's optimizer state."""

    name: str
    shape: tuple[Int, ...]
    dtype: str

    @property
    def nbytes(self) -> Int:
        return nbytes_in(reduce(mul, self.shape, 1), self.dtype)


def rule_of(leaf: Leaf, recipe: Recipe) -> str:
    """The optimizer that updates a parameter: the recipe's, but AdamW for what Muon leaves to it."""
    return "adamw" if recipe.optimizer.kind == "muon" and not for_muon(leaf) else recipe.optimizer.kind


def states_of(leaf: Leaf, recipe: Recipe, *, shape: tuple[Int, ...] | None = None) -> tuple[State, ...]:
    """The optimizer's states of one parameter, as torch.optim names them; a frozen parameter has none.

    Step counters, the scales of 8-bit moments and small tensors' moments are fp32 in any precision.
    ``shape`` is that of a shard of the parameter, where only a shard is updated here. Sizes may be arrays or symbols;
    of 8-bit moments arrays get what each element gets alone, symbols mean large tensors.

    >>> from trainledger.spec.optimizers import Adafactor
    >>> from trainledger.spec.recipe import Recipe
    >>> recipe = Recipe(seq_len=8, global_batch=1, steps=1, optimizer=Adafactor())
    >>> [(each.name, each.shape) for each in states_of(Leaf("up_proj.weight", (64, 32)), recipe)]
    [('step', ()), ('row_var', (64, 1)), ('col_var', (1, 32))]
    """
    if not leaf.trained:
        return ()
    shape = leaf.shape if shape is None else shape
    rule, moments = rule_of(leaf, recipe), recipe.precision.moments
    counter = (State("step", (), "fp32"),) if RULES[rule].counts_steps else ()
    average = () if recipe.ema is None else (State("ema", shape, recipe.precision.updated),)
    if rule == "adafactor":
        return (*counter, *_factored(shape, moments), *average)
    if rule in ("adam-8bit", "adamw-8bit"):
        return (*counter, *_in_8_bits(shape), *average)
    return (*counter, *(State(name, shape, moments) for name in moments_of(rule, recipe)), *average)


def state_nbytes_of(leaf: Leaf, recipe: Recipe, *, shape: tuple[Int, ...] | None = None) -> Int:
    """Bytes of the optimizer's states of one parameter, or of a shard of it with the given shape."""
    return sum(state.nbytes for state in states_of(leaf, recipe, shape=shape))


def state_nbytes(leaves: ModelLeaves, recipe: Recipe) -> Int:
    """Bytes of the optimizer's states of a whole model."""
    return sum(count * sum(state_nbytes_of(leaf, recipe) for leaf in pattern) for pattern, count in leaves.in_order())


def is_small(elements: Int) -> bool:
    """Whether a tensor is known to be too small for 8-bit moments; arrays with a large one and symbols are not."""
    try:
        small = elements < SMALLEST_IN_8_BITS
        return bool(small.all()) if hasattr(small, "all") else bool(small)
    except TypeError:  # a symbol does not say
        return False


def blocks_of(elements: Int) -> Int:
    """How many blocks of 8-bit moments a tensor has, the last padded."""
    return ceil_div(elements, BLOCK)


def rows_of(shape: tuple[Int, ...]) -> Int:
    """Elements of the row factor: one for each row of each matrix of a stack."""
    return reduce(mul, shape[:-1], 1)


def columns_of(shape: tuple[Int, ...]) -> Int:
    """Elements of the column factor: one for each column of each matrix of a stack."""
    return reduce(mul, (*shape[:-2], shape[-1]), 1)


def _factored(shape: tuple[Int, ...], moments: str) -> tuple[State, ...]:
    """Adafactor's second moment: a row and a column of each matrix (Shazeer and Stern 2018), a vector's in full."""
    if len(shape) < 2:
        return (State("variance", shape, moments),)
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return State("row_var", rows, moments), State("col_var", columns, moments)


def _in_8_bits(shape: tuple[Int, ...]) -> tuple[State, ...]:
    """Two moments by blocks: a byte for each element and an fp32 scale for each block; small tensors' in fp32."""
    elements = reduce(mul, shape, 1)
    names = ("exp_avg", "exp_avg_sq")
    if is_small(elements):
        return tuple(State(name, shape, "fp32") for name in names)
    blocks = blocks_of(elements)
    some_small: Any = elements < SMALLEST_IN_8_BITS
    mixed = hasattr(some_small, "all") and some_small.any()  # an array of sizes, of which some are small
    whole, blocks = (elements * some_small, blocks * ~some_small) if mixed else (0, blocks)
    states: list[State] = []
    for name in names:
        states += [State(name, (whole,), "fp32")] if mixed else []
        states += [State(name, (blocks, BLOCK), "uint8"), State(f"{name}_scale", (blocks, 1), "fp32")]
    return tuple(states)


_QKV, _GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def set_formats(leaves: ModelLeaves, precision: Precision, *, keeps_copies: bool = False, fuses: bool = False) -> None:
    """Give every parameter its storage dtype; ``keeps_copies`` as of `ops.linear.float8_linear`.

    ``fuses``: the matrices of blocks have their gradients added up by matmuls (`Recipe.gradient_fusion`).
    """
    for segment in leaves.segments:
        for block in (*segment.first, *segment.blocks, *segment.last):
            for name, leaf in block.named.items():
                leaf.fused = leaf.fused or (fuses and _is_matrix(name, leaf))
                if block.kind.in_16_bits:
                    continue
                if precision.float8 is not None and _multiplies_in_8_bits(name, leaf, precision.float8):
                    # Owned leaves come here again for their dtypes alone, without the program that multiplies.
                    leaf.float8, leaf.keeps_copy = True, leaf.keeps_copy or keeps_copies
                    if len(leaf.shape) == 2 and leaf.linear is None:
                        leaf.linear = float8_linear
    for leaf in leaves.after.values():  # of multi-token prediction: its experts multiply as all others
        leaf.float8 = len(leaf.shape) == 3 and precision.float8 is not None and precision.float8.blocked
    for each in leaves.every():
        each.dtype = precision.parameters
        if precision.gradient_buffers:
            each.buffer = Array(each.elements, precision.gradients, None)


def _multiplies_in_8_bits(name: str, leaf: Leaf, float8: Float8) -> bool:
    """Whether a block's parameter is the matrix of a linear layer that may multiply in 8 bits (`engine.nn.float8`)."""
    # By block those of experts do too, which are held together.
    if len(leaf.shape) == 3:
        return float8.blocked
    return _is_matrix(name, leaf)


def _is_matrix(name: str, leaf: Leaf) -> bool:
    """A matrix of a linear layer that is no router's, or those of experts."""
    module, _, part = name.rpartition(".")
    return len(leaf.shape) == 3 or (
        part == "weight" and len(leaf.shape) == 2 and module.rpartition(".")[2] not in IN_16_BITS
    )


def stand_ins_nbytes(works: Iterable[ModelLeaves], dtype: str) -> Int:
    """Bytes of what Transformer Engine hands autograd where a matmul has added a weight's gradient up."""
    # One empty tensor for each shape, made once and never freed (get_dummy_wgrad in pytorch/module/base.py, since 2.3;
    # of an expert's matrix since 2.10). Megatron Core has queries, keys and values in one matrix, and gate and up.
    shapes: dict[Any, Int] = {}
    for leaves in works:
        for index, segment in enumerate(leaves.segments):
            for place, block in enumerate(segment.blocks):
                for matrix, (rows, columns) in _matrices(block.named):
                    known = isinstance(rows, int) and isinstance(columns, int)
                    shapes[(rows, columns) if known else (index, place, matrix)] = rows * columns
    return nbytes_in(sum(shapes.values()), dtype)


def _matrices(named: dict[str, Leaf]) -> Iterator[tuple[str, tuple[Int, Int]]]:
    joined: dict[str, tuple[Int, Int]] = {}
    for name, leaf in named.items():
        if leaf.fused:
            module, _, last = name.removesuffix(".weight").rpartition(".")
            one = f"{module}.{'qkv' if last in _QKV else 'fc1' if last in _GATED else last}"
            rows, columns = leaf.shape[-2:]
            joined[one] = joined.get(one, (0, columns))[0] + rows, columns
    yield from joined.items()


def own_nbytes(leaves: ModelLeaves, precision: Precision) -> Int:
    """Bytes in addition to the optimizer's states: the master copy; the loss scale and its count of good steps."""
    master = 4 * leaves.trained().elements if precision.master else 0
    return master + (8 if precision.loss_scaling else 0)


# Gradient buffers and master copies


def empty_buffers(tape: Tape, leaves: ModelLeaves) -> None:
    """The buffers that gradients are added to begin at zero."""
    with tape.during("optimizer"):
        buffers = Array(leaves.trained().elements, tape.precision.gradients, None)
        tape.emit("_foreach_zero_", "copy", changes=[buffers])


def main_gradients(tape: Tape, leaves: ModelLeaves, *, whole: bool) -> list[Array]:
    """Gradients in the master copy's format: all at once, or ``whole`` ones each freed as soon as it is copied."""
    master = tape.precision.master
    assert master is not None
    wide: list[Array] = []
    copied: list[Leaf] = []
    with tape.during("optimizer"):
        if not whole:
            return [tape.cast(Array(leaves.elements(), tape.precision.gradients, None), master)]
        for leaf in tape.each_parameter(leaves.trained()):
            gradient = leaf.gradient
            assert gradient is not None
            wide.append(tape.cast(gradient, master).of_each_round())
            tape.free(gradient)
            copied.append(leaf)
            del gradient
    for leaf in copied:
        leaf.gradient = None
    return wide


def round_back(tape: Tape, leaves: ModelLeaves) -> None:
    """The master copy rounded into the parameters."""
    precision, elements = tape.precision, leaves.trained().elements
    assert precision.master is not None
    parameters, masters = Array(elements, precision.parameters, None), Array(elements, precision.master, None)
    tape.emit("_foreach_copy_", "copy", reads=[masters], changes=[parameters])


# Loss scaling


def unscale(tape: Tape, leaves: ModelLeaves) -> Array:
    """All gradients over the scale, with a check for overflow, whose result is returned."""
    elements = leaves.trained().elements
    scale = Array(1, "fp32", None)
    with tape.during("optimizer"):
        # torch/amp/grad_scaler.py (2.13): self._scale.double().reciprocal().float().
        wide = tape.cast(scale, "fp64")
        inverse = tape.pointwise("reciprocal", wide)
        del wide
        narrow = tape.cast(inverse, "fp32")
        del inverse
        array = tape.make("full", "copy", elements=1, dtype="fp32")
        gradients = Array(elements, tape.precision.updating, None)
        name = "_amp_foreach_non_finite_check_and_unscale_"
        tape.emit(name, "elementwise", reads=[narrow], changes=[gradients, array], flops=elements)
    return array


def read_overflow(tape: Tape, array: Array) -> None:
    """The host reads whether the step must be skipped."""
    tape.emit("_local_scalar_dense", "transfer", reads=[array])


def adapt_scale(tape: Tape, array: Array) -> None:
    """The scale falls after an overflow and grows after many steps without one."""
    scale, good_steps = Array(1, "fp32", None), Array(1, "int32", None)
    tape.emit("_amp_update_scale_", "elementwise", reads=[array], changes=[scale, good_steps], flops=1)
