"""Recomputation and offloading on a tape: the same as `engine.nn.checkpointing`, with sizes instead of tensors.

Both are hooks of the tape. As in torch's non-reentrant checkpoint the second run stops as soon as the last saved array
exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from trainledger.ledger.core.graph import Array, BlockLeaves, GatheredAgain, Saved, as_kept
from trainledger.ledger.core.recording import Hook
from trainledger.ledger.core.sizes import is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import HOST, BlockRun, Event, Int
from trainledger.spec.savings import keeper


class _EnoughRecomputed(Exception):  # noqa: N818
    """Raised when everything that the block's backward needs exists again."""


class Frame(Hook):
    """A checkpointed part: its forward keeps only its input, its backward first runs the part again.

    The outputs of operations in ``keep`` are kept as well, and not recomputed.
    """

    def __init__(
        self, tape: Tape, again: Callable[[], object], keep: tuple[str, ...] = (), offload: tuple[str, ...] = ()
    ) -> None:
        self.tape = tape
        self.again = again  # and with it the input, which lives until the last backward of the part is over
        self.frees_before_sums = True
        self.expected = 0
        self.arrays: list[Saved | None] = []
        self.collecting = False
        self._blocks: list[BlockRun] = []  # that run in it
        self._repeated: Iterator[BlockRun] = iter(())
        self._keep = keep
        self._keeps, self._sends = keeper(keep), keeper(offload)
        self._kept: dict[str, list[list[Array]]] = {}

    def saved(self, arrays: tuple[Array, ...]) -> int:
        """Called for each node that saves something: the first run counts them, the second collects what they save."""
        if not self.collecting:
            self.expected += 1
            return self.expected - 1
        self.arrays.append(as_kept(arrays))
        if len(self.arrays) == self.expected:
            # torch/utils/checkpoint.py raises _StopRecomputationError there; set_checkpoint_early_stop is on by default
            # (2.13).
            raise _EnoughRecomputed
        return len(self.arrays) - 1

    def recall(self, name: str) -> list[Array] | None:
        """In the second run, what the first one kept of this operation's output."""
        if not self.collecting:
            return None
        if self._sends(name, self.tape.path):
            kept = self._kept[name].pop(0)
            return [self.tape.moved("to_device", array, "scratch", overlap="compute") for array in kept]
        return self._kept[name].pop(0) if self._keeps(name, self.tape.path) else None

    def emitted(self, event: Event, reads: Sequence[Array], changes: Sequence[Array], made: Sequence[Array]) -> None:
        """In the first run, keep an operation's output where that is asked for."""
        name, path = event.facts["name"], event.facts["path"]
        if self.collecting:
            return
        if self._sends(name, path):
            sent = [self.tape.moved("to_host", array, HOST, overlap="compute") for array in made]
            self._kept.setdefault(name, []).append(sent)
        elif self._keeps(name, path):
            self._kept.setdefault(name, []).append([array.view() for array in made])
            for one in self._blocks:
                one.recalled.update(id(array.memory.record) for array in made if array.memory is not None)

    def entering_block(self, run: BlockRun) -> BlockRun:
        """In the second run, the blocks of the first one after the other."""
        if self.collecting:
            return next(self._repeated, run)
        run.checkpointed = True
        self._blocks.append(run)
        return run

    def unpacked(self, packed: int) -> Saved:
        """What the node saves in the second run, which begins when it is first asked for."""
        index = packed
        if not self.collecting:
            self.collecting = True
            self._repeated = iter(self._blocks)
            self._keeps = keeper(self._keep)
            with self.tape.recomputing(self), suppress(_EnoughRecomputed):
                self.again()
        arrays = self.arrays[index]
        self.arrays[index] = None
        assert arrays is not None
        return arrays


def checkpointed(
    tape: Tape,
    run: Callable[..., Array],
    *inputs: Array,
    keep: tuple[str, ...] = (),
    offload: tuple[str, ...] = (),
    on_host: bool = False,
) -> Array:
    """The output of ``run(*inputs)``, of which only the inputs are kept, or copies of them ``on_host``.

    Operations of ``keep`` keep their outputs too, those of ``offload`` in host memory.
    """
    if not tape.graph:
        return run(*inputs)
    frame = Frame(tape, lambda: run(*inputs), keep, offload)
    if not on_host:
        with tape.hooked(frame):
            return run(*inputs)
    # XLA sends them while the block computes, and fetches them while the block after it runs backward.
    nodes = [array.node for array in inputs]
    copies = [tape.moved("to_host", array, HOST, overlap="compute") for array in inputs]

    def from_host() -> Array:
        back = [tape.moved("to_device", array, "scratch", overlap="compute") for array in copies]
        return run(*(array.view(node=node) for array, node in zip(back, nodes, strict=True)))

    frame.again = from_host
    with tape.hooked(frame):
        return run(*inputs)


class Offload(Hook):
    """Moves what the graph saves to host memory and back, each array as often as it is saved.

    Parameters, their low-precision copies, buffers and what is in ``shared`` stay: they are there anyway.
    """

    def __init__(self, tape: Tape, shared: Iterable[Array]) -> None:
        self.tape = tape
        self._shared = {id(array.memory) for array in shared}

    def saved(self, arrays: tuple[Array, ...]) -> Saved:
        """Copies in host memory, made one after the other."""
        # torch.autograd.graph.save_on_cpu (2.13) packs what each node saves by itself, and does not know of other
        # nodes.
        return tuple(self._one(each, "to_host", HOST) for each in as_kept(arrays))

    def unpacked(self, packed: Saved) -> Saved:
        """Copies on the device again."""
        return tuple(self._one(each, "to_device", "scratch") for each in packed)

    def _one(self, saved: Array | GatheredAgain, name: str, category: str) -> Array | GatheredAgain:
        if not isinstance(saved, GatheredAgain):
            return self._moved(saved, name, category)
        if saved.moved != name:  # the part goes once, however many nodes save it
            saved.part, saved.moved = self._moved(saved.part, name, category), name
        return saved

    def _moved(self, array: Array, name: str, category: str) -> Array:
        if array.memory is None or id(array.memory) in self._shared:
            return array
        if array.memory.record.cached or array.memory.record.of_parameter:
            return array
        return self.tape.moved(name, array, category)


Blocks = tuple[BlockLeaves, ...]
Round = tuple[str, Int, Blocks]  # the name of a loop, how often it runs, and what runs in it
Run = Callable[[Array, Blocks], Array]


def recompute_from_input(tape: Tape, rounds: Sequence[Round], x: Array, run: Run) -> Array:
    """The output of all rounds, nothing kept but the first block's input: every block recomputes from there."""
    # That runs L (L + 1) / 2 blocks in all, the other extreme to keeping everything (Chen et al. 2016, section 4.3, has
    # the cases between). How many blocks are recomputed depends on the block, so their cost is gathered: the earlier
    # rounds of a loop are a separate loop, before it. Their order differs from that of a run; sums do not. The first
    # round's count is one.
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
                    # The inputs of these blocks are outputs of others, and exist together with the first one's input.
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
    """A loop before the one that is being followed: inside of it, it would split it."""
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
