"""Muon as torch.optim runs it: matrix by matrix, the momentum made orthogonal by five Newton-Schulz iterations."""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.optimizers.groups import Group, norms, weight_gradient_moment, widest
from trainledger.ledger.rules import matmul_flops
from trainledger.spec.recipe import Recipe

COPIES_BF16 = False  # whether an update that is in bf16 already is copied first: torch does so since 2.15
ITERATIONS = 5  # torch.optim.Muon's ns_steps (Jordan et al. 2024, Muon: An optimizer for hidden layers)


def muon(tape: Tape, group: Group, recipe: Recipe) -> None:
    """Momentum with Nesterov's look ahead, orthogonalized in bf16; the decay's product runs even where it is 1."""
    update: Array | None = None
    for leaf in tape.each_parameter(group):
        w, g, m = weight_gradient_moment(tape, leaf.elements)
        tape.change("lerp_", m, g)
        update = tape.pointwise("lerp", g, m, dtype=widest(g, m))
        rows, columns = leaf.shape
        update = _orthogonal(tape, update, (rows + columns - abs(rows - columns)) // 2)
        tape.change("mul_", w)
        tape.change("add_", w, update)
    del update


def _orthogonal(tape: Tape, g: Array, short: Int) -> Array:
    """Five times X -> a X + (b A + c A A) X with A = X X^T, of the matrix or its transpose, whichever is wide."""
    n = g.elements
    long = n // short
    as_it_is = g.dtype == "bf16" and not COPIES_BF16
    x = g if as_it_is else tape.cast(g, "bf16")
    norm = norms(tape, x, 1)
    norm = tape.pointwise("clamp", norm)
    tape.change("div_", x, norm)
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
    return tape.make(name, "matmul", *reads, elements=elements, flops=matmul_flops(*sizes), shape=(1, *sizes))
