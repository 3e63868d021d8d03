"""The feed-forward part on a tape, dense or of experts: as in `engine.nn.feed_forward` and `engine.nn.routing`.

Sizes: N tokens, D d_model, F inner width, E experts, K experts of a token, R = K N routes, S places of all experts; of
the matmuls of experts C places of each expert, D width in, M width out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, BlockLeaves, Gradients, Leaf
from trainledger.ledger.core.sizes import Sizes, is_one, smaller
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.routing import (
    Dispatch,
    balance_loss,
    dispatch,
    from_experts,
    masked,
    route,
    scattered,
    sum_to,
    to_experts,
)
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.linear import Scaled, by_blocks, by_microblocks, scaled_pair
from trainledger.ledger.ops.loss import swiglu, with_loss
from trainledger.ledger.ops.norms import norm
from trainledger.ledger.parallel.context import context_group
from trainledger.ledger.parallel.expert import (
    every_rank,
    from_all,
    from_nodes,
    from_ranks,
    heaviest,
    to_all,
    to_nodes,
    to_ranks,
    within,
)
from trainledger.ledger.parallel.tensor import enter, leave
from trainledger.spec.frozen import frozen
from trainledger.spec.units import ceil_div


def mlp(
    tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, *, name: str = "mlp", width: Int | None = None
) -> Array:
    """The dense MLP of this name and inner width (absent: d_ff), plain or gated."""
    spec, rows = sizes.spec, sizes.rows
    D, F = spec.d_model, spec.feed_forward.d_ff if width is None else width

    def project(part: str, x: Array, d_in: Int, d_out: Int) -> Array:
        w, b = leaves[f"{name}.{part}.weight"], leaves.get(f"{name}.{part}.bias")
        with tape.at(part):
            return op.linear(tape, x, w, b, rows, d_in, d_out)

    if spec.feed_forward.gated:
        h = _gated(tape, sizes, [project("gate_proj", x, D, F), project("up_proj", x, D, F)])
    else:
        h = op.activate(tape, project("up_proj", x, D, F), spec.feed_forward.activation)
    return project("down_proj", h, F, D)


def _gated(tape: Tape, sizes: Sizes, gate_and_up: list[Array], weights: Array | None = None) -> Array:
    """act(gate) * up, by operations of PyTorch or in a kernel of Megatron-LM; no name here keeps either alive.

    The kernel multiplies by ``weights`` too, one for each row (weighted_swiglu).
    """
    activation = sizes.spec.feed_forward.activation
    if sizes.of_megatron and activation == "silu":
        return swiglu(tape, gate_and_up.pop(0), gate_and_up.pop(), weights)
    return op.gated(tape, gate_and_up.pop(0), gate_and_up.pop(), activation)


def experts(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    """Router, experts and shared expert instead of an MLP."""
    spec, mixture = sizes.spec, sizes.spec.experts
    assert mixture is not None
    own = replace(sizes, T=sizes.T // sizes.layout.tensor) if sizes.routes_own else sizes

    def normed(name: str, x: Array) -> Array:
        return norm(tape, sizes, x, leaves.named, f"mlp.{name}") if mixture.own_norms else x

    stream = x if mixture.own_norms else None
    x = op.cast(tape, normed("experts_norm", x), tape.compute_dtype)
    y = _routed(tape, own, leaves, x, x if stream is None else stream)
    if mixture.expert_d_model:
        y = _projected(tape, leaves, "latent_out", y, own.rows, mixture.expert_d_model, spec.d_model)
    y = normed("experts_out_norm", y)
    if not mixture.n_shared:
        return y
    if stream is not None:
        x = op.cast(tape, normed("shared_norm", stream), tape.compute_dtype)
    with tape.at("shared_experts"):
        width = mixture.shared_width
        if sizes.routes_own:
            # Its matmuls are those of a dense MLP: all tokens are gathered for them (shared_experts.py).
            whole = enter(tape, sizes, x)
            shared = leave(tape, sizes, mlp(tape, sizes, leaves, whole, name="mlp.shared_experts", width=width))
            del whole
        else:
            shared = mlp(tape, sizes, leaves, x, name="mlp.shared_experts", width=width)
    shared = normed("shared_out_norm", shared)
    if mixture.shared_gate:
        gate = op.sigmoid(tape, _projected(tape, leaves, "shared_expert_gate", x, own.rows, spec.d_model, 1))
        shared = _multiply(tape, gate, shared, narrow=0)
        del gate
    return op.add(tape, y, shared)


def _projected(tape: Tape, leaves: BlockLeaves, name: str, x: Array, rows: Int, d_in: Int, d_out: Int) -> Array:
    with tape.at(name):
        return op.linear(tape, x, leaves[f"mlp.{name}.weight"], leaves.get(f"mlp.{name}.bias"), rows, d_in, d_out)


def _routed(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, read: Array) -> Array:
    """The weighted sum of the outputs of each token's experts, which a router chooses by what it ``read``."""
    spec, N, D = sizes.spec, sizes.rows, sizes.spec.expert_d_model
    assert spec.experts is not None
    K = spec.experts.per_token
    routes = route(tape, sizes, leaves, read)
    if spec.experts.expert_d_model:
        x = _projected(tape, leaves, "latent_in", x, N, spec.d_model, D)
    R, places = N * K, None
    if sizes.capacity_factor is not None:
        places = rules.expert_capacity(N, K, spec.experts.n_experts, sizes.capacity_factor)
    where = dispatch(tape, routes.chosen, N, K, spec.experts.n_experts, places)
    S = R if places is None else places * spec.experts.n_experts
    roomy = sizes.capacity_factor is None or sizes.capacity_factor >= 1
    routed = R if roomy else smaller(R, S)
    split, alone, sends = within(sizes).ranks, is_one(every_rank(sizes).ranks), sizes.layout.expert_send
    if not alone and places is None:
        S = heaviest(sizes, S * D) // D
    here, ends = spec.experts.n_experts // sizes.layout.expert, where.ends if places is None else None
    along = _going_along(tape, sizes, routes.weights, S * split)
    stack = Places(S * split, routed * split, here, where.expert, ends, along)

    def sent() -> Array:
        return masked(tape, sizes, x, S) if sizes.by_masks else to_experts(tape, x, where, K)

    if sizes.layout.sends_to_nodes:
        y = _stack(tape, sizes, leaves, *to_nodes(tape, sizes, x), stack)
    elif alone:
        y = _stack(tape, sizes, leaves, sent(), None, stack)
    elif sends == "all":
        y = _stack(tape, sizes, leaves, from_all(tape, sizes, x, S * split), None, stack)
    else:
        y = _over_ranks(tape, sizes, leaves, sent(), stack)
    weights = routes.weights
    if along is None:  # the copy lives until the loss of balance is there, as in engine.nn
        turned = not is_one(K) and not is_one(N)
        weights = op.cast(tape, op.contiguous(tape, weights, forward=turned, backward=False), y.dtype)
    mixed = _mixed(tape, sizes, y, where, weights, stack)
    if sizes.balance:
        loss = op.times_number(tape, balance_loss(tape, sizes, routes, _shares(tape, sizes, where)))
        mixed = with_loss(tape, mixed, loss)
    return mixed


