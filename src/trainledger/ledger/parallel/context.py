"""Attention over tokens on several ranks, on a tape.

ring: each rank keeps its queries, and keys and values go round (Liu et al. 2023, Ring Attention); with an early and a
late part of the sequence on every rank all have the same work under a causal mask (zigzag). The parts' outputs are
joined by their logsumexp as they come. all-to-all: inside attention each rank has all tokens for a part of the heads
(Jacobs et al. 2023, DeepSpeed-Ulysses). FLOPs are dense, as for one rank: queries of a rank against all keys. Of those
pairs a ring leaves out masked halves of blocks (`left_out`), as a causal kernel does inside of its own.

Sizes: T tokens of this rank, C ranks, H query heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from trainledger.ledger.core.graph import Array, Gradients
from trainledger.ledger.core.sizes import Sizes, between, greater, is_one, several
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import COMMUNICATION, Group, Int
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.layout import Layout
from trainledger.spec.parts import with_fields

Core = Callable[[Sizes, Array, Array, Array, Int], Array]  # sizes, q, k, v and how many tokens are attended to


def attend_over_ranks(tape: Tape, sizes: Sizes, q: Array, k: Array, v: Array, core: Core) -> Array:
    """The attention of each query over the values of all ranks; ``core`` is the attention of one rank."""
    if sizes.layout.context_kind == "ring":
        return _around_the_ring(tape, sizes, q, k, v, core)
    ranks, spec = sizes.layout.context, sizes.spec
    heads = {
        "attention.n_heads": spec.attention.n_heads // ranks,
        "attention.n_kv_heads": None if spec.latent else spec.kv_heads // ranks,
        "attention.head_dim": None if spec.latent else spec.head_size,
    }
    inside = replace(sizes, T=sizes.T * ranks, spec=with_fields(spec, heads))
    q, k, v = (_heads_for_tokens(tape, sizes, array, to_heads=True) for array in (q, k, v))
    return _heads_for_tokens(tape, sizes, core(inside, q, k, v, inside.T), to_heads=False)


def context_group(sizes: Sizes) -> Group:
    return Group("context", sizes.layout.context)


def left_out(layout: Layout) -> Fraction:
    """The share of masked query-key pairs that a ring's ranks skip in whole blocks.

    >>> left_out(Layout(context=2)), left_out(Layout(context=2, context_kind="all-to-all"))
    (Fraction(1, 4), Fraction(0, 1))
    """
    if layout.context_kind != "ring":
        return Fraction(0)
    return Fraction(layout.context - 1, 2 * layout.context)


def exchanged(tape: Tape, group: Group, x: Array, elements: Int | None = None) -> Array:
    """Every rank gives every other its part of x and gets as much, or ``elements``; backward the other way."""
    arriving, leaving = x.elements if elements is None else elements, x.elements

    def sent(x: Array, elements: Int) -> Array:
        payload = greater(x.nbytes, nbytes_in(elements, x.dtype))
        makes = [(elements, x.dtype)]
        return tape.collective("all_to_all", group, payload, reads=[x], makes=makes, basis="assumed")[0]

    y = sent(x, arriving)
    y.node = tape.node([x.node], (), lambda g: [sent(g, leaving)])
    return y


def _heads_for_tokens(tape: Tape, sizes: Sizes, x: Array, *, to_heads: bool) -> Array:
    """A part of the heads for all tokens, or back, with copies: heads are inside of tokens, messages' parts outside."""
    # Tokens of one sequence are contiguous as sent or read, those of several are not.

    def sent(x: Array, to_heads: bool) -> Array:
        group, makes = context_group(sizes), [(x.elements, x.dtype)]
        x = tape.make("clone", "copy", x) if to_heads else _of_several(tape, sizes, x)
        (y,) = tape.collective("all_to_all", group, x.nbytes, reads=[x], makes=makes, basis="assumed")
        del x
        return _of_several(tape, sizes, y) if to_heads else tape.make("clone", "copy", y)

    y = sent(x, to_heads)
    y.node = tape.node([x.node], (), lambda g: [sent(g, not to_heads)])
    return y


def _of_several(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """A copy where there are several sequences; of an array of layouts, in those where there are."""
    if is_one(sizes.B):
        return x
    if not hasattr(sizes.B, "shape"):
        return tape.make("clone", "copy", x)
    with tape.loop("sequences", several(sizes.B)):
        return tape.make("clone", "copy", x)


def _around_the_ring(tape: Tape, sizes: Sizes, q: Array, k: Array, v: Array, core: Core) -> Array:
    """One block of keys and values is here, the next one is on its way; backward their gradients go along."""
    # The kernel of all rounds is one entry. Each further rank's block makes a part as large as what is joined, or of
    # half of the queries or of the keys: memory is that of the rank for which it is most.
    group, ranks = context_group(sizes), sizes.layout.context
    queries, elements, dtype = q.elements, k.elements + v.elements, k.dtype  # what follows must not keep the arrays
    rows = sizes.rows * sizes.spec.attention.n_heads
    wide = "fp32" if dtype != "fp32" else ""

    def buffers(count: Int) -> Array:
        return tape.make("empty", "allocate", elements=elements * count, dtype=dtype, category=COMMUNICATION)

    def rounds(count: Int) -> Array:
        coming = buffers(1)
        with tape.loop("ring", count):
            block = Array(elements, dtype, None)
            tape.collective("send", group, block.nbytes, reads=[block], overlap="compute")
            tape.collective("recv", group, block.nbytes, changes=[coming], overlap="compute")
        return coming

    def packed() -> Array:
        block = Array(elements, dtype, None)
        return tape.make("cat", "copy", block, category=COMMUNICATION)

    held: list[Array] = []

    def before(g: Array) -> Gradients:
        packed()
        held.append(rounds(ranks - 1))
        held.append(rounds(ranks))  # the gradients of keys and values, which end where they belong
        held.append(buffers(between(ranks - 1, 1, 2)))  # sums that are sent, and of three ranks the block that comes
        part = greater(queries // 2, queries - elements // 2)
        held.append(tape.make("empty", "allocate", elements=rows // 2, dtype="fp32"))  # logsumexps of half of them
        held.append(tape.make("empty", "allocate", elements=part, dtype=dtype))
        return [g]

    def after(*gradients: Array) -> Gradients:
        part = held.pop()
        with tape.loop("ring", ranks - 1):
            tape.change("add_", gradients[0].view(part.elements), part)
            tape.change("add_", held[0].view(), gradients[1], gradients[2])
        held.clear()
        return list(gradients)

    def join(y: Array) -> None:
        """The mixtures over each further block's keys, by their logsumexps; in fp32."""
        sums = tape.make("_to_copy", "copy", y, dtype=wide) if wide else y
        with tape.loop("ring", ranks - 1):
            part = tape.make("empty", "allocate", elements=y.elements, dtype=dtype)
            share = tape.make("sigmoid", "elementwise", elements=rows, dtype="fp32")
            tape.change("lerp_", sums, part, share)
            del part, share
        if wide:
            tape.emit("_to_copy", "copy", reads=[sums], changes=[y])

    ports = tape.fork([q.node, k.node, v.node], (), after, 3)
    q, k, v = (array.view(node=port) for array, port in zip((q, k, v), ports, strict=True))
    own, coming = packed(), rounds(ranks - 1)
    y = core(sizes, q, k, v, sizes.T * ranks)
    del own
    further = buffers(between(ranks - 2, 0, 1))
    join(y)
    del coming, further
    whole = y.view()
    whole.node = tape.node([y.node], (), before)
    return whole
