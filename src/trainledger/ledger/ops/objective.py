"""The losses of objectives on a tape: the same expressions as in `engine.nn.objective`, of losses by sequence.

Sizes: B sequences of a micro-batch, two for each of P pairs.
"""

from __future__ import annotations

from functools import partial

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.loss import cross_entropy
from trainledger.spec.objective import Distillation


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


def softened(tape: Tape, logits: Array, objective: Distillation, *, upcast: bool) -> Array:
    """The log-probabilities of logits over the temperature."""
    x = op.cast(tape, logits, "fp32") if upcast else logits
    del logits
    x = op.divide_by_number(tape, x) if objective.temperature != 1 else x
    return op.softmax(tape, x, "_log_softmax")


def distillation(tape: Tape, compared: list[Array], targets: Array, objective: Distillation, *, upcast: bool) -> Array:
    """The mean over tokens of the divergence from a teacher, and of their own loss, which frees what it ``compared``:
    the teacher's log-probabilities and the model's logits.

    Kept are the log-probabilities of the model and the probabilities of the teacher, and for the loss of tokens the
    log-probabilities once more, which no temperature softens.
    """
    of_model = softened(tape, compared[-1], objective, upcast=upcast)
    if objective.kd_ratio == 1:  # no loss of the tokens reads the logits: gone before the divergence, where bytes peak
        compared.pop()
    value = op.times_number(tape, op.cast(tape, _divergence(tape, of_model, compared.pop(0)), "fp32"))
    del of_model
    if not compared:
        return value
    losses = [cross_entropy(tape, compared[0], targets, upcast=upcast)]
    compared.clear()
    return op.add(tape, value, op.times_number(tape, losses.pop()))


def _divergence(tape: Tape, of_model: Array, of_teacher: Array) -> Array:
    """The sum over tokens of the KL divergence of distributions from a teacher's (torch's ``kl_div``)."""
    # ATen's kl_div of logarithms evaluates exp(target) * (target - input) from the right (torch 2.13).
    apart = tape.pointwise("sub", of_teacher, of_model)
    apart.node = tape.node([of_model.node], (), lambda g: [tape.pointwise("neg", g)])
    wanted = tape.pointwise("exp", of_teacher)
    parts = tape.pointwise("mul", wanted, apart)
    gradient = partial(tape.pointwise, "mul", elements=parts.elements)
    parts.node = tape.node([apart.node], (wanted,), lambda g, wanted: [gradient(g, wanted)])
    del apart, wanted
    value = tape.sum(parts, 1)
    value.node = parts.node
    return value


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
