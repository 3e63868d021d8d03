"""Nothing kept but the first block's input: each block's own is made from there again, L (L + 1) / 2 blocks in all.

The other end from keeping everything (Chen et al. 2016, section 4.3, has what lies between). How many blocks run
again depends on the block, so what they cost is gathered: the earlier rounds of a loop are one loop of their own,
before it. Their order differs from that of a run; sums do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trainledger.ledger.core.arithmetic import is_one
from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import BlockLeaves
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.memory.checkpointing import Frame

Blocks = tuple[BlockLeaves, ...]
Round = tuple[str, Int, Blocks]  # the name of a loop, how often it runs, and what runs in it
Run = Callable[[Array, Blocks], Array]


def recompute_from_input(tape: Tape, rounds: Sequence[Round], x: Array, run: Run) -> Array:
    """The output of all rounds; the first one's count is one."""
    start = x
    for number, (_, count, blocks) in enumerate(rounds):
        with tape.loop(f"layers {number}", count):
            for position in range(len(blocks)):
                again = _again(tape, rounds[: number + 1], position, start, run)
                with tape.hooked(Frame(tape, again)):
                    x = run(x, blocks[position : position + 1])
    return x


def _again(tape: Tape, rounds: Sequence[Round], position: int, start: Array, run: Run) -> Callable[[], Array]:
    """Runs a block of the last of some rounds with all that comes before it."""
    *earlier, (name, count, blocks) = rounds

    def again() -> Array:
        x = start
        with tape.forgetting():
            if not is_one(count):
                with _beside(tape, f"{name} again", count * (count - 1) // 2):
                    # What goes into these blocks came out of others, and is there beside the first one's input.
                    held = tape.emit("release", "allocate", makes=[(start.elements, start.dtype)])
                    run(start, blocks)
                    del held
            for number, (_, times, before) in enumerate(earlier):
                if is_one(times):
                    x = run(x, before)
                else:
                    with tape.loop(f"layers {number} again", times):
                        run(x, before)
            x = run(x, blocks[:position])
        return run(x, blocks[position : position + 1])

    return again


@contextmanager
def _beside(tape: Tape, name: str, count: Int) -> Iterator[None]:
    """A loop before the one that is being followed: in the middle of it, it would cut it in two."""
    inside, tape.loop_stack = tape.loop_stack, (*tape.loop_stack[:-1], (name, count))
    until = len(tape.events)
    try:
        yield
    finally:
        tape.loop_stack = inside
        beside, begin = tape.events[until:], until
        while begin and tape.events[begin - 1].facts["loop"][: len(inside)] == inside:
            begin -= 1
        tape.events[begin:] = [*beside, *tape.events[begin:until]]
