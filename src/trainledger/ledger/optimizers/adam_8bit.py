"""Adam and AdamW with 8-bit moments: as `engine.train.adam_8bit` runs them, and as bitsandbytes' kernel does.

The one has the moments of a tensor in fp32 while it updates it, the other (Dettmers et al. 2022, section 2.2) reads,
updates and stores element by element, without scratch.
"""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.optimizers.states import BLOCK, blocks_of, is_small, state_nbytes_of
from trainledger.ledger.optimizers.update_rules import (
    RULES,
    Group,
    count_step,
    norms,
    read_number,
    run_lines,
    weight_gradient_moment,
)
from trainledger.spec.recipe import Recipe

VALUES = 256  # of a byte


def adam_8bit_loop(tape: Tape, group: Group, recipe: Recipe) -> None:
    """Small tensors as Adam does them, the others between reading and storing their moments.

    Arrays of sizes with a large one among them, and symbols, mean large tensors.
    """
    tables: list[Array] = []
    for leaf in tape.each_parameter(group):
        n = leaf.elements
        count_step(tape)
        if is_small(n):
            _rule(tape, group, recipe, n)
            continue
        if not tables:
            tables = _tables(tape)
        moments = [_read(tape, blocks_of(n)) for _ in range(2)]
        _rule(tape, group, recipe, n)
        for _ in range(2):
            _store(tape, moments.pop(0), blocks_of(n))


def adam_8bit_fused(tape: Tape, group: Group, recipe: Recipe) -> None:
    """One kernel over codes and scales, and over the fp32 moments of small tensors."""
    n = group.elements
    w, g, _ = weight_gradient_moment(tape, n)
    states = Array(group.total(lambda leaf: state_nbytes_of(leaf, recipe) - 4), "uint8", None)  # not the step counter
    flops = RULES[group.rule].flops * n
    name = f"_fused_{group.rule.replace('-', '_')}_"
    tape.emit(name, "update", reads=[g], changes=[w, states], flops=flops, basis="assumed")


def _tables(tape: Tape) -> list[Array]:
    """For either moment the values of a byte, and the bounds between them."""
    tables = []
    for _ in range(2):
        values = tape.make("lift_fresh", "copy", elements=VALUES, dtype="fp32")
        part = values.view(VALUES - 1)
        bounds = tape.pointwise("add", part, part)
        tape.change("div_", bounds)
        tables += [values, bounds]
    return tables


def _read(tape: Tape, blocks: Int) -> Array:
    """A stored moment in fp32, its last block padded."""
    n = blocks * BLOCK
    places = tape.cast(Array(n, "uint8", None), "int32")
    moment = tape.make("index_select", "embedding", Array(n, "fp32", None), places)
    del places
    tape.change("mul_", moment, Array(blocks, "fp32", None))
    return moment


def _store(tape: Tape, moment: Array, blocks: Int) -> None:
    """A moment's largest magnitude by block, and the place of each element's share of it."""
    n, scales = blocks * BLOCK, Array(blocks, "fp32", None)
    largest = norms(tape, moment, blocks)
    tape.emit("copy_", "copy", reads=[largest], changes=[scales])
    del largest
    above_zero = tape.pointwise("clamp", scales)
    tape.change("div_", moment, above_zero)
    del above_zero
    places = tape.make("bucketize", "embedding", moment, Array(VALUES - 1, "fp32", None), dtype="int32")
    tape.emit("copy_", "copy", reads=[places], changes=[Array(n, "uint8", None)])


def _rule(tape: Tape, group: Group, recipe: Recipe, n: Int) -> None:
    """Adam's rule on moments in fp32."""
    w, g, _ = weight_gradient_moment(tape, n)
    # No name but that in the dict holds the wide gradient, which is freed once decay has made another.
    arrays = {"w": w, "g": g, "m": Array(n, "fp32", None)}
    read_number(tape)
    if g.dtype != "fp32":
        arrays["g"] = tape.cast(g, "fp32")
    run_lines(tape, group, recipe, "8-bit", arrays)
