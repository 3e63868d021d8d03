"""The loss on a tape: the same expressions as in `engine.nn.loss`, with all logits at once or chunk by chunk.

Sizes: N tokens of a micro-batch, D d_model, V padded vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, Gradients, Leaf
from trainledger.ledger.core.sizes import is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Group, Int
from trainledger.ledger.memory.checkpointing import checkpointed
from trainledger.ledger.ops import operations as op
from trainledger.ledger.rules import FLOPS_PER_ELEMENT
from trainledger.spec.recipe import Recipe

Head = Callable[[Array, Int], Array]  # hidden states and how many tokens they are of, to logits


def loss(
    tape: Tape, recipe: Recipe, x: Array, head: Head, trained: list[Leaf], ids: Array, sequences: Int | None = None
) -> Array:
    """Mean cross entropy in fp32 of normed hidden states, or its sums over each of so many sequences.

    ``trained`` are the head's trained parameters.
    """
    rows = ids.elements
    chunks = recipe.loss.chunks
    if chunks is None:
        compiled = recipe.loss.kind == "compiled" or recipe.of_xla  # XLA compiles it with all else
        of_logits = compiled_cross_entropy if compiled else cross_entropy
        logits = head(x, rows)
        del x
        if recipe.objective.kind in ("reward", "distillation"):  # which compare them themselves
            return logits
        with tape.at("loss"):
            if sequences is not None:
                return _sums(tape, cross_entropy(tape, logits, ids, upcast=recipe.loss.upcast, mean=False), sequences)
            return of_logits(tape, logits, ids, upcast=recipe.loss.upcast)

    def part(x: Array) -> Array:
        targets = Array(rows // chunks, "int64", None)
        with tape.holding("logits and loss"):
            logits = head(x, rows // chunks)
            with tape.at("loss"):
                return cross_entropy(tape, logits, targets, upcast=recipe.loss.upcast, mean=sequences is None)

    if recipe.loss.kind == "fused":
        return _fused(tape, x, part, trained, chunks)
    return _chunked(tape, x, part, chunks, sequences)


def cross_entropy(tape: Tape, logits: Array, targets: Array, *, upcast: bool, mean: bool = True) -> Array:
    """Cross entropy of logits, widened to fp32 or in their own format, of each token or their mean, in fp32."""
    wide = op.cast(tape, logits, "fp32") if upcast else logits
    del logits
    log_probabilities = op.softmax(tape, wide, "_log_softmax")
    elements, dtype = log_probabilities.elements, log_probabilities.dtype
    reads = [log_probabilities, targets]
    makes = [(1 if mean else targets.elements, dtype), (1, dtype)]
    value, weight_sum = tape.emit("nll_loss_forward", "embedding", reads=reads, makes=makes)

    def backward(g: Array, *saved: Array) -> Gradients:
        return [tape.make("nll_loss_backward", "embedding", g, *saved, elements=elements, dtype=dtype)]

    # The gradient is as large as the logits.
    value.node = tape.node([log_probabilities.node], (log_probabilities.view(), targets, weight_sum), backward)
    del log_probabilities, weight_sum, reads
    return op.cast(tape, value, "fp32")


def _sums(tape: Tape, losses: Array, sequences: Int) -> Array:
    """The losses of tokens, added up over each sequence."""
    tokens = losses.elements
    value = tape.sum(losses, sequences)
    value.node = tape.node([losses.node], (), lambda g: [tape.make("clone", "copy", g, elements=tokens)])
    return value


def compiled_cross_entropy(tape: Tape, logits: Array, targets: Array, *, upcast: bool) -> Array:
    """The same under torch.compile: a kernel forward and one backward, both from the logits in their own format."""
    # A row keeps, in addition to its logits, two fp32 numbers: its largest logit and the logarithm of the sum
    # (Inductor, torch 2.13); log-probabilities and what is wider than the logits exist inside of the kernels only.
    elements, rows, count = logits.elements, targets.elements, rules.FLOPS_PER_ELEMENT
    wide, logits_dtype = "fp32" if upcast else logits.dtype, logits.dtype
    makes = [(rows, "fp32"), (rows, "fp32"), (1, wide), (1, "fp32")]
    largest, log_sum, weight_sum, value = tape.emit(
        "cross_entropy",
        "softmax",
        reads=[logits, targets],
        makes=makes,
        flops=count["softmax"] * elements,
        basis="assumed",
    )

    def backward(g: Array, *saved: Array) -> Gradients:
        # The softmax is recomputed, and the targets' places are summed over each row.
        flops = (count["softmax"] + count["softmax backward"]) * elements
        gradient, _ = tape.emit(
            "cross_entropy_backward",
            "softmax",
            reads=[g, *saved],
            makes=[(elements, logits_dtype), (rows, "fp32")],
            flops=flops,
            basis="assumed",
        )
        return [gradient]

    value.node = tape.node([logits.node], (logits, targets, largest, log_sum, weight_sum), backward)
    return value


# Chunk by chunk. The first and the last chunk are separate: what the others share is made by the one and freed by
# the other.


def _rounds(tape: Tape, chunks: Int) -> Iterator[Int]:
    """How often each round comes: the first chunk, those between, the last."""
    yield 1
    if not is_one(chunks):
        if not is_one(chunks - 1):
            yield chunks - 2
        yield 1


@contextmanager
def _repeated(tape: Tape, count: Int) -> Iterator[None]:
    if is_one(count):
        yield
        return
    with tape.loop("chunks", count):
        yield


def _chunked(tape: Tape, x: Array, part: Callable[[Array], Array], chunks: Int, sequences: Int | None) -> Array:
    """Each chunk's logits are recomputed in backward; the gradients of the chunks are joined at the end."""
    counts = list(_rounds(tape, chunks))
    size, elements, dtype = x.elements // chunks, x.elements, x.dtype

    def join(*gradients: Array) -> Gradients:
        for count, gradient in zip(counts, gradients, strict=True):
            if not is_one(count):
                gradient.of_each_round()
        return [tape.make("cat", "copy", Array(elements, dtype, None))]

    ports = tape.fork([x.node], (), join, len(counts))
    losses: list[Array] = []
    for count, port in zip(counts, ports, strict=True):
        with _repeated(tape, count):
            losses.append(checkpointed(tape, lambda own: part(own), x.view(size, port)))
        if not is_one(count):
            losses[-1].of_each_round()
    del x
    if sequences is not None:
        each = losses[0].elements
        joined = tape.make("cat", "copy", Array(each * chunks, "fp32", None))
        joined.node = tape.node([array.node for array in losses], (), lambda g: [g.view(each) for _ in counts])
        return _sums(tape, joined, sequences).of("logits and loss")
    total = _summed(tape, chunks)
    total.node = tape.node([array.node for array in losses], (), lambda g: [g.view() for _ in counts])
    mean = op.divide_by_number(tape, total)
    del losses, total
    return mean.of("logits and loss")