def _mixed(tape: Tape, sizes: Sizes, y: Array, where: Dispatch, weights: Array, stack: Places) -> Array:
    """The sum [N, D] over a token's experts of what they made, by its ``weights`` where these did not go along."""
    spec, N, layout = sizes.spec, sizes.rows, sizes.layout
    assert spec.experts is not None
    width = N * spec.expert_d_model
    if stack.weights is not None:
        if layout.sends_to_nodes:
            return from_nodes(tape, sizes, y)
        if layout.expert_send == "all" and not is_one(every_rank(sizes).ranks):
            return to_all(tape, sizes, y)
        return scattered(tape, y, where.place, width, keeps=sizes.deterministic)
    if layout.sends_to_nodes:  # routes' weights come along, and what is sent back is their sum
        return from_nodes(tape, sizes, _multiply(tape, y, weights, narrow=1))
    if sizes.by_masks:
        return masked(tape, sizes, y, N, weights)
    return sum_to(tape, _multiply(tape, from_experts(tape, y, where), weights, narrow=1), width)


def _going_along(tape: Tape, sizes: Sizes, weights: Array, rows: Int) -> Array | None:
    """A weight for each row of this rank's experts, where Megatron-LM sends them with the tokens.

    There they are multiplied in before the last matmul, so that its output is not kept (TEGroupedMLP of
    core/transformer/moe/experts.py). What sending them takes is left out: a number for each row.
    """
    if not sizes.of_megatron:
        return None
    weights = op.cast(tape, weights, tape.compute_dtype)
    size = weights.elements
    y = tape.make("index_select", "embedding", weights, elements=rows)
    y.node = tape.node([weights.node], (), lambda g: [tape.make("index_add", "embedding", g, elements=size)])
    return y


