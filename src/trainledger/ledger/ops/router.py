"""The choice of experts on a tape: the same expressions as in `nn.router`.

Sizes: N tokens, D d_model, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.ledger.core.graph import Array, Gradients
from trainledger.ledger.core.leaves import BlockLeaves
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.activations import plus_number, sigmoid
from trainledger.ledger.ops.attention_kernels import softmax
from trainledger.spec.model import ModelSpec


@frozen
class Routes:
    """The experts of each token, the weights of their outputs, and what the choice was made from."""

    chosen: Array
    weights: Array
    scores: Array


def route(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Routes:
    """The routes of N tokens."""
    spec, N = sizes.spec, sizes.rows
    assert spec.experts is not None
    with tape.at("router"):
        w, b = leaves["mlp.router.weight"], leaves.get("mlp.router.bias")
        logits = op.linear(tape, x, w, b, N, spec.d_model, spec.experts.n_experts)
    logits = op.cast(tape, logits, "fp32")
    match spec.experts.router.scores:
        case "softmax":
            scores = softmax(tape, logits, "_softmax")
        case "sigmoid":
            scores = sigmoid(tape, logits)
        case _:
            scores = logits
    chosen = _choose(tape, spec, scores.view(), N)
    weights = _gather(tape, scores, chosen)
    if spec.experts.router.scores == "softmax-of-chosen":
        weights = softmax(tape, weights, "_softmax")
    elif spec.experts.router.normalize:
        weights = _divide(tape, weights, plus_number(tape, sum_of_rows(tape, weights, N)), spec.experts.per_token)
    if spec.experts.router.scale != 1:
        weights = op.times_number(tape, weights)
    return Routes(chosen, weights, scores)


def _choose(tape: Tape, spec: ModelSpec, scores: Array, N: Int) -> Array:
    """The best experts of each token; nothing here has a gradient."""
    assert spec.experts is not None
    if spec.experts.router.correction:
        correction = Array(spec.experts.n_experts, "fp32", None)
        (scores,) = tape.emit(
            "add", "elementwise", reads=[scores, correction], makes=[(scores.elements, "fp32")], flops=scores.elements
        )
    if spec.experts.router.top_groups < spec.experts.router.groups:
        scores = _best_groups(tape, spec, scores, N)
    return _best(tape, scores, N * spec.experts.per_token)[1]


def _best_groups(tape: Tape, spec: ModelSpec, scores: Array, N: Int) -> Array:
    assert spec.experts is not None
    G = spec.experts.router.groups
    of_best = min(2 if spec.experts.router.scores == "sigmoid" else 1, spec.experts.n_experts // G)
    if of_best == 1:
        (best,) = tape.emit("amax", "reduction", reads=[scores], makes=[(N * G, "fp32")], flops=scores.elements)
    else:
        values = _best(tape, scores, N * G * of_best)[0]
        best = tape.emit("sum", "reduction", reads=[values], makes=[(N * G, "fp32")], flops=values.elements)[0]
        del values
    (shut,) = tape.emit("ones_like", "copy", reads=[best], makes=[(N * G, "bool")])
    tops = _best(tape, best, N * spec.experts.router.top_groups)[1]
    tape.emit("scatter_", "embedding", reads=[tops], changes=[shut])
    del tops
    return tape.emit(
        "masked_fill", "elementwise", reads=[scores, shut], makes=[(scores.elements, "fp32")], flops=scores.elements
    )[0]


def _best(tape: Tape, x: Array, elements: Int) -> list[Array]:
    """Values and places of the best of each row."""
    return tape.emit("topk", "embedding", reads=[x], makes=[(elements, "fp32"), (elements, "int64")])


def _gather(tape: Tape, x: Array, index: Array) -> Array:
    """One element of x for each of the index; keeps x for its size, and the gradient is as large."""
    size = x.elements

    def backward(g: Array, x: Array, index: Array) -> Gradients:
        (zeros,) = tape.emit("new_zeros", "copy", reads=[g], makes=[(size, g.dtype)])
        return list(tape.emit("scatter_add", "embedding", reads=[zeros, index, g], makes=[(size, g.dtype)]))

    node = tape.node([x.node], (x.view(), index), backward)
    picked = Array(index.elements, x.dtype, None)
    (y,) = tape.emit("gather", "embedding", reads=[picked, index], makes=[(index.elements, x.dtype)])
    y.node = node
    return y


def sum_of_rows(tape: Tape, x: Array, rows: Int) -> Array:
    """The sum of each row; its gradient is spread without a copy."""
    (y,) = tape.emit("sum", "reduction", reads=[x], makes=[(rows, x.dtype)], flops=x.elements)
    y.node = tape.node([x.node], (), lambda g: [g])
    return y


def _divide(tape: Tape, a: Array, b: Array, width: int) -> Array:
    """a over b, one b for each row of ``width``."""

    def binary(name: str, x: Array, y: Array) -> Array:
        return tape.emit(name, "elementwise", reads=[x, y], makes=[(a_size, x.dtype)], flops=a_size)[0]

    def backward(g: Array, a: Array, b: Array) -> Gradients:
        once = binary("div", a, b)
        twice = binary("div", once, b)
        (minus,) = tape.emit("neg", "elementwise", reads=[g], makes=[(g.elements, g.dtype)], flops=g.elements)
        db = binary("mul", minus, twice)
        del once, twice, minus
        return [binary("div", g, b), db]

    a_size = a.elements
    sums = [] if width == 1 else [(1, b.elements)]
    node = tape.node([a.node, b.node], (a, b), backward, sums=sums)
    y = binary("div", a, b)
    y.node = node
    return y


def balance_loss(tape: Tape, sizes: Sizes, routes: Routes, share: Array) -> Array:
    """The load-balance loss of one layer."""
    spec, N = sizes.spec, sizes.rows
    assert spec.experts is not None
    probabilities = routes.scores
    if spec.experts.router.scores == "sigmoid":
        total = plus_number(tape, sum_of_rows(tape, probabilities, N))
        probabilities = _divide(tape, probabilities, total, spec.experts.n_experts)
        del total
    elif spec.experts.router.scores == "softmax-of-chosen":
        probabilities = softmax(tape, probabilities, "_softmax")
    mean = _mean_of_columns(tape, probabilities, spec.experts.n_experts)
    weighted = _weighed(tape, mean, share)
    del mean
    (total,) = tape.emit("sum", "reduction", reads=[weighted], makes=[(1, "fp32")], flops=weighted.elements)
    total.node = tape.node([weighted.node], (), lambda g: [g])
    del weighted
    return op.times_number(tape, total)


def _weighed(tape: Tape, x: Array, weights: Array) -> Array:
    """x times weights without gradient; a single number comes back as the gradient of all."""

    def product(x: Array, weights: Array) -> Array:
        makes = [(weights.elements, weights.dtype)]
        return tape.emit("mul", "elementwise", reads=[x, weights], makes=makes, flops=weights.elements)[0]

    node = tape.node([x.node], (weights,), lambda g, weights: [product(g, weights)])
    y = product(x, weights)
    y.node = node
    return y


def _mean_of_columns(tape: Tape, x: Array, columns: Int) -> Array:
    size = x.elements

    def backward(g: Array) -> Gradients:
        return list(tape.emit("div", "elementwise", reads=[g], makes=[(size, g.dtype)], flops=size))

    (y,) = tape.emit("mean", "reduction", reads=[x], makes=[(columns, x.dtype)], flops=size)
    y.node = tape.node([x.node], (), backward)
    return y
