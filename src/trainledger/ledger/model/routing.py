"""The routing of tokens to experts and back on a tape: as in `engine.nn.routing`.

Sizes: N tokens, D d_model, E experts, K experts of a token, G groups of experts, R = K N routes, C places of an expert,
S places of all experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, BlockLeaves, Gradients
from trainledger.ledger.core.sizes import Sizes, is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.norms import norm
from trainledger.spec.frozen import frozen
from trainledger.spec.model import ModelSpec


@frozen
class Routes:
    """The experts of each token, the weights of their outputs, and the scores behind the choice."""

    chosen: Array
    weights: Array
    scores: Array


def route(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Routes:
    """The routes of N tokens."""
    spec, N = sizes.spec, sizes.rows
    assert spec.experts is not None
    with tape.at("router"):
        if spec.experts.own_norms:
            x = norm(tape, sizes, x, leaves.named, "mlp.router.norm", rows=N)
        w, b = leaves["mlp.router.weight"], leaves.get("mlp.router.bias")
        logits = op.linear(tape, x, w, b, N, spec.d_model, spec.experts.n_experts)
    del x
    logits = op.cast(tape, logits, "fp32")
    logits = op.times_number(tape, logits) if spec.experts.own_norms else logits
    match spec.experts.router.scores:
        case "softmax":
            scores = op.softmax(tape, logits, "_softmax")
        case "sigmoid":
            scores = op.sigmoid(tape, logits)
        case _:
            scores = logits
    chosen = _choose(tape, spec, scores.view(), N)
    weights = op.gather_elements(tape, scores, chosen)
    if spec.experts.router.scores == "softmax-of-chosen":
        weights = op.softmax(tape, weights, "_softmax")
    elif spec.experts.router.normalize:
        weights = _divide(tape, weights, op.plus_number(tape, sum_to(tape, weights, N)), spec.experts.per_token)
    if spec.experts.router.scale != 1:
        weights = op.times_number(tape, weights)
    if spec.experts.own_norms:
        factors = op.embedding(tape, chosen, leaves["mlp.router.expert_scale"], 1)
        weights = op.multiply(tape, weights, factors)
        del factors
    return Routes(chosen, weights, scores)


def _choose(tape: Tape, spec: ModelSpec, scores: Array, N: Int) -> Array:
    """The best experts of each token; nothing here has a gradient."""
    assert spec.experts is not None
    if spec.experts.router.correction:
        scores = tape.pointwise("add", scores, Array(spec.experts.n_experts, "fp32", None))
    if spec.experts.router.top_groups < spec.experts.router.groups:
        scores = _best_groups(tape, spec, scores, N)
    return _best(tape, scores, N * spec.experts.per_token)[1]


def _best_groups(tape: Tape, spec: ModelSpec, scores: Array, N: Int) -> Array:
    assert spec.experts is not None
    G = spec.experts.router.groups
    of_best = min(2 if spec.experts.router.scores == "sigmoid" else 1, spec.experts.n_experts // G)
    if of_best == 1:
        best = tape.make("amax", "reduction", scores, elements=N * G, flops=scores.elements)
    else:
        values = _best(tape, scores, N * G * of_best)[0]
        best = tape.sum(values, N * G)
        del values
    shut = tape.make("ones_like", "copy", best, dtype="bool")
    tops = _best(tape, best, N * spec.experts.router.top_groups)[1]
    tape.emit("scatter_", "embedding", reads=[tops], changes=[shut])
    del tops
    return tape.pointwise("masked_fill", scores, shut)


def _best(tape: Tape, x: Array, elements: Int) -> list[Array]:
    """Values and places of the best of each row."""
    return tape.emit("topk", "embedding", reads=[x], makes=[(elements, "fp32"), (elements, "int64")])


def sum_to(tape: Tape, x: Array, elements: Int) -> Array:
    """The sum of x over all but so many of its elements; its gradient is spread without a copy."""
    y = tape.sum(x, elements)
    y.node = tape.node([x.node], (), lambda g: [g])
    return y


def _divide(tape: Tape, a: Array, b: Array, width: int) -> Array:
    """a over b, one b for each row of ``width``."""

    def backward(g: Array, a: Array, b: Array) -> Gradients:
        once = tape.pointwise("div", a, b)
        twice = tape.pointwise("div", once, b)
        minus = tape.pointwise("neg", g)
        db = tape.pointwise("mul", minus, twice)
        del once, twice, minus
        return [tape.pointwise("div", g, b), db]

    sums = [] if width == 1 else [(1, b.elements)]
    node = tape.node([a.node, b.node], (a, b), backward, sums=sums)
    y = tape.pointwise("div", a, b)
    y.node = node
    return y


def balance_loss(tape: Tape, sizes: Sizes, routes: Routes, share: Array) -> Array:
    """The load-balance loss of one layer."""
    spec, N = sizes.spec, sizes.rows
    assert spec.experts is not None
    probabilities = routes.scores
    if spec.experts.router.scores == "sigmoid":
        total = op.plus_number(tape, sum_to(tape, probabilities, N))
        probabilities = _divide(tape, probabilities, total, spec.experts.n_experts)
        del total
    elif spec.experts.router.scores == "softmax-of-chosen":
        probabilities = op.softmax(tape, probabilities, "_softmax")
    mean = _mean_of_columns(tape, probabilities, spec.experts.n_experts)
    weighted = _weighted(tape, mean, share)
    del mean
    total = sum_to(tape, weighted, 1)
    del weighted
    return op.times_number(tape, total)


def _weighted(tape: Tape, x: Array, weights: Array) -> Array:
    """x times weights without gradient; a single number comes back as the gradient of all."""

    def product(x: Array, weights: Array) -> Array:
        return tape.pointwise("mul", x, weights, elements=weights.elements, dtype=weights.dtype)

    node = tape.node([x.node], (weights,), lambda g, weights: [product(g, weights)])
    y = product(x, weights)
    y.node = node
    return y


def _mean_of_columns(tape: Tape, x: Array, columns: Int) -> Array:
    size = x.elements
    y = tape.make("mean", "reduction", x, elements=columns, flops=size)
    y.node = tape.node([x.node], (), lambda g: [tape.pointwise("div", g, elements=size)])
    return y


# The way to the experts and back


@frozen
class Dispatch:
    """The maps between routes and places, and their unused parts."""

    route: Array
    place: Array
    starts: Array
    ends: Array
    expert: Array | None = None
    empty: Array | None = None
    dropped: Array | None = None


def dispatch(tape: Tape, chosen: Array, n_tokens: Int, per_token: int, n_experts: int, places: Int | None) -> Dispatch:
    """Where R routes go; ``places`` of each expert, or None for as many as it is sent."""
    R = chosen.elements
    flat = op.contiguous(tape, chosen, forward=not is_one(per_token) and not is_one(n_tokens), backward=False)
    expert, route = _sorted(tape, flat)
    del flat
    place = _sorted(tape, route)[1]
    experts = _range(tape, n_experts)
    starts, ends = (tape.make("searchsorted", "embedding", expert, experts, elements=n_experts) for _ in range(2))
    if places is None:
        return Dispatch(route, place, starts, ends, expert=expert)
    S, number = n_experts * places, tape.pointwise
    behind = number("sub", _range(tape, R), op.rows(tape, R, "int64", expert))
    kept = number("add", number("mul", expert), number("clamp", behind))
    route_of = number("add", starts, _range(tape, places), elements=S)
    first = op.rows(tape, S, "int64", number("clamp", route_of))
    second = op.rows(tape, R, "int64", place)
    empty = number("ge", route_of, ends, dtype="bool")
    beyond = number("ge", behind, dtype="bool")
    dropped = op.rows(tape, R, "bool", place)
    del kept, beyond
    return Dispatch(first, second, starts, ends, empty=empty, dropped=dropped)


def _sorted(tape: Tape, x: Array) -> list[Array]:
    return tape.emit("sort", "embedding", reads=[x], makes=[(x.elements, "int64"), (x.elements, "int64")])


def _range(tape: Tape, count: Int) -> Array:
    return tape.make("arange", "copy", elements=count, dtype="int64")


def to_experts(tape: Tape, x: Array, where: Dispatch, per_token: int) -> Array:
    """The token of each place."""
    token = tape.pointwise("remainder", where.route)
    return _moved(tape, x, token, where.empty, where.place, where.dropped, copies=per_token)


def masked(tape: Tape, sizes: Sizes, x: Array, rows: Int, weights: Array | None = None) -> Array:
    """So many rows, each a sum of a sequence's rows of x by a mask [T, S / B] (Lepikhin et al. 2020, arXiv 2006.16668).

    A mask has a gradient where it holds ``weights``. None of it is a model FLOP.
    """
    # A mask is two one-hot comparisons, which XLA fuses into the matmul that reads them: none is stored. The one on the
    # way to experts is of bools and has no gradient, the one back holds the routes' weights; a sequence has places of
    # its own, so that the matmuls are one for each (MaxText, src/maxtext/layers/moe.py, generate_masks; e591f30).
    B, D, size = sizes.B, sizes.spec.expert_d_model, x.elements
    old = size // D

    def matmul(reads: Sequence[Array], elements: Int, m: Int, n: Int, k: Int) -> Array:
        flops = rules.matmul_flops(B * m, n, k)
        shape = (B, m, n, k)
        return tape.make("einsum", "matmul", *reads, elements=elements, flops=flops, model_flops=0, shape=shape)

    def backward(g: Array, *saved: Array) -> Gradients:
        dx = matmul([g], size, old // B, D, rows // B)
        return [dx, *(matmul([g, saved[0]], each.elements, rows // B, old // B, D) for each in saved[1:])]

    y = matmul([x], rows * D, rows // B, D, old // B)
    targets, saved = ([x.node], ()) if weights is None else ([x.node, weights.node], (x, weights))
    y.node = tape.node(targets, saved, backward)
    return y


def scattered(tape: Tape, y: Array, index: Array, elements: Int, *, keeps: bool) -> Array:
    """Rows added up where an index says; ``keeps``: by index_add, which saves them (Megatron-LM's where it is
    deterministic), and not by scatter_add."""
    size = y.elements
    z = tape.make("index_add" if keeps else "scatter_add", "embedding", y, index, elements=elements)
    saved = (index, y) if keeps else (index,)
    z.node = tape.node([y.node], saved, lambda g, index, *_: [op.rows(tape, size, g.dtype, index)])
    return z


def from_experts(tape: Tape, y: Array, where: Dispatch) -> Array:
    """The experts' output for each route."""
    return _moved(tape, y, where.place, where.dropped, where.route, where.empty, copies=1)


def _moved(
    tape: Tape, x: Array, index: Array, blank: Array | None, back: Array, blank_back: Array | None, *, copies: int
) -> Array:
    """Rows by an index; backward by the index the other way, and the sum over the ``copies`` of each row."""
    size = x.elements
    width = size * copies // back.elements  # x has a row for each ``copies`` of the way back

    def backward(g: Array, back: Array, *blank_back: Array) -> Gradients:
        rows = _rows(tape, size * copies, g.dtype, back, blank_back[0] if blank_back else None)
        return [rows if copies == 1 else tape.sum(rows, size)]

    y = _rows(tape, index.elements * width, x.dtype, index, blank)
    y.node = tape.node([x.node], (back,) if blank_back is None else (back, blank_back), backward)
    return y


def _rows(tape: Tape, elements: Int, dtype: str, index: Array, blank: Array | None) -> Array:
    rows = op.rows(tape, elements, dtype, index)
    if blank is not None:
        tape.change("masked_fill_", rows, blank)
    return rows
