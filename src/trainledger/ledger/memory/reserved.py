"""Memory that a program's allocator reserves and no live tensor has, by framework.

Blocks of a stream serve no other stream, and segments are never joined (c10/cuda/CUDACachingAllocator.cpp): such blocks
stay reserved even when nothing in them is live.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.ledger.entry import Amounts, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.parallel.pipeline import in_flight
from trainledger.ledger.parallel.rank_plan import RankPlan
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.units import ceil_div

BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size by default


def reserved(rank: RankPlan, ledger: Ledger, *, backend: str) -> Amounts:
    """What the rank's framework reserves on an accelerator in addition to the ledger's peak, by its cause."""
    if backend == "cpu" or rank.layout.alone:
        return ()
    if rank.run.recipe.framework == "deepspeed":  # whose requests are ordered by size, so that they are one run's
        known = isinstance(ledger.parameters, int) and rank.layout.zero == 1
        return tuple(_deepspeed(rank, ledger)) if known else ()
    if rank.run.recipe.framework == "torch" and rank.gathers and rank.layout.reshards:
        return tuple(_fsdp2(rank, ledger))
    return ()


def _fsdp2(rank: RankPlan, ledger: Ledger) -> Iterator[tuple[str, Int]]:
    """Buffers that FSDP2 allocates in separate streams (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).

    The flat buffer of the first gather, of parameters outside the blocks, in the copy-in stream; the shards of
    gradients in the stream of the reduce-scatter; and the logits in 16 bits, freed before backward, whose block is too
    small for the fp32 gradient.
    """
    run, precision = rank.run, rank.run.recipe.precision
    outside = sum(leaf.elements for chunk in rank.chunks for leaf in chunk.leaves.outside if leaf.decayed)
    gathered = nbytes_in(outside, precision.arriving)
    shards = nbytes_in(ledger.parameters, precision.gradients)
    logits: Int = 0
    if run.recipe.loss.kind == "full" and precision.low and rank.chunks[-1].chunk.ends:
        logits = nbytes_in(run.device_batch * run.recipe.seq_len * run.model.padded_vocab, precision.compute)
    yield "FSDP2's streams", gathered + shards + logits


def _deepspeed(rank: RankPlan, ledger: Ledger) -> Iterator[tuple[str, int]]:
    """Memory of DeepSpeed's pipeline engine and ZeRO-1 optimizers of 2022 (deepspeed/runtime); not of ZeRO-2 and 3."""
    run, recipe, layout = rank.run, rank.run.recipe, rank.layout
    last, first = rank.chunks[-1].chunk.ends, rank.chunks[0].chunk.begins
    activation = nbytes_in(run.device_batch * recipe.seq_len * run.model.d_model, recipe.precision.compute)
    flying = int(in_flight(layout, rank.stage, run.grad_accum))
    # runtime/pipe/engine.py keeps pipe_buffers["outputs"] until their backward, and runs forward on clones of inputs.
    yield "DeepSpeed's pipeline buffers", int(flying * activation * ((not last) + (not first)))
    parameters = int(ledger.parameters)
    embedding = run.model.padded_vocab * run.model.d_model
    matrix = run.model.feed_forward.d_ff * run.model.d_model
    if recipe.precision.gradient_buffers:
        # runtime/bf16_optimizer.py adds 16-bit gradients to fp32 ones after a stage's backward, and lets them go before
        # the next one (clear_lp_grads=False); update_hp_grads casts one parameter at a time.
        yield "DeepSpeed's gradients", 2 * parameters + 4 * embedding
        return
    own = ceil_div(parameters, layout.shard_ranks)
    states = sum(int(nbytes) for name, nbytes in ledger.resident if name in ("parameters", "optimizer state"))
    # zero/stage_1_and_2.py makes its own fp32 gradients once before any activation (initialize_optimizer_states).
    beside = max(0, states + 2 * parameters + 4 * own - int(peak_nbytes(ledger)))
    largest = max(min(embedding, own), min(matrix, own))
    counted = largest if first else min(matrix, own)
    requests = [
        (2 * min(BUCKET, parameters),),  # reduce_bucket_size, flattened: contiguous_gradients is off in stage 1
        (4 * largest,),  # has_overflow: x.float().sum() of each gradient
        (8 * counted,),  # get_grad_norm_direct: g.data.double().norm(2), but for the last stage's tied embedding
        (2 * own, 4 * own),  # step: the gradients of its own piece, flat, and that in fp32
    ]
    yield "DeepSpeed's gradients", beside + new_segments([4 * own], requests)


def new_segments(free: list[int], requests: list[tuple[int, ...]]) -> int:
    """Bytes that the caching allocator takes from the driver for large requests, one tuple alive at a time.

    It gives the smallest free block that is large enough, split, and else takes a new segment; segments are never
    joined. ``free`` are the large blocks at the beginning.

    >>> new_segments([10], [(4,), (12,), (6, 10)])
    12
    """
    segments, taken = list(free), 0
    for together in requests:
        rest = list(segments)  # all of a segment is free again when nothing of it is in use
        for nbytes in together:
            able = [index for index, each in enumerate(rest) if each >= nbytes]
            if able:
                rest[min(able, key=rest.__getitem__)] -= nbytes
            else:
                segments.append(nbytes)
                rest.append(0)
                taken += nbytes
    return taken
