"""The losses of objectives on a tape: the same expressions as in `engine.nn.objective`, of losses by sequence.

Sizes: B sequences of a micro-batch, two for each of P pairs.
"""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op


def preference(tape: Tape, losses: Array, reference: Array) -> Array:
    """The mean of -log sigmoid of beta times the margin, of the losses of pairs in a row and the reference's of them.

    Rafailov et al. 2023 (arXiv 2305.18290), equation 7: the margin is by how much more than under the reference the
    chosen answer of a pair is likelier than the rejected one.
    """
    ratios = tape.pointwise("sub", reference, losses)
    ratios.node = tape.node([losses.node], (), lambda g: [tape.pointwise("neg", g)])
    del losses, reference
    pairs = ratios.elements // 2
    chosen, rejected = op.parts(tape, ratios, [pairs, pairs], name="stack")
    margins = op.times_number(tape, op.subtract(tape, rejected, chosen))
    value = op.softplus(tape, margins)
    del margins
    return _mean(tape, value)


def ranking(tape: Tape, scores: Array, targets: Array, B: Int, T: Int) -> Array:
    """The mean over pairs of -log sigmoid of by how much the chosen answer's last score is above the rejected one's."""
    asked = tape.pointwise("ge", targets, dtype="bool")
    steps = tape.make("arange", "copy", elements=T, dtype="int64")
    marked = tape.pointwise("mul", asked, steps, dtype="int64")
    del asked, steps
    places = tape.make("argmax", "reduction", marked, elements=B, flops=targets.elements)
    del marked
    last = op.cast(tape, op.gather_elements(tape, scores, places), "fp32")
    del scores, places
    chosen, rejected = op.parts(tape, last, [B // 2, B // 2], name="stack")
    value = op.softplus(tape, op.subtract(tape, rejected, chosen))
    return _mean(tape, value)


def odds_ratio(tape: Tape, losses: Array, targets: Array) -> Array:
    """The mean over pairs of the chosen answer's loss per token and the weighed logarithm of the ratio of the odds.

    Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7; ``targets`` are the tokens of the micro-batch.
    """
    asked = tape.pointwise("ge", targets, dtype="bool")
    counts = tape.make("sum", "reduction", asked, elements=losses.elements, dtype="int64", flops=targets.elements)
    del asked
    means = tape.pointwise("div", losses, counts)
    means.node = tape.node([losses.node], (counts,), lambda g, counts: [tape.pointwise("div", g, counts)])
    del losses, counts
    pairs = means.elements // 2
    powers = tape.pointwise("expm1", means)

    def of_power(g: Array, powers: Array) -> list[Array | None]:
        return [tape.pointwise("mul", g, tape.pointwise("add", powers))]

    powers.node = tape.node([means.node], (powers.view(),), of_power)
    odds = tape.pointwise("log", powers)
    odds.node = tape.node([powers.node], (powers,), lambda g, powers: [tape.pointwise("div", g, powers)])
    del powers
    chosen, rejected = op.parts(tape, odds, [pairs, pairs], name="stack")
    first = op.leading(tape, means, pairs, name="select_backward")
    value = op.softplus(tape, op.subtract(tape, chosen, rejected))
    value = op.times_number(tape, value)
    value = op.add(tape, first, value)
    return _mean(tape, value)


def desirability(tape: Tape, losses: Array, reference: Array, distance: Array) -> Array:
    """The mean of the weighed sigmoid of by how much less likely than under the reference an answer is.

    Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8, with the ``distance`` that mismatched answers have.
    """
    ratios = tape.pointwise("sub", losses, reference)
    ratios.node = tape.node([losses.node], (), lambda g: [g])
    worse = tape.pointwise("add", ratios, distance)
    worse.node = tape.node([ratios.node], (), lambda g: [g])
    del ratios
    signed = op.times_number(tape, op.times_constant(tape, worse, tape.pointwise("sign", worse)))
    values = op.sigmoid(tape, signed)
    del signed
    return _mean(tape, op.times_constant(tape, values, tape.pointwise("abs", values)))


def distance(tape: Tape, reference: Array, losses: Array) -> Array:
    """The mean, at least zero, of by how much likelier mismatched answers are than under the reference."""
    ratios = tape.pointwise("sub", reference, losses)
    del reference, losses
    mean = tape.make("mean", "reduction", ratios, elements=1, flops=ratios.elements)
    del ratios
    return tape.pointwise("clamp", mean)


def _mean(tape: Tape, x: Array) -> Array:
    elements = x.elements
    mean = tape.make("mean", "reduction", x, elements=1, flops=elements)
    mean.node = tape.node([x.node], (), lambda g: [tape.pointwise("div", g, elements=elements)])
    return mean
