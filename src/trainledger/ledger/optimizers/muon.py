"""Muon as torch.optim runs it: matrix by matrix, the momentum made orthogonal by five Newton-Schulz iterations."""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.optimizers.groups import Group, Lines, weight_gradient_moment
from trainledger.ledger.rules import matmul_flops
from trainledger.spec.recipe import Recipe

COPIES_BF16 = False  # whether an update that is in bf16 already is copied first: torch does so since 2.15
ITERATIONS = 5  # torch.optim.Muon's ns_steps (Jordan et al. 2024, Muon: An optimizer for hidden layers)


def muon(tape: Tape, group: Group, recipe: Recipe) -> None:
    """Momentum with Nesterov's look ahead, orthogonalized in bf16; the decay's product runs even where it is 1."""
    lines = Lines(tape)
    update: Array | None = None
    for leaf in tape.each_parameter(group):
        w, g, m = weight_gradient_moment(tape, leaf.elements)
        lines.changed("lerp", m, g)
        update = lines.made("lerp", g, m)
        rows, columns = leaf.shape
        update = _orthogonal(tape, update, _smaller(rows, columns))
        lines.changed("mul", w)
        lines.changed("add", w, update)
    del update


def _orthogonal(tape: Tape, g: Array, short: Int) -> Array:
    """Five times X -> a X + (b A + c A A) X with A = X X^T, of the matrix or its transpose, whichever is wide."""
    n = g.elements
    long = n // short
    as_it_is = g.dtype == "bf16" and not COPIES_BF16
    x = g if as_it_is else tape.emit("_to_copy", "copy", reads=[g], makes=[(n, "bf16")])[0]
    norm = tape.emit("linalg_vector_norm", "reduction", reads=[x], makes=[(1, "bf16")], flops=n)
    norm = tape.emit("clamp", "elementwise", reads=norm, makes=[(1, "bf16")], flops=1)
    tape.emit("div_", "elementwise", reads=norm, changes=[x], flops=n)
    del norm
    square = short * short
    gram: Array | None = None
    polynomial: Array | None = None
    for _ in range(ITERATIONS):
        gram = _product(tape, "mm", (short, short, long), [x, x], square)
        polynomial = _product(tape, "addmm", (short, short, short), [gram, gram, gram], square)
        x = _product(tape, "addmm", (short, long, short), [x, polynomial, x], n)
    return x


def _product(tape: Tape, name: str, sizes: tuple[Int, Int, Int], reads: list[Array], elements: Int) -> Array:
    flops = matmul_flops(*sizes)
    made = tape.emit(name, "matmul", reads=reads, makes=[(elements, "bf16")], flops=flops, shape=(1, *sizes))
    return made[0]


def _smaller(a: Int, b: Int) -> Int:
    """The smaller of two sizes, be they ints, arrays or symbols."""
    return (a + b - abs(a - b)) // 2
