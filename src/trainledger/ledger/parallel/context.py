"""Attention over tokens that lie on several ranks, on a tape.

ring: each rank keeps its queries, and keys and values go round (Liu et al. 2023, Ring Attention); with an early and a
late part of the sequence on every rank all have the same work under a causal mask (zigzag). The parts' outputs are
joined by their logsumexp as they come. all-to-all: inside attention each rank has all tokens for a part of the heads
(Jacobs et al. 2023, DeepSpeed-Ulysses). FLOPs are dense, as for one rank: queries of a rank against all keys.

Sizes: T tokens of this rank, C ranks, H query heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainledger.ledger.core.graph import Array, Gradients
from trainledger.ledger.core.record import COMMUNICATION, Group
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.spec.parts import with_fields

Core = Callable[[Sizes, Array, Array, Array, Int], Array]  # sizes, q, k, v and how many tokens are attended to


def attend_over_ranks(tape: Tape, sizes: Sizes, q: Array, k: Array, v: Array, core: Core) -> Array:
    """Each query's mixture of the values of all ranks; ``core`` is the attention of one rank."""
    if sizes.layout.context_kind == "ring":
        return _around_the_ring(tape, sizes, q, k, v, core)
    ranks, spec = sizes.layout.context, sizes.spec
    heads = {
        "attention.n_heads": spec.attention.n_heads // ranks,
        "attention.n_kv_heads": None if spec.latent else spec.kv_heads // ranks,
        "attention.head_dim": None if spec.latent else spec.head_size,
    }
    inside = replace(sizes, T=sizes.T * ranks, spec=with_fields(spec, heads))
    q, k, v = (exchanged(tape, context_group(sizes), each) for each in (q, k, v))
    return exchanged(tape, context_group(sizes), core(inside, q, k, v, inside.T))


def context_group(sizes: Sizes) -> Group:
    return Group("context", sizes.layout.context)


def exchanged(tape: Tape, group: Group, x: Array) -> Array:
    """Every rank gives every other its part of x and gets as much; backward the other way."""

    def sent(x: Array) -> Array:
        makes = [(x.elements, x.dtype)]
        return tape.collective("all_to_all", group, x.nbytes, reads=[x], makes=makes, basis="assumed")[0]

    y = sent(x)
    y.node = tape.node([x.node], (), lambda g: [sent(g)])
    return y


def _around_the_ring(tape: Tape, sizes: Sizes, q: Array, k: Array, v: Array, core: Core) -> Array:
    """One block of keys and values is here, the next one is on its way; backward their gradients go along."""
    group, ranks = context_group(sizes), sizes.layout.context
    elements, dtype = k.elements + v.elements, k.dtype

    def rounds(count: Int) -> Array:
        (coming,) = tape.emit("empty", "allocate", makes=[(elements, dtype)], category=COMMUNICATION)
        with tape.loop("ring", count):
            block = Array(elements, dtype, None)
            tape.collective("send", group, block.nbytes, reads=[block], overlap="compute")
            tape.collective("recv", group, block.nbytes, changes=[coming], overlap="compute")
        return coming

    held: list[Array] = []

    def after(*gradients: Array) -> Gradients:
        held.clear()
        return list(gradients)

    def before(g: Array) -> Gradients:
        held.append(rounds(ranks - 1))
        held.append(rounds(ranks))  # the gradients of keys and values, which end where they belong
        return [g]

    ports = tape.fork([q.node, k.node, v.node], (), after, 3)
    q, k, v = (each.view(node=port) for each, port in zip((q, k, v), ports, strict=True))
    coming = rounds(ranks - 1)
    y = core(sizes, q, k, v, sizes.T * ranks)
    del coming
    whole = y.view()
    whole.node = tape.node([y.node], (), before)
    return whole
