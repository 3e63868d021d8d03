"""What one device needs for one micro-batch, layer by layer: bytes and seconds of many shapes at once.

The figures are read off the closed-form ledger of a single forward and backward of the whole model, in which the sizes
of tensor, context and expert ranks and of the micro-batch are arrays. What decides which operations run (whether ranks
are one or more, what is recomputed, whether parameters are gathered) takes an account of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

from trainledger.dtypes import nbytes_in
from trainledger.frozen import frozen
from trainledger.ledger.core.arithmetic import summed
from trainledger.ledger.core.sizes import sizes_of
from trainledger.ledger.entry import HOST, Entry, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.step import follow
from trainledger.plan.layouts.grid import Shape, runs_of
from trainledger.plan.layouts.times import Times
from trainledger.predict.kernel import larger
from trainledger.spec.layout import Layout, overlaps
from trainledger.spec.precision import precision_of
from trainledger.spec.run import Run

_SHARING = ("shard", "shard x context", "replicate", "shard / expert", "shard x context / expert")
_MOVING = ("activations", "logits and loss", "scratch", "communication")
COMMUNICATION = "communication"


@frozen
class PartCosts:
    """What one layer, or what stands before or after all, needs for a micro-batch.

    ``kept`` bytes wait for the backward. ``most`` is what is live beside all that is kept while the backward runs,
    ``quiet`` the same without what is gathered and reduced, ``again`` that while it runs again and has no gradient of a
    weight yet; a layer's begin with the gradient of its output. What the head keeps includes what the last layer keeps
    otherwise than those before it; what it has ``left`` stays to the end of the backward, beside the gradient that came
    for the last layer's output. Seconds: ``weights`` is the part of ``backward`` that only gradients of weights need;
    ``unpack`` and ``pack`` copy out of what was gathered and into what is reduced, beside ``forward`` and
    ``backward``; ``launch`` and ``launch_back`` are what the program needs to launch those two; ``sends`` and
    ``sends_back`` are the seconds of them in which tokens go to experts and back.
    """

    kept: Any = 0.0
    most: Any = 0.0
    quiet: Any = 0.0
    again: Any = 0.0
    left: Any = 0.0
    forward: Any = 0.0
    backward: Any = 0.0
    weights: Any = 0.0
    unpack: Any = 0.0
    pack: Any = 0.0
    launch: Any = 0.0
    launch_back: Any = 0.0
    sends: Any = 0.0
    sends_back: Any = 0.0


COLUMNS = tuple(each.name for each in fields(PartCosts))
SECONDS = ("forward", "backward", "weights", "unpack", "pack", "launch", "launch_back", "sends", "sends_back")


@frozen
class BlockCosts:
    """The pieces of some shapes, each an array with an element for each of them.

    ``layers`` are those of a layer of each run of `runs_of`. ``stream`` are the bytes that go from one stage to the
    next, ``received`` what a layer keeps of them. ``gather`` and ``reduce`` are bytes of a layer's parameters and
    gradients that go over the ranks that share them for a micro-batch, where that is done block by block: of experts
    the second, of all others the first.
    """

    before: PartCosts
    layers: tuple[PartCosts, ...]
    after: PartCosts
    stream: Any
    received: Any
    gather: tuple[tuple[Any, Any], ...]
    reduce: tuple[tuple[Any, Any], ...]


class _Once(Run):
    """A run with a single micro-batch, whatever its sizes."""

    @property
    def grad_accum(self) -> Any:
        return 1


def class_of(shape: Shape) -> tuple[Any, ...]:
    """What decides which operations run; shapes that agree in it go into one account."""
    several = shape.micro_batch > 1 and shape.sequence_parallel  # then tokens are brought together by copies
    return (
        shape.tensor > 1, shape.sequence_parallel, shape.context > 1, shape.context_kind, shape.expert > 1, several,
        shape.checkpointing,
    )  # fmt: skip


def block_costs(run: Run, shapes: Sequence[Shape], times: Times | None, *, gathers: bool, backend: str) -> BlockCosts:
    """The pieces of shapes of one class; ``gathers`` says that parameters are gathered block by block."""
    local = _with_arrays(run, shapes, gathers)
    rank = rank_plan(local)
    ledger = follow(rank, backend=backend)
    leaves = rank.chunks[0].leaves
    blocks = [len(each.blocks) for each in leaves.segments]
    counts = [each.count for each in leaves.segments]
    sizes = sizes_of(rank.run, backend)
    stream = nbytes_in(sizes.stream_rows * sizes.spec.d_model, precision_of(local.recipe).stream)
    which = _main_segments(runs_of(run), blocks, counts)
    hidden = ("tensor",) if overlaps(run.layout, "tensor") else ()
    segments = shapes[0].checkpointing == "segments"
    found = _Reader(ledger, times, local.layout, stream, which, hidden, blocks, segments).read()
    size = len(shapes)
    layers, gather, reduce = list[PartCosts](), [], []
    for index in which:
        work, of = found.loops[index], blocks[index]
        shares = {name: getattr(work, name) / of for name in ("kept", *SECONDS)}
        layers.append(_spread(replace(work, **shares), size))
        gather.append(tuple(_wide(each / of, size) for each in found.gathered[index]))
        reduce.append(tuple(_wide(each / of, size) for each in found.reduced[index]))
    if segments:
        alone = [replace(each, checkpointing="full") for each in shapes]
        layers = _no_longer(layers, block_costs(run, alone, times, gathers=gathers, backend=backend).layers)
    return BlockCosts(
        before=_spread(found.before, size), layers=tuple(layers), after=_spread(found.after, size),
        stream=_wide(stream, size), received=_wide(found.received, size), gather=tuple(gather), reduce=tuple(reduce),
    )  # fmt: skip


def _no_longer(layers: Sequence[PartCosts], alone: Sequence[PartCosts]) -> list[PartCosts]:
    """Layers of segments, whose backward takes no longer than alone: a stage may have a part of a segment.

    What runs again ends before the last product: of a segment that of its last layer, and of a layer alone its own.
    """
    import numpy as np

    names = ("backward", "launch_back")
    pairs = zip(layers, alone, strict=True)
    return [replace(a, **{name: np.minimum(getattr(a, name), getattr(b, name)) for name in names}) for a, b in pairs]


def _with_arrays(run: Run, shapes: Sequence[Shape], gathers: bool) -> Run:
    """A run with a micro-batch of each shape; sizes that are one in all of them stay numbers."""
    import numpy as np

    def sizes(name: str) -> Any:
        values = [getattr(each, name) for each in shapes]
        return values[0] if len(set(values)) == 1 else np.array(values, np.int64)

    first = shapes[0]
    expert = sizes("expert")
    layout, recipe = Layout(prefetch=run.layout.prefetch), replace(run.recipe)
    # Experts of a rank that shares among several; how many it shares among is told apart (`plan.layouts.standing`).
    vars(layout).update(
        tensor=sizes("tensor"), sequence_parallel=first.sequence_parallel,
        sequence_gather=run.layout.sequence_gather, expert_send=run.layout.expert_send, context=sizes("context"),
        context_kind=first.context_kind, expert=expert, shard=8 * expert if gathers else expert,
        zero=3 if gathers else 1, overlap=run.layout.overlap,
    )  # fmt: skip
    micro_batch = sizes("micro_batch")
    vars(recipe).update(
        micro_batch=micro_batch, global_batch=micro_batch * layout.shard, activation_checkpointing=first.checkpointing
    )
    return _Once(model=run.model, recipe=recipe, layout=layout, cluster=run.cluster, data=run.data)


def _main_segments(runs: Sequence[int], blocks: Sequence[int], counts: Sequence[int]) -> list[int]:
    """For each run of layers, of so many layers each, the segment of a ledger that stands for most of it."""
    edges = list(accumulate((of * count for of, count in zip(blocks, counts, strict=True)), initial=0))
    which, at = [], 0
    for size in runs:
        until = at + size
        inside = [index for index in range(len(blocks)) if edges[index] < until and edges[index + 1] > at]
        which.append(max(inside, key=lambda index: counts[index]))
        at = until
    return which


def _wide(amount: Any, size: int) -> Any:
    import numpy as np

    return np.broadcast_to(np.asarray(amount, float), size)


def _spread(work: PartCosts, size: int) -> PartCosts:
    return PartCosts(*(_wide(each, size) for each in vars(work).values()))


class _Found:
    def __init__(self) -> None:
        self.before, self.after = PartCosts(), PartCosts()
        self.received: Int = 0
        self.loops: dict[int, PartCosts] = {}
        self.gathered: dict[int, tuple[Int, Int]] = {}
        self.reduced: dict[int, tuple[Int, Int]] = {}


class _Reader:
    """Goes through the ledger of one forward and backward and adds up what each part of the model needs.

    ``wanted`` are the segments of layers that are asked about. Of the groups in ``hidden`` nothing need show.
    """

    def __init__(
        self, ledger: Ledger, times: Times | None, layout: Layout, stream: Int, wanted: Sequence[int],
        hidden: tuple[str, ...], blocks: Sequence[int], segments: bool,
    ) -> None:  # fmt: skip
        entries = [each for each in ledger if each.phase in ("forward", "recompute", "backward")]
        self.parts = _of_the_micro_batch(list(_parts(entries)))
        self.times = times
        self.layout = layout
        self.stream = stream
        self.wanted = set(wanted)
        self.untimed = (*_SHARING, *hidden)
        self.counts = {key: part[0].loop[0][1] for key, part in self.parts if isinstance(key, tuple)}
        self.kept: dict[Any, Int] = {}
        for key, part in self.parts:
            ahead = [each for each in part if each.phase == "forward"]
            several = isinstance(key, tuple) and self.counts[key] > 1
            # Of a loop what a round leaves live counts: what is kept may be for the next round.
            own = summed(_left(each) if several else _kept(each) for each in ahead)
            self.kept[key] = self.kept.get(key, 0) + own
        self.segments = segments
        self.offloads = any(category == HOST for each in entries for category, _ in each.allocated)
        self._level(blocks)

    def _level(self, blocks: Sequence[int]) -> None:
        """Let the last layers keep as much as those that stand for them; what the head makes of that is its own."""
        ahead = [key for key, part in self.parts if isinstance(key, tuple) and part[0].phase == "forward"]
        last, alike = ahead[-1], self._alike()
        if last != alike:
            usual = self.kept[alike] * blocks[last[0]] // blocks[alike[0]]
            # Offloaded, the last output is there while the head reads it, and then in host memory; what the last of the
            # segments keeps is not there where the head's stage has a part of it.
            if not self.offloads and not self.segments:
                self.kept["after"] = self.kept["after"] + self.kept[last] - usual
            self.kept[last] = usual

    def _alike(self) -> Any:
        """The rounds that stand for the most layers."""
        return max(self._rounds().values(), key=lambda each: self.counts[each])

    def read(self) -> _Found:
        found, parts = _Found(), self.parts
        most, _ = self._most(_MOVING)
        quiet, left = self._most(_MOVING[:-1])
        again, _ = self._most(_MOVING[:-1], ("recompute",))
        spent = self._seconds()

        def work(key: Any) -> PartCosts:
            return PartCosts(
                kept=self.kept.get(key, 0), most=most.get(key, 0), quiet=quiet.get(key, 0), again=again.get(key, 0),
                left=left if key == "after" else 0, **dict(zip(SECONDS, spent[key], strict=True)),
            )  # fmt: skip

        # Copies of weights that stand outside are kept too: whose they are is not told.
        weights = sum((_kept(each) for key, part in parts if key == "before" for each in part if each.path == ""), 0)
        found.before, found.after = work("before"), work("after")
        found.before = replace(found.before, kept=found.before.kept - weights)
        found.received = self._received()
        for index, key in self._rounds().items():
            found.loops[index] = work(key)
            of = [each for other, part in parts if other == key for each in part if each.group in _SHARING]
            found.gathered[index] = _payloads(of, "all_gather")
            found.reduced[index] = _payloads(of, "reduce_scatter")
        return found

    def _received(self) -> Int:
        """What a layer keeps of its input: all of it, or another form of it that it makes itself."""
        alike = self._alike()
        ahead = [each for key, part in self.parts if key == alike for each in part if each.phase == "forward"]
        kept = _kept([each for each in ahead if each.allocated][-1])
        return 0 if isinstance(kept, int) and kept == 0 else self.stream

    def _rounds(self) -> dict[int, Any]:
        """Of each segment the rounds that stand for all: those between, where there are some."""
        found: dict[int, Any] = {}
        for index, which in self.counts:
            if index in self.wanted and (index not in found or not which):
                found[index] = (index, which)
        return found

    def _most(
        self, moving: Sequence[str], phases: Sequence[str] = ("recompute", "backward")
    ) -> tuple[dict[Any, Int], Int]:
        """By part, what is live in these phases beside what is kept; and what the head leaves to the end."""
        most: dict[Any, Int] = {}
        live: Int = 0
        left: Int = 0
        waiting = sum((each * self.counts.get(key, 1) for key, each in self.kept.items() if key != "after"), 0)
        if COMMUNICATION in moving:  # parameters outside the layers are there all the time
            waiting = waiting + self._outside()
        for key, part in self.parts:
            before = live
            # Of a layer what comes beside its input's gradient counts, not what parts behind it have left.
            beside = before - self.stream if isinstance(key, tuple) else waiting
            asked = phases
            for entry in part:
                live = _plus(live, _moved(entry.allocated, moving))
                if entry.phase == "backward" and entry.kind == "matmul" and "backward" not in phases:
                    asked = ()  # from the first product on gradients of weights are there
                if entry.phase in asked:
                    # The rank's own piece is made narrow to be gathered: how large it is depends on the ranks.
                    scratch = 0 if entry.group in _SHARING else entry.scratch
                    above = _plus(live, scratch) - beside
                    most[key] = above if key not in most else larger(most[key], above)
                live = _plus(live, -_moved(entry.freed, moving))
            if isinstance(key, tuple):
                live = before + self.counts[key] * (live - before)
            elif key == "after" and part[0].phase != "forward":
                left = larger(0, live - waiting)  # the last layer's output has gone, and its gradient is there
        return most, left

    def _outside(self) -> Int:
        """Bytes of the parameters outside the layers that are gathered."""
        entries = (each for key, part in self.parts if key == "before" for each in part)
        return sum((each.payload for each in entries if each.name == "all_gather" and each.group in _SHARING), 0)

    def _seconds(self) -> dict[Any, tuple[Any, ...]]:
        """By part, the seconds in the order of `SECONDS`, one round of a loop."""
        spent: dict[Any, list[Any]] = {key: [0.0] * len(SECONDS) for key, _ in self.parts}
        wanted = {"before", "after", *self._rounds().values()}
        if self.times is not None:
            for key, part in self.parts:
                if key not in wanted:
                    continue
                depth = 1 if isinstance(key, tuple) else 0
                seconds, products, copies, *others = self.times.of(part, self.layout, depth, without=self.untimed)
                backward = part[0].phase != "forward"
                spent[key][backward] = spent[key][backward] + seconds
                spent[key][2] = spent[key][2] + products / 2
                spent[key][3 + backward] = spent[key][3 + backward] + copies
                for at, each in enumerate(others):  # launches, sends
                    place = 5 + 2 * at + backward
                    spent[key][place] = spent[key][place] + each
        return {key: tuple(each) for key, each in spent.items()}


def _parts(entries: Sequence[Entry]) -> Iterator[tuple[Any, list[Entry]]]:
    """Runs of entries of the same part and direction: ``before``, ``after``, or (segment, which rounds) of a loop."""
    at: Any = None
    forward, part = True, list[Entry]()
    seen = {True: False, False: False}
    for entry in entries:
        direction = entry.phase == "forward"
        key: Any
        if entry.loop and entry.loop[0][0].startswith("layers "):
            _, number, *which = entry.loop[0][0].split()
            key = (int(number), " ".join(which))
            seen[direction] = True
        else:
            key = "after" if seen[direction] == direction else "before"
        if (key, direction) != (at, forward) and part:
            yield at, part
            part = []
        at, forward = key, direction
        part.append(entry)
    if part:
        yield at, part


def _of_the_micro_batch(parts: list[tuple[Any, list[Entry]]]) -> list[tuple[Any, list[Entry]]]:
    """Without the loops behind its backward: they sum over tensor ranks once a step, and have numbers of their own."""
    passes = [(key, part[0].phase == "forward") for key, part in parts]
    over = passes.index(("before", False)) if ("before", False) in passes else len(parts)
    return [each for at, each in enumerate(parts) if at <= over or not isinstance(each[0], tuple)]


def _payloads(entries: Sequence[Entry], name: str) -> tuple[Int, Int]:
    """Bytes of collectives of this name: over all ranks that share, and over those of an expert."""
    some = [each for each in entries if each.name == name]
    of_experts = sum((each.payload for each in some if each.group.endswith("/ expert")), 0)
    return sum((each.payload for each in some), 0) - of_experts, of_experts


def _kept(entry: Entry) -> Int:
    """What it keeps on the device, parameters that were gathered left out."""
    if any(category in (COMMUNICATION, HOST) for category, _ in entry.allocated):
        return 0
    return entry.kept


def _left(entry: Entry) -> Int:
    return _moved(entry.allocated, ("activations",)) - _moved(entry.freed, ("activations",))


def _moved(amounts: Sequence[tuple[str, Int]], moving: Sequence[str]) -> Int:
    return summed(nbytes for category, nbytes in amounts if category in moving)


def _plus(a: Int, b: Int) -> Int:
    """Their sum; most operations move nothing of what is asked for, and large arrays take time to add to."""
    return a if isinstance(b, int) and b == 0 else a + b