def _shares(tape: Tape, sizes: Sizes, where: Dispatch) -> Array:
    """Each expert's share of a micro-batch's routes."""
    share = tape.pointwise("div", tape.pointwise("sub", where.ends, where.starts), dtype="fp32")
    if not is_one(sizes.layout.context):  # of all tokens of a sequence
        tape.all_reduce(context_group(sizes), share)
        tape.change("div_", share)
    return share


def _over_ranks(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, stack: Places) -> Array:
    """The outputs of all ranks' experts for this rank's rows, which the called module keeps to its end."""
    with tape.at("experts"):
        rows, own = to_ranks(tape, sizes, x)
    elements = x.elements
    if own is not None:
        stack = replace(stack, expert=own.expert, ends=own.ends)
    made = [_stack(tape, sizes, leaves, rows, None, stack)]
    del rows
    with tape.at("experts"):
        return from_ranks(tape, sizes, made.pop(), own, elements)


def _stack(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, scales: Array | None, places: Places) -> Array:
    """The MLPs of all experts, of rows that may have come in 8 bits with their ``scales``."""
    spec = sizes.spec
    assert spec.experts is not None
    D, F = spec.expert_d_model, spec.experts.width
    inward = "gate_up_proj" if spec.feed_forward.gated else "up_proj"

    def project(x: Array, name: str, d_in: Int, d_out: Int, scales: Array | None = None) -> Array:
        w, b = leaves[f"mlp.experts.{name}"], leaves.get(f"mlp.experts.{name}_bias")
        return experts_linear(tape, x, w, b, d_in, d_out, places, scales)

    with tape.at("experts"):
        y = project(x, inward, D, 2 * F if spec.feed_forward.gated else F, scales)
        if spec.feed_forward.gated:
            gate, up = op.parts(tape, y, [places.count * F] * 2)
            fused = places.weights if spec.feed_forward.activation == "silu" else None
            h = _gated(tape, sizes, [gate, up], fused)
            del gate, up
        else:
            fused = None
            h = op.activate(tape, y, spec.feed_forward.activation)
        del y
        if places.weights is not None and fused is None:
            h = _multiply(tape, h, places.weights, narrow=1)
        return project(h, "down_proj", F, D)


def _multiply(tape: Tape, a: Array, b: Array, *, narrow: int) -> Array:
    """a * b; the ``narrow`` of the two (0 or 1) has one element for each row of the other."""
    size = (b, a)[narrow].elements

    def product(x: Array, y: Array) -> Array:
        return tape.pointwise("mul", x, y, elements=size)

    node = op.pairwise(tape, a, b, product, product, sums=[(narrow, (a, b)[narrow].elements)])
    y = product(a, b)
    y.node = node
    return y


@frozen
class Places:
    """The rows that experts work on: how many there are, how many have a token, and how their experts are found.

    ``ends`` and ``expert`` are the arrays that say where each expert's rows end and whose each row is; both are
    None where every expert has the same number of places. ``weights`` of the rows are there where they went along.
    """

    count: Int
    routed: Int
    n_experts: int
    expert: Array | None
    ends: Array | None
    weights: Array | None = None


def experts_linear(
    tape: Tape, x: Array, w: Leaf, b: Leaf | None, d_in: Int, d_out: Int, places: Places, scales: Array | None = None
) -> Array:
    """Rows of d_in times each expert's weight [E, d_out, d_in] plus its bias [E, d_out].

    Rows that came in 8 bits have their ``scales``.
    """
    if w.float8:
        return _in_8_bits(tape, x, w, b, d_in, d_out, places, scales)

    def multiply(x: Array, stack: Array, d_in: Int, d_out: Int, adapter: Leaf | None = None) -> Array:
        w_b = (w, b) if adapter is None else (adapter, None)
        return _of_each_expert(tape, x, stack, *w_b, d_in, d_out, places)

    if w.linear is not None:
        return w.linear(tape, multiply, x, w, (d_in, d_out))
    return multiply(x, w.array(), d_in, d_out)