def _summed(tape: Tape, chunks: Int) -> Array:
    """The sum of the chunks' losses."""
    stacked = tape.make("stack", "copy", Array(chunks, "fp32", None))
    return tape.sum(stacked, 1)


def _fused(tape: Tape, x: Array, part: Callable[[Array], Array], trained: list[Leaf], chunks: Int) -> Array:
    """Forward and backward of each chunk at once; backward multiplies by the incoming gradient."""
    size, own = x.elements // chunks, Leaf("chunk", (x.elements // chunks,))
    gradients = [tape.make("empty_like", "allocate", x)]
    losses: list[Array] = []
    for count in (1,) if is_one(chunks) else (1, chunks - 1):
        with _repeated(tape, count):
            value, arrays = _forward_backward(tape, x.view(size, own), part, trained)
            gradient = arrays.pop(own)
            tape.emit("copy_", "copy", reads=[gradient], changes=[Array(size, x.dtype, None)])
            losses.append(value)
            if len(gradients) == 1:
                gradients += [arrays.pop(leaf) for leaf in trained]
            for leaf, total in zip(trained, gradients[1:], strict=True):
                if leaf in arrays:
                    tape.change("add_", total, arrays[leaf])
            del gradient, value
            arrays.clear()
        if not is_one(count):
            losses[-1].of_each_round()
    total = _summed(tape, chunks).of("logits and loss")
    del losses

    def backward(scale: Array) -> Gradients:
        for array in gradients:
            tape.change("mul_", array, scale)
        given: Gradients = [*gradients]
        gradients.clear()
        return given

    total.node = tape.node([x.node, *trained], (), backward)
    return total


def _forward_backward(
    tape: Tape, own: Array, part: Callable[[Array], Array], trained: list[Leaf]
) -> tuple[Array, dict[Leaf, Array]]:
    """A chunk's loss without a graph, and the gradients of the chunk and the head's parameters."""
    with tape.apart() as arrays:
        for leaf in reversed(trained):  # a linear layer casts its bias before its weight
            cast = tape.cast_of(leaf)
            if cast is not None:  # made by an earlier chunk: the gradient of each goes back through it
                cast.node = tape.node([leaf], (), op.back_to(tape, leaf.dtype))
        value = op.divide_by_number(tape, part(own))
        seed = tape.make("ones_like", "copy", value)
        tape.start(value, seed)
        tape.backward(path=tape.path)
        value.node = None
        return value, dict(arrays)


def with_loss(tape: Tape, y: Array, loss: Array) -> Array:
    """y unchanged; its backward also starts that of the loss."""

    def backward(g: Array) -> Gradients:
        if tape.precision.loss_scaling:
            return [g, tape.pointwise("div", Array(1, "fp32", None))]
        return [g, tape.make("full", "copy", elements=1, dtype="fp32")]

    return y.view(node=tape.node([y.node, loss.node], (), backward))


