"""What stands on a rank whatever its micro-batches are: states, gradients and gathered parameters, without a step.

No operation is followed, so this is quick; sizes may be arrays. `ledger.step` has the same figures in an account.
"""

from __future__ import annotations

from trainledger.dtypes import nbytes_in
from trainledger.frozen import frozen
from trainledger.ledger.core.leaves import ModelLeaves
from trainledger.ledger.core.sizes import several, sizes_of
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import HOST, Int
from trainledger.ledger.parallel.micro_batches import Work
from trainledger.ledger.parallel.rank_plan import RankPlan
from trainledger.ledger.step import resident_of
from trainledger.spec.precision import precision_of


@frozen
class StaticMemory:
    """Bytes of a rank by what they are.

    ``resident`` is there before the step, batch and buffers left out (but for weights in 8 bits). ``gradients`` are
    those of all parameters once each has had a backward, ``gathered`` the whole parameters that are held from the first
    forward to the last backward, and ``outside`` else those of them that stand outside the blocks. ``owned`` are the
    elements that its optimizer updates, and ``computed`` those that it computes with, of which ``experts`` are of
    expert ranks.
    """

    resident: Int
    gradients: Int
    gathered: Int
    outside: Int
    owned: Int
    computed: Int
    experts: Int = 0


def static_memory(rank: RankPlan, *, backend: str) -> StaticMemory:
    """What stands on a rank; at least so much is live at some moment of the step."""
    precision = precision_of(rank.run.recipe)
    tape = Tape(precision, backend)
    sizes = sizes_of(rank.run, backend)
    works = tuple(Work(tape, rank, sizes, each) for each in rank.chunks)
    owned = rank.owned
    resident = sum(nbytes for name, nbytes in resident_of(rank, works, owned, 0) if name not in (HOST, "buffers"))
    resident += sum(each.copies_nbytes for each in works)
    outside = sum(_outside(rank, each.leaves) for each in works) if rank.gathers else 0
    whole = rank.gathers and not rank.layout.reshards
    gathered = sum(_gathered(rank, each.leaves) for each in works) if whole else 0
    return StaticMemory(
        resident=resident,
        gradients=sum(_gradients(each) for each in works),
        gathered=nbytes_in(gathered, precision.arriving) if whole else 0,
        outside=0 if whole else nbytes_in(outside, precision.arriving),
        owned=owned.elements(),
        computed=sum(each.leaves.elements() for each in works),
        experts=sum(_experts(rank, each.leaves) for each in works),
    )


def _experts(rank: RankPlan, leaves: ModelLeaves) -> Int:
    """Elements of what other ranks share than all else."""
    groups = rank.by_group(leaves)
    return sum(sum(leaf.elements * n for leaf, n in some) for group, some in groups if group.axes != rank.group.axes)


def _gradients(work: Work) -> Int:
    """Bytes that a chunk's gradients come to beside buffers that are there all the time."""
    if work.buffered:
        return 0
    precision, sharded = work.tape.precision, work.sharded
    if sharded is not None and not sharded.once:
        return nbytes_in(sharded.own_elements(), precision.gradients)
    least = min((precision.gradients, precision.arriving), key=lambda each: nbytes_in(8, each))
    return nbytes_in(work.leaves.elements(), least)


def _gathered(rank: RankPlan, leaves: ModelLeaves) -> Int:
    """Elements of the parameters that several ranks share; experts may be on one rank only."""
    return sum(
        count * sum(leaf.elements * several(rank.group_of(leaf).ranks) for leaf in pattern)
        for pattern, count in leaves.in_order()
    )


def _outside(rank: RankPlan, leaves: ModelLeaves) -> Int:
    """The same of what stands outside the blocks: experts too, where modules behind the blocks have them."""
    every = (*leaves.before.values(), *leaves.after.values())
    return sum(each.elements * several(rank.group_of(each).ranks) for each in every)