def _of_each_expert(
    tape: Tape, x: Array, stack: Array, w: Leaf, b: Leaf | None, d_in: Int, d_out: Int, places: Places
) -> Array:
    """Rows times each expert's matrix of a stack, whose gradient is that of ``w``."""
    dtype = x.dtype
    matrix = op.cast(tape, stack, dtype)
    # The engine offloads no copy of a trained parameter, which stays on the device itself (`checkpointing.offloading`).
    if isinstance(stack.node, Leaf) and matrix.memory is not None:
        matrix.memory.record.of_parameter = True
    bias = None if b is None else op.cast(tape, b.array(), dtype)
    rows, n_experts, sizes = places.count, places.n_experts, (stack.elements, places.n_experts * d_out)
    grouped = places.ends is not None
    each = ceil_div(rows, places.n_experts)  # rows of an expert, where they are spread evenly
    flops = rules.matmul_flops(rows, d_out, d_in)
    model_flops = rules.matmul_flops(places.routed, d_out, d_in)

    def matmul(reads: Sequence[Array], elements: Int, *sizes: Int) -> Array:
        return tape.make(
            "grouped_mm" if grouped else "padded_mm", "matmul", *reads, elements=elements, dtype=dtype, flops=flops,
            model_flops=model_flops, shape=(n_experts, *sizes),
        )  # fmt: skip

    x_wanted, w_wanted, b_wanted = (it is not None and it.node is not None for it in (x, matrix, bias))

    def backward(g: Array, *saved: Array) -> Gradients:
        others = list(saved)
        x = others.pop(0) if w_wanted else None
        matrix = others.pop(0) if x_wanted else None
        dx = matmul([g, matrix, *others], rows * d_in, each, d_in, d_out) if matrix is not None else None
        dw = None
        if x is not None:
            with tape.gradient_of(w):
                dw = matmul([g, x, *others], sizes[0], d_out, d_in, each)
        return [dx, dw, _bias_gradient(tape, g, others, sizes[1])] if b_wanted else [dx, dw]

    ends = [places.ends] if places.ends is not None else []
    y = matmul([x, matrix, *ends], rows * d_out, each, d_out, d_in)
    targets = [x.node, matrix.node]
    if bias is not None:
        _add_bias(tape, y, bias, places)
        targets.append(bias.node)
    saved = [*([x] if w_wanted else []), *([matrix] if x_wanted else []), *ends]
    y.node = tape.node(targets, tuple(saved), backward)
    return y


def _in_8_bits(
    tape: Tape, x: Array, w: Leaf, b: Leaf | None, d_in: Int, d_out: Int, places: Places, scales: Array | None
) -> Array:
    """The same in 8 or 4 bits by block, as linear layers have it (`ledger.ops.linear`): grouped matmuls."""
    rows, n_experts, dtype = places.count, places.n_experts, tape.compute_dtype
    flops = rules.matmul_flops(rows, d_out, d_in)
    model_flops = rules.matmul_flops(places.routed, d_out, d_in)

    def matmul(a: Scaled, b: Scaled, elements: Int, *sizes: Int) -> Array:
        return tape.make(
            "_scaled_grouped_mm", "matmul", *scaled_pair(a, b), elements=elements, dtype=dtype, flops=flops,
            model_flops=model_flops, shape=(n_experts, *sizes), basis="assumed",
        )  # fmt: skip

    assert tape.precision.float8 is not None
    by = by_blocks if tape.precision.float8.scaling == "block" else by_microblocks
    y = by(tape, x, scales, w, rows, d_in, d_out, matmul, each=ceil_div(rows, n_experts))
    if b is None:
        return y
    bias = op.cast(tape, b.array(), dtype)
    _add_bias(tape, y, bias, places)
    ends = () if places.ends is None else (places.ends,)

    def with_bias(g: Array, *ends: Array) -> Gradients:
        return [g, _bias_gradient(tape, g, ends, n_experts * d_out)]

    return y.view(node=tape.node([y.node, bias.node], ends, with_bias))


def _bias_gradient(tape: Tape, g: Array, ends: Sequence[Array], elements: Int) -> Array:
    return tape.make("group_sums" if ends else "sum", "reduction", g, *ends, elements=elements, flops=g.elements)


def _add_bias(tape: Tape, y: Array, bias: Array, places: Places) -> None:
    tape.change("add_", y, bias if places.expert is None else op.rows(tape, y.elements, y.dtype, places.expert))