# Megatron-LM's own functions, where they keep and make other arrays than PyTorch's


def megatron_cross_entropy(tape: Tape, logits: Array, targets: Array, group: Group, *, compiled: bool) -> Array:
    """Mean cross entropy of [N, V] logits whose columns may be on several ranks.

    An fp32 copy of the logits becomes their exponentials, their softmax and their gradient in place, one after the
    other; the logits themselves live to the end of the forward (Megatron-LM, core/tensor_parallel/cross_entropy.py).
    ``compiled`` (--cross-entropy-loss-fusion): the compiler writes the exponentials to separate memory, and gives
    the gradient in the logits' format (core/fusions/fused_cross_entropy.py).
    """
    rows, size = targets.elements, logits.elements

    def over_ranks(x: Array) -> Array:
        tape.all_reduce(group, x)
        return x

    wide = tape.cast(logits, "fp32")
    largest = over_ranks(tape.make("max", "reduction", wide, elements=rows, flops=size))
    tape.change("sub_", wide, largest)
    del largest
    others = tape.pointwise("bitwise_or", elements=rows, dtype="bool")
    places = tape.make("sub", "elementwise", targets, elements=rows, flops=rows)
    predicted = over_ranks(tape.make("index", "embedding", Array(rows, "fp32", None), places, elements=rows))
    if compiled:
        wide = tape.pointwise("exp", wide)
    else:
        tape.change("exp_", wide)
    sums = over_ranks(tape.sum(wide, rows))
    logarithm = tape.pointwise("log", sums)
    tape.change("div_", wide, sums)
    losses = tape.pointwise("sub", logarithm, predicted)
    del logarithm, predicted, sums
    dtype = logits.dtype

    def backward(g: Array, wide: Array, others: Array, places: Array) -> Gradients:
        tape.emit("index_put_", "embedding", reads=[places, others], changes=[wide.view(rows)])
        if compiled:
            return [tape.pointwise("mul", wide, g, dtype=dtype)]
        tape.change("mul_", wide, g)
        return [wide]

    losses.node = tape.node([logits.node], (wide, others, places), backward, formats=() if compiled else [dtype])
    del wide, others, places, logits
    return _mean_of_tokens(tape, losses, rows)


def megatron_cross_entropy_in_place(tape: Tape, logits: Array, targets: Array, group: Group) -> Array:
    """The same by Transformer Engine's kernels, which write the gradient over the logits, in their dtype."""
    # (transformer_engine/common/triton/cross_entropy.py.) The ranks combine three numbers of each row.
    rows, size = targets.elements, logits.elements
    counted = FLOPS_PER_ELEMENT["softmax"] * size
    (array,) = tape.emit(
        "online_softmax", "softmax", reads=[logits, targets], makes=[(3 * rows, "fp32")], flops=counted, basis="assumed"
    )
    if not is_one(group.ranks):
        array = tape.all_gather(group, array)
    (losses,) = tape.emit("cross_entropy", "softmax", reads=[array, targets], changes=[logits], makes=[(rows, "fp32")],
                          flops=2 * size, basis="assumed")  # fmt: skip
    del array

    def backward(g: Array, logits: Array) -> Gradients:
        tape.change("mul_", logits, g)
        return [logits]

    losses.node = tape.node([logits.node], (logits,), backward)
    del logits
    return _mean_of_tokens(tape, losses, rows)


def swiglu(tape: Tape, gate: Array, up: Array, weights: Array | None = None) -> Array:
    """silu(gate) * up in one kernel, which keeps both and nothing between (core/fusions/fused_bias_swiglu.py).

    ``weights`` are multiplied in, one for each row.
    """
    elements, scales = gate.elements, [] if weights is None else [weights]

    def backward(g: Array, *saved: Array) -> Gradients:
        makes = [(elements, gate_dtype), (elements, gate_dtype), *((size, gate_dtype) for size in sizes)]
        return list(tape.emit("swiglu_backward", "elementwise", reads=[g, *saved], makes=makes, flops=8 * elements))

    gate_dtype, sizes = gate.dtype, [scale.elements for scale in scales]
    node = tape.node([gate.node, up.node, *(scale.node for scale in scales)], (gate, up, *scales), backward)
    y = tape.make("swiglu", "elementwise", gate, up, *scales, elements=elements, flops=5 * elements)
    y.node = node
    return y


def _mean_of_tokens(tape: Tape, losses: Array, rows: Int) -> Array:
    """The losses of a micro-batch times the mask, over its tokens."""
    value = tape.sum(losses, 1)
    value.node = tape.node([losses.node], (), lambda g: [tape.make("expand", "copy", g, elements=rows)])
    del losses
    return op.divide_by_number(tape, value)
