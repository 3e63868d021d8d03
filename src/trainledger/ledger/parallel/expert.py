"""Experts on several ranks on a tape: tokens go to the ranks of their experts, and back (Lepikhin et al. 2020, GShard).

Every rank is assumed to get as many routes as it sends (basis ``assumed``), or, with an ``imbalance`` that the run file
states, a rank to get that many times as many: its memory and its time are those of the rank that all wait for. What
is sent is counted as a copy of a token for each of its experts. Where it goes to nodes (DeepEP; DeepSeek-AI 2024,
DeepSeek-V3, section 3.2.2) fewer of those bytes pass the network (`predict.collective`), the sender makes no copies,
and what comes back is already the sum over a token's experts.

Sizes: N tokens of this rank, K experts of a token, S = K N places of its routes, D what an expert reads.
"""

from __future__ import annotations

from trainledger.ledger.core.graph import Array, Gradients, ModelLeaves, component_of
from trainledger.ledger.core.sizes import Sizes, is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import EVERY_EXPERT, EXPERT_TENSOR, Group, Int
from trainledger.ledger.model.routing import scattered
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.linear import blocks, cast_by_block
from trainledger.ledger.parallel.context import exchanged
from trainledger.ledger.parallel.rank_plan import RankPlan
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.units import ceil_div


@frozen
class Arrived:
    """For rows from all ranks: where each goes, the way back, its expert, and where each expert's rows end."""

    route: Array
    place: Array
    expert: Array
    ends: Array


