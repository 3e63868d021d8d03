"""The micro-batches of a pipeline's schedule: how many are in flight.

Sizes: P stages, S the stage counted from 0, V chunks of layers on each rank, M micro-batches of a step.
"""

from __future__ import annotations

from trainledger.ledger.core.sizes import between, smaller
from trainledger.ledger.entry import Int
from trainledger.spec.layout import Layout, overlaps


def in_flight(layout: Layout, stage: int, micro_batches: Int) -> Int:
    """Forwards of a chunk that a stage has run before its first backward is over, that one's included.

    Each counts as much as before its backward; what waits in a zero-bubble pipeline keeps more in torch 2.13.

    >>> [in_flight(Layout(pipeline=4), stage, 8) for stage in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(Layout(pipeline=4, schedule="interleaved", virtual_stages=2), stage, 8) for stage in range(4)]
    [11, 9, 7, 5]
    """
    stages = layout.pipeline
    if stages == 1:
        return 1
    if layout.schedule == "gpipe":
        # All M (Huang et al. 2019, GPipe).
        return micro_batches
    if layout.schedule == "interleaved":
        # 2 (P - S - 1) + (V - 1) P + 1 chunks, as Megatron-LM's schedules.py has it (num_warmup_microbatches, and the
        # one that runs); one more where forwards run together with backwards (overlap has "experts").
        chunks = layout.virtual_stages
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + overlaps(layout, "experts")
        return smaller(ahead + 1, micro_batches * chunks)
    # 1f1b: P - S (Narayanan et al. 2019, PipeDream-Flush). zero-bubble, as ZB-H1: P on every stage, since the weights'
    # part of a backward waits there (Qi et al. 2023, section 3). In torch 2.13 the first part frees nothing and leaves
    # gradients for the second (tests/engine/train/test_pipeline_witness.py measures what that keeps).
    return smaller(stages if layout.schedule == "zero-bubble" else stages - stage, micro_batches)


def in_flight_by_chunk(layout: Layout, stage: int, micro_batches: Int) -> tuple[Int, ...]:
    """The same with the chunk: forwards take P micro-batches of one chunk, then P of the next.

    >>> in_flight_by_chunk(Layout(pipeline=4, schedule="interleaved", virtual_stages=2), 0, 8)
    (7, 4)
    """
    total, stages, chunks = in_flight(layout, stage, micro_batches), layout.pipeline, layout.virtual_stages
    rounds, rest = total // (stages * chunks), total % (stages * chunks)
    return tuple(rounds * stages + between(rest - chunk * stages, 0, stages) for chunk in range(chunks))


def rounds_of(layout: Layout, stage: int, micro_batches: Int) -> dict[str, Int]:
    """How often each loop over micro-batches runs (`run_micro_batches` has them)."""
    *earlier, last = in_flight_by_chunk(layout, stage, micro_batches)
    rounds = {"in flight": last - 1, "micro-batches": micro_batches - last}
    for index, count in enumerate(earlier):
        rounds |= {f"in flight {index}": count, f"micro-batches {index}": micro_batches - count}
    return rounds
