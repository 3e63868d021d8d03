"""Tensor parallelism on a tape: what each rank of a group has of a model, and where the group communicates.

Megatron-LM's split (Shoeybi et al. 2019, section 3; with sequence parallelism Korthikanti et al. 2022, section 4.2),
as torch's DTensor runs it: the first matmul of a branch by columns, the last by rows; heads, inner widths and the
rows of embedding and head over the ranks. Norms, positions and biases of last matmuls are held by every rank.

Sizes: N tokens of a micro-batch, D d_model, V rows of the embedding on this rank.
"""

from __future__ import annotations

from functools import partial

from trainledger.ledger.core.graph import Array, GatheredAgain, Gradients
from trainledger.ledger.core.sizes import Sizes, is_one, share
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Group, Int
from trainledger.ledger.ops import operations as op
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import with_fields


def local_model(spec: ModelSpec, ranks: Int, splits_expert: Int | None = None) -> ModelSpec:
    """The model that one tensor rank computes: its heads, its part of the inner widths, its rows of the embedding.

    Key-value heads that are fewer than the ranks are held by several of them. ``splits_expert``: the ranks that split
    the inner size of an expert, where those are others.

    >>> from trainledger.answers.load import model
    >>> rank = local_model(model("llama-3-8b", **{"attention.n_kv_heads": 2}), 4)
    >>> rank.attention.n_heads, rank.kv_heads, rank.head_size, rank.feed_forward.d_ff, rank.padded_vocab
    (8, 1, 128, 3584, 32064)
    """
    if is_one(ranks) and splits_expert is None:
        return spec
    latent, experts, others = spec.latent, spec.experts, spec.attention.in_global
    shared = None if experts is None else experts.shared_d_ff
    counts = {} if others is None else {"n_heads": others.n_heads, "n_kv_heads": others.n_kv_heads}
    return with_fields(
        spec,
        {
            **{f"attention.in_global.{name}": count and count // ranks for name, count in counts.items()},
            "attention.n_heads": spec.attention.n_heads // ranks,
            "attention.n_kv_heads": None if latent else share(spec.kv_heads, ranks),
            "attention.head_dim": spec.attention.head_dim if latent else spec.head_size,
            "feed_forward.d_ff": spec.feed_forward.d_ff // ranks,
            "feed_forward.expert_d_ff": None if experts is None else experts.width // (splits_expert or ranks),
            "feed_forward.shared_d_ff": None if shared is None else shared // ranks,
            "vocab_size": spec.padded_vocab // ranks,
            "vocab_multiple": 1,
        },
    )


def tensor_group(sizes: Sizes) -> Group:
    return Group("tensor", sizes.layout.tensor)


def enter(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """The stream as the ranks' own matmuls read it; backward adds up the gradients that the ranks have of it."""
    # With sequence parallelism each rank has some of the tokens outside, and all of them inside. What the matmuls keep
    # of them are all, or the rank's own in their format, gathered once more in backward (Korthikanti et al. 2022,
    # section 4.2.2).
    if is_one(sizes.layout.tensor):
        return x
    if sizes.layout.gathers_again:
        own = op.cast(tape, x, tape.compute_dtype)
        y = _gathered(tape, sizes, own)
        y.node = tape.node([own.node], (), lambda g: [_scattered(tape, sizes, g)])
        assert y.memory is not None
        y.memory.again = GatheredAgain(own, partial(_gathered_at, tape, sizes, tape.path))
        return y
    if sizes.layout.sequence_parallel:
        y = _gathered(tape, sizes, x)
        y.node = tape.node([x.node], (), lambda g: [_scattered(tape, sizes, g)])
        return y
    # Two all-reduces forward and two backward in a block, each of B T D (Shoeybi et al. 2019, figure 4): this is f.
    y = x.view()
    y.node = tape.node([x.node], (), lambda g: [_summed(tape, sizes, g)])
    return y


def leave(tape: Tape, sizes: Sizes, y: Array) -> Array:
    """The sum of the ranks' matmuls."""
    if is_one(sizes.layout.tensor):
        return y
    if sizes.layout.sequence_parallel:
        # An all-reduce is a reduce-scatter and an all-gather: as many bytes (Korthikanti et al. 2022, section 4.2.2).
        own = _scattered(tape, sizes, y)
        own.node = tape.node([y.node], (), lambda g: [_gathered(tape, sizes, g)])
        return own
    # The g of the same figure: its backward passes the gradient on.
    total = _summed(tape, sizes, y)
    total.node = tape.node([y.node], (), lambda g: [g])
    return total


def embedded(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """The embeddings that the ranks found among their rows, combined.

    Learned positions are added to every token of every rank, so these come before the tokens go over the ranks.
    """
    if is_one(sizes.layout.tensor):
        return x
    x = _without_others(tape, x, sizes.rows)
    if sizes.spec.positions.kind != "learned":
        return leave(tape, sizes, x)
    total = _summed(tape, sizes, x)
    total.node = tape.node([x.node], (), lambda g: [g])
    return total


def _without_others(tape: Tape, x: Array, rows: Int) -> Array:
    """Zeros for the tokens whose row another rank has; a byte for each token says which."""
    others = tape.pointwise("bitwise_or", elements=rows, dtype="bool")
    node = tape.node([x.node], (others,), lambda g, others: [tape.pointwise("masked_fill", g, others)])
    y = tape.pointwise("masked_fill", x, others)
    y.node = node
    return y


def scatter(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """This rank's tokens of a stream that every rank has (sequence parallelism)."""
    layout = sizes.layout
    if is_one(layout.tensor) or not layout.sequence_parallel:
        return x
    y = tape.make("clone", "copy", x.view(x.elements // layout.tensor))
    y.node = tape.node([x.node], (), lambda g: [tape.all_gather(tensor_group(sizes), g)])
    return y


def columns_gathered(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """All ranks' columns of x, brought together by a copy; each has its own of the gradient."""
    group, own = tensor_group(sizes), x.elements
    if is_one(group.ranks):
        return x
    y = tape.all_gather(group, x)
    y = tape.make("cat", "copy", y)
    y.node = tape.node([x.node], (), lambda g: [tape.make("clone", "copy", g.view(own))])
    return y


def _summed(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """The sum over the ranks, in new memory."""
    group = tensor_group(sizes)
    return tape.collective("all_reduce", group, x.nbytes, reads=[x], makes=[(x.elements, x.dtype)])[0]


def _gathered(tape: Tape, sizes: Sizes, x: Array, *, overlap: str = "") -> Array:
    """All ranks' tokens; dim 1 of a batch of several sequences is brought together by a copy."""
    y = tape.all_gather(tensor_group(sizes), x, overlap=overlap)
    return _reordered(tape, sizes, y)


def _gathered_at(tape: Tape, sizes: Sizes, path: str, own: Array) -> Array:
    """The same in a backward, at the module path where it was gathered before."""
    before, tape.path = tape.path, path
    whole = _gathered(tape, sizes, own, overlap="compute")
    tape.path = before
    return whole


def _scattered(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """The sum over the ranks of this rank's tokens."""
    x = _reordered(tape, sizes, x)
    return tape.reduce_scatter(tensor_group(sizes), x)


def _reordered(tape: Tape, sizes: Sizes, x: Array) -> Array:
    if is_one(sizes.B):
        return x
    return tape.make("cat", "copy", x)


def vocab_parallel_loss(tape: Tape, sizes: Sizes, logits: Array, targets: Array, *, upcast: bool) -> Array:
    """Mean cross entropy where each rank has some columns of the logits: [N, V] each, and N numbers summed three times.

    Largest logit, sum of exponentials, and the target's log-probability go over the ranks (Shoeybi et al. 2019,
    section 3); written as torch's ``loss_parallel`` runs it. The gradient of loss and softmax is taken in one.
    """
    wide = op.cast(tape, logits, "fp32") if upcast else logits
    del logits
    rows, size, dtype = targets.elements, wide.elements, wide.dtype

    def reduced(name: str, kind: str, x: Array, flops: Int) -> Array:
        """One number of each row, over all ranks."""
        mine = tape.make(name, kind, x, elements=rows, flops=flops)
        return _summed(tape, sizes, mine)

    # torch/distributed/tensor/parallel/loss.py of torch 2.13, _log_softmax: all-reduces of the largest and of the sum.
    largest = reduced("amax", "reduction", wide, size)
    shifted = tape.pointwise("sub", wide, largest)
    del largest
    exponentials = tape.pointwise("exp", shifted)
    sums = tape.sum(exponentials, rows)
    del exponentials
    total = _summed(tape, sizes, sums)
    del sums
    log_total = tape.pointwise("log", total)
    del total
    log_probabilities = tape.pointwise("sub", shifted, log_total)
    del shifted, log_total
    softmax_node = tape.node([wide.node], (log_probabilities,), lambda g, saved: [g])
    del wide
    # _nll_loss_forward there: "an all_reduce happens here", of the log-probability of the target.
    mine = reduced("gather", "embedding", log_probabilities, 0)
    value = tape.sum(mine, 1)
    del mine

    def backward(g: Array, log_probabilities: Array, targets: Array) -> Gradients:
        picked = tape.make("zeros_like", "copy", elements=size, dtype=dtype)
        tape.emit("index_put_", "embedding", reads=[targets, Array(rows, dtype, None)], changes=[picked.view(rows)])
        shares = tape.pointwise("exp", log_probabilities)
        less = tape.pointwise("add", picked, shares)
        del shares
        return [tape.pointwise("mul", less, g)]

    value.node = tape.node([softmax_node], (log_probabilities.view(), targets), backward)
    return op.cast(tape, value, "fp32")