def to_ranks(tape: Tape, sizes: Sizes, x: Array) -> tuple[Array, Arrived | None]:
    """The rows of this rank's experts from all ranks, those of an expert brought together by a copy."""
    # Without a capacity it depends on the router how many these are, and ranks exchange the numbers first.
    assert sizes.spec.experts is not None
    group, n_experts = _group(sizes), sizes.spec.experts.n_experts
    if sizes.capacity_factor is not None:
        return _together(tape, _gathered(tape, within(sizes), exchanged(tape, group, x))), None
    counts = tape.pointwise("sub", Array(n_experts, "int64", None))
    makes = [(n_experts, "int64")]
    (arriving,) = tape.collective("all_to_all", group, counts.nbytes, reads=[counts], makes=makes)
    y = exchanged(tape, group, x, heaviest(sizes, x.elements))
    y = _gathered(tape, within(sizes), y)
    own = _by_expert(tape, y.elements // sizes.spec.expert_d_model, n_experts // sizes.layout.expert, arriving)
    return _together(tape, y, own.place, own.route), own


def from_ranks(tape: Tape, sizes: Sizes, y: Array, own: Arrived | None, elements: Int) -> Array:
    """The results of other ranks' experts for this rank's rows, so many elements."""
    back = () if own is None else (own.route, own.place)
    rows = _together(tape, y, *back)
    del y
    rows = _scattered(tape, within(sizes), rows)
    return exchanged(tape, _group(sizes), rows, elements)


def within(sizes: Sizes) -> Group:
    """The ranks that split an expert and have other tokens each: those of Megatron-LM's sequence parallelism."""
    apart = sizes.routes_own or sizes.layout.folds
    return Group(EXPERT_TENSOR, sizes.layout.splits_expert if apart else 1)


def every_rank(sizes: Sizes) -> Group:
    """The ranks whose tokens may go to an expert."""
    return Group(EVERY_EXPERT, within(sizes).ranks * sizes.layout.expert)


def from_all(tape: Tape, sizes: Sizes, x: Array, rows: Int) -> Array:
    """The tokens of all ranks gathered, and of those the ``rows`` of this rank's experts (token_dispatcher.py)."""
    # The buffer that Megatron-LM gathers into is one for all layers; here it is freed as other memory is.
    whole = _gathered(tape, every_rank(sizes), x)
    size, width = whole.elements, sizes.spec.expert_d_model
    index = Array(rows, "int64", None)

    def backward(g: Array, index: Array) -> Gradients:
        return [tape.make("index_add", "embedding", g, index, elements=size)]

    y = op.rows(tape, rows * width, whole.dtype, index)
    y.node = tape.node([whole.node], (index,), backward)
    return y


def to_all(tape: Tape, sizes: Sizes, y: Array) -> Array:
    """What this rank's experts made of all tokens, summed over the ranks: each gets its own tokens [N, D]."""
    group, index = every_rank(sizes), Array(y.elements // sizes.spec.expert_d_model, "int64", None)
    elements = sizes.rows * sizes.spec.expert_d_model * group.ranks
    return _scattered(tape, group, scattered(tape, y, index, elements, keeps=sizes.deterministic))


def _gathered(tape: Tape, group: Group, x: Array) -> Array:
    """All ranks' rows; backward sums over the ranks what each has of a rank's own."""
    if is_one(group.ranks):
        return x
    y = tape.all_gather(group, x)
    y.node = tape.node([x.node], (), lambda g: [tape.reduce_scatter(group, g)])
    return y


def _scattered(tape: Tape, group: Group, x: Array) -> Array:
    if is_one(group.ranks):
        return x
    y = tape.reduce_scatter(group, x)
    y.node = tape.node([x.node], (), lambda g: [tape.all_gather(group, g)])
    return y


def heaviest(sizes: Sizes, elements: Int) -> Int:
    """What the rank with the most tokens gets where the mean is so many elements, in whole rows."""
    assert sizes.spec.experts is not None
    thousandths = round(1000 * sizes.spec.experts.imbalance)
    if thousandths == 1000:
        return elements
    return ceil_div(elements // sizes.spec.expert_d_model * thousandths, 1000) * sizes.spec.expert_d_model


def _by_expert(tape: Tape, rows: Int, n_experts: Int, arriving: Array) -> Arrived:
    """Rows that come rank by rank, and of each rank expert by expert, in the order of experts."""
    counts = tape.make("sum", "reduction", arriving, elements=n_experts, flops=arriving.elements)
    expert = tape.make("repeat_interleave", "embedding", arriving, elements=rows)
    expert, route = tape.emit("sort", "embedding", reads=[expert], makes=[(rows, "int64"), (rows, "int64")])
    ends = tape.make("cumsum", "reduction", counts, flops=n_experts)
    place = tape.emit("sort", "embedding", reads=[route], makes=[(rows, "int64"), (rows, "int64")])[1]
    return Arrived(route, place, expert, ends)


def finish_gradients(tape: Tape, rank: RankPlan, leaves: ModelLeaves) -> None:
    """Once a step: the gradients of experts are of the tokens of all ranks, and the loss is a mean over those."""
    # FSDP2 has taken the mean over ranks that have the same experts; where there are none, the replicas sum.
    if is_one(rank.layout.expert) or not rank.gathers:
        return
    with tape.during("backward"):
        for index, (pattern, count) in enumerate(leaves.in_order()):
            with tape.loop(f"layers {index}", count):
                for leaf in pattern:
                    if leaf.trained and component_of(leaf.path) == "experts":
                        gradient = Array(rank.piece(leaf), tape.precision.gradients, None)
                        if rank.whole_experts:
                            tape.all_reduce(rank.replicas, gradient)
                        tape.change("div_", gradient)


def _group(sizes: Sizes) -> Group:
    return Group("expert", sizes.layout.expert)


def _together(tape: Tape, x: Array, back: Array | None = None, index: Array | None = None) -> Array:
    """Rows in another order, by an ``index``; ``back`` is the index the other way, which backward reads."""
    y = _moved(tape, x, index=index)
    y.node = tape.node(
        [x.node], () if back is None else (back,), lambda g, *back: [_moved(tape, g, index=back[0] if back else None)]
    )
    return y


def _moved(tape: Tape, x: Array, dtype: str = "", index: Array | None = None) -> Array:
    """The same rows in another order; scales of 8 bits are multiplied in where the format is another."""
    return tape.make("index_select", "embedding", x, *([] if index is None else [index]), dtype=dtype)


# Once to each node


def to_nodes(tape: Tape, sizes: Sizes, x: Array) -> tuple[Array, Array | None]:
    """Tokens [N, D] to the rows [S, D] of this rank's experts, with their scales where they come in 8 bits."""
    size, dtype = x.elements, x.dtype

    def backward(g: Array) -> Gradients:
        return [_combined(tape, sizes, g, size)]

    node = tape.node([x.node], (), backward)
    rows, scales = _dispatched(tape, sizes, x)
    y = _moved(tape, rows)
    assert y.dtype == dtype or scales is not None
    y.node = node
    return y, scales


def from_nodes(tape: Tape, sizes: Sizes, y: Array) -> Array:
    """The sums [N, D] of what experts made of each token, from the rows [S, D] of this rank's experts."""
    dtype = y.dtype

    def backward(g: Array) -> Gradients:
        return [_moved(tape, _dispatched(tape, sizes, g)[0], dtype)]

    node = tape.node([y.node], (), backward)
    x = _combined(tape, sizes, y, sizes.rows * sizes.spec.expert_d_model)
    x.node = node
    return x


def _dispatched(tape: Tape, sizes: Sizes, x: Array) -> tuple[Array, Array | None]:
    """A copy of each token for each of its experts, as they arrive; in 8 bits where matmuls take 8 bits by block."""
    # So do gradients on their way to the experts in backward (DeepSeek-V3, section 3.3.3).
    assert sizes.spec.experts is not None
    float8, K, group = tape.precision.float8, sizes.spec.experts.per_token, _group(sizes)
    if float8 is None or float8.scaling != "block":
        arriving = Array(heaviest(sizes, x.elements * K) * within(sizes).ranks, x.dtype, None)
        makes = [(arriving.elements, x.dtype)]
        arrays = tape.collective("all_to_all", group, arriving.nbytes, reads=[x], makes=makes, basis="assumed")
        return arrays[0], None
    count = sizes.rows * blocks(sizes.spec.expert_d_model)
    format = float8.backward if tape.phase == "backward" else float8.forward
    x8, scales = cast_by_block(tape, x, count, format)
    arriving = heaviest(sizes, x8.elements * K) * within(sizes).ranks
    of_scales = arriving // sizes.spec.expert_d_model * blocks(sizes.spec.expert_d_model)
    makes = [(arriving, format), (of_scales, "fp32")]
    payload = sum(nbytes_in(elements, dtype) for elements, dtype in makes)
    rows, of_rows = tape.collective("all_to_all", group, payload, reads=[x8, scales], makes=makes, basis="assumed")
    return rows, of_rows


def _combined(tape: Tape, sizes: Sizes, y: Array, elements: Int) -> Array:
    """The sum over a token's experts of their rows, added up in each node before it is sent."""
    rows = _moved(tape, y)
    makes = [(elements, y.dtype)]
    return tape.collective("all_to_all", _group(sizes), rows.nbytes, reads=[rows], makes=makes, basis="assumed")[0]
