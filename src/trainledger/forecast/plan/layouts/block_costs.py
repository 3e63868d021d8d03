"""Costs of one micro-batch on one device, layer by layer: bytes and seconds of many shapes at once.

The figures are read off the closed-form ledger of a single forward and backward of the whole model, in which the sizes
of tensor, context and expert ranks and of the micro-batch are arrays. What decides which operations run (whether ranks
are one or more, what is recomputed, whether parameters are gathered) needs a separate account.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

from trainledger.forecast.plan.layouts.grid import Shape, runs_of
from trainledger.forecast.predict.clock import Clock
from trainledger.ledger.core.sizes import greater, is_zero, sizes_of, summed
from trainledger.ledger.entry import HOST, Entry, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.step import follow
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import checkpointed
from trainledger.spec.layout import Layout, overlaps
from trainledger.spec.run import Run

_SHARING = ("shard", "shard x context", "replicate", "shard / expert", "shard x context / expert")
_WORKING = ("activations", "logits and loss", "scratch")  # categories of the peak of a part's backward


@frozen
class PartCosts:
    """Costs of one micro-batch in one layer, or in what is before or after all layers.

    Bytes: ``kept`` are the saved activations. ``working`` is the peak of the backward beyond them, without gathered
    parameters and reduced gradients; that of a layer includes the gradient of its output. The head's saved activations
    include what the last layer saves beyond the others; it has ``left`` gradients after its backward.
    Seconds: ``weights`` is the part of ``backward`` that computes gradients of weights; ``unpack`` and ``pack`` copy
    out of gathered parameters and into reduced gradients, on top of ``forward`` and ``backward``; ``launch`` and
    ``launch_back`` are what the program needs to launch those two; ``sends`` and ``sends_back`` are the seconds of them
    in which tokens go to experts and back.
    """

    kept: Any = 0.0
    working: Any = 0.0
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


COLUMNS = tuple(field.name for field in fields(PartCosts))
FORWARD, BACKWARD = ("forward", "unpack", "launch", "sends"), ("backward", "pack", "launch_back", "sends_back")
SECONDS = (*FORWARD, *BACKWARD, "weights")


@frozen
class BlockCosts:
    """The costs of V shapes; ``before`` and ``after`` all layers [COLUMNS, V], ``layers`` [COLUMNS, K, V].

    Layers are one of each of the K runs of `runs_of`. ``stream`` [V] are the bytes that go from one stage to the next,
    ``received`` [V] what a layer saves of them. ``gather`` and ``reduce`` [2, K, V] are bytes of a layer's parameters
    and gradients that go over the ranks that share them, once; of experts the second, of all others the first.
    """

    before: Any
    layers: Any
    after: Any
    stream: Any
    received: Any
    gather: Any
    reduce: Any

    @classmethod
    def empty(cls, shapes: int, runs: int) -> BlockCosts:
        """Costs of so many shapes, to be filled by `put`."""
        import numpy as np

        one, each, both = np.zeros((len(COLUMNS), shapes)), (len(COLUMNS), runs, shapes), (2, runs, shapes)
        return cls(one, np.zeros(each), one.copy(), np.zeros(shapes), np.zeros(shapes), np.zeros(both), np.zeros(both))

    def put(self, found: BlockCosts, places: Sequence[int]) -> None:
        """Fill in the costs of the shapes at some places."""
        for into, values in zip(vars(self).values(), vars(found).values(), strict=True):
            into[..., places] = values

    def hidden(self, contention: float) -> tuple[Any, Any]:
        """Seconds of a forward's and of a backward's sends to experts that the other overlaps, at most.

        See `forecast.predict.overlap`. Of what is after all layers, [2, V], and of layers, [2, K, V].
        """
        import numpy as np

        def hidden(costs: Any) -> Any:
            at = dict(zip(COLUMNS, costs, strict=True))
            with np.errstate(invalid="ignore"):  # over a network that is not known sends take forever, and so do both
                ahead = at["forward"] + at["unpack"] - at["sends"]
                back = at["backward"] + at["pack"] - at["sends_back"]
            return (1 - contention) * np.stack([np.minimum(at["sends"], back), np.minimum(at["sends_back"], ahead)])

        return hidden(self.after), hidden(self.layers)


class _Once(Run):
    """A run with a single micro-batch, of any sizes."""

    @property
    def grad_accum(self) -> Any:
        return 1


def class_of(shape: Shape) -> tuple[Any, ...]:
    """What decides which operations run; shapes that agree in it go into one account."""
    several = shape.micro_batch > 1 and shape.sequence_parallel  # then tokens are brought together by copies
    return (
        shape.tensor > 1,
        shape.sequence_parallel,
        shape.context > 1,
        shape.context_kind,
        shape.expert > 1,
        several,
        shape.checkpointing,
    )


def block_costs(run: Run, shapes: Sequence[Shape], clock: Clock, *, gathers: bool, backend: str) -> BlockCosts:
    """The costs of shapes of one class; ``gathers`` says that parameters are gathered block by block."""
    import numpy as np

    local = _with_arrays(run, shapes, gathers)
    rank = rank_plan(local)
    ledger = follow(rank, backend=backend)
    leaves = rank.chunks[0].leaves
    blocks = [len(segment.blocks) for segment in leaves.segments]
    counts = [segment.count for segment in leaves.segments]
    sizes = sizes_of(rank.run, backend)
    stream = nbytes_in(sizes.stream_rows * sizes.spec.d_model, local.recipe.precision.stream)
    which = _main_segments(runs_of(run), blocks, counts)
    hidden = ("tensor",) if overlaps(run.layout, "tensor") else ()
    segments = shapes[0].checkpointing == "segments"
    reader = _Reader(ledger, clock.of_run(local), stream, which, hidden, blocks, segments)
    layers = []
    for index in which:
        part, of = reader.loops[index], blocks[index]
        layers.append(replace(part, **{name: getattr(part, name) / of for name in ("kept", *SECONDS)}))
    size = len(shapes)
    gather = [[each / (2 * blocks[index]) for each in reader.gathered[index]] for index in which]  # twice: both passes
    reduce = [[each / blocks[index] for each in reader.reduced[index]] for index in which]
    costs = BlockCosts(
        before=_wide(vars(reader.before).values(), size),
        layers=_wide([_wide(vars(layer).values(), size) for layer in layers], size).swapaxes(0, 1),
        after=_wide(vars(reader.after).values(), size),
        stream=_wide(stream, size),
        received=_wide(reader.received, size),
        gather=_wide([_wide(each, size) for each in gather], size).swapaxes(0, 1),
        reduce=_wide([_wide(each, size) for each in reduce], size).swapaxes(0, 1),
    )
    if segments:
        # A stage may have a part of a segment. What is recomputed ends before the last matmul: of a segment that of its
        # last layer, of a layer alone its own; so its backward takes no longer than alone.
        alone = [replace(shape, checkpointing="full") for shape in shapes]
        others = block_costs(run, alone, clock, gathers=gathers, backend=backend).layers
        for row in (COLUMNS.index("backward"), COLUMNS.index("launch_back")):
            costs.layers[row] = np.minimum(costs.layers[row], others[row])
    return costs


def _with_arrays(run: Run, shapes: Sequence[Shape], gathers: bool) -> Run:
    """A run with a micro-batch of each shape; sizes that are one in all of them stay numbers."""
    import numpy as np

    def sizes(name: str) -> Any:
        values = [getattr(shape, name) for shape in shapes]
        return values[0] if len(set(values)) == 1 else np.array(values, np.int64)

    first = shapes[0]
    expert = sizes("expert")
    layout, recipe = Layout(prefetch=run.layout.prefetch), replace(checkpointed(run.recipe, first.checkpointing))
    # Experts of a rank that shares among several; how many it shares among is known apart (`plan.layouts.states`).
    vars(layout).update(
        tensor=sizes("tensor"), sequence_parallel=first.sequence_parallel,
        sequence_gather=run.layout.sequence_gather, expert_send=run.layout.expert_send, context=sizes("context"),
        context_kind=first.context_kind, expert=expert, shard=8 * expert if gathers else expert,
        zero=3 if gathers else 1, overlap=run.layout.overlap,
    )  # fmt: skip
    micro_batch = sizes("micro_batch")
    vars(recipe).update(micro_batch=micro_batch, global_batch=micro_batch * layout.shard)
    return _Once(model=run.model, recipe=recipe, layout=layout, cluster=run.cluster, data=run.data)


def _main_segments(runs: Sequence[int], blocks: Sequence[int], counts: Sequence[int]) -> list[int]:
    """For each run of layers, of so many layers each, the segment of a ledger that most of it is in."""
    edges = list(accumulate((of * count for of, count in zip(blocks, counts, strict=True)), initial=0))
    which, at = [], 0
    for size in runs:
        until = at + size
        inside = [index for index in range(len(blocks)) if edges[index] < until and edges[index + 1] > at]
        which.append(max(inside, key=lambda index: counts[index]))
        at = until
    return which


def _wide(amount: Any, size: int) -> Any:
    """An amount, or a sequence of them, as floats for each of so many shapes."""
    import numpy as np

    if isinstance(amount, int | float) or hasattr(amount, "shape"):
        return np.broadcast_to(np.asarray(amount, float), (*np.shape(amount)[:-1], size))
    return np.stack([_wide(each, size) for each in amount])


class _Reader:
    """Goes through the ledger of one forward and backward and adds up what each part of the model needs.

    ``wanted`` are the segments of layers that are asked about. Of the groups in ``hidden`` nothing need show. The costs
    are in ``before``, ``after`` and ``loops`` (by segment); the other results are as in `BlockCosts`.
    """

    def __init__(
        self, ledger: Ledger, clock: Clock, stream: Int, wanted: Sequence[int],
        hidden: tuple[str, ...], blocks: Sequence[int], segments: bool,
    ) -> None:  # fmt: skip
        entries = [entry for entry in ledger if entry.phase in ("forward", "recompute", "backward")]
        self.parts = parts = _of_the_micro_batch(list(_parts(entries)))
        self.clock = clock
        self.stream = stream
        self.wanted = set(wanted)
        self.untimed = (*_SHARING, *hidden)
        self.counts = {key: part[0].loop[0][1] for key, part in self.parts if isinstance(key, tuple)}
        self.kept: dict[Any, Int] = {}
        self.more: Int = 0  # saved by the last layers beyond the others
        for key, part in self.parts:
            ahead = [entry for entry in part if entry.phase == "forward"]
            several = isinstance(key, tuple) and self.counts[key] > 1
            # Of a loop what a round leaves live counts: what is kept may be for the next round.
            own = summed(_change(entry, ("activations",)) if several else _kept(entry) for entry in ahead)
            self.kept[key] = self.kept.get(key, 0) + own
        self.segments = segments
        self.offloads = any(category == HOST for entry in entries for category, _ in entry.allocated)
        self._level(blocks)
        self.spent = self._seconds()
        # Copies of weights that are outside the layers are saved too; the account of states has them.
        weights = sum((_kept(entry) for key, part in parts if key == "before" for entry in part if entry.path == ""), 0)
        before = self._costs("before")
        self.before, self.after = replace(before, kept=before.kept - weights), self._costs("after")
        self.received: Int = self._received()
        self.loops, self.gathered, self.reduced = dict[int, PartCosts](), dict[int, Any](), dict[int, Any]()
        for index, key in self._rounds().items():
            self.loops[index] = self._costs(key)
            of = [entry for other, part in parts if other == key for entry in part if entry.group in _SHARING]
            self.gathered[index] = _payloads(of, "all_gather")
            self.reduced[index] = _payloads(of, "reduce_scatter")

    def _level(self, blocks: Sequence[int]) -> None:
        """Let the last layers save as much as the others do; what they save beyond that counts for the head."""
        ahead = [key for key, part in self.parts if isinstance(key, tuple) and part[0].phase == "forward"]
        last, alike = ahead[-1], self._alike()
        if last != alike:
            usual = self.kept[alike] * blocks[last[0]] // blocks[alike[0]]
            # Offloaded, the last output is there while the head reads it, and then in host memory; what the last of the
            # segments keeps is not there where the head's stage has a part of it.
            if not self.offloads and not self.segments:
                self.more = self.kept[last] - usual
                self.kept["after"] = self.kept["after"] + self.more
            self.kept[last] = usual

    def _alike(self) -> Any:
        """The rounds of the most layers."""
        return max(self._rounds().values(), key=lambda each: self.counts[each])

    def _costs(self, key: Any) -> PartCosts:
        entries = [entry for other, part in self.parts if other == key for entry in part]
        kept, seconds = self.kept.get(key, 0), self.spent[key]
        if key == "after":  # from its forward on: its micro-batch is the last of those in flight
            peak, change = _working(entries)
            return PartCosts(kept=kept, working=self.more + peak, left=greater(0, self.more + change), **seconds)
        peak, _ = _working([entry for entry in entries if entry.phase != "forward"])
        return PartCosts(kept=kept, working=self.stream + peak, **seconds)

    def _received(self) -> Int:
        """What a layer keeps of its input: all of it, or another form of it that it makes itself."""
        alike = self._alike()
        ahead = [entry for key, part in self.parts if key == alike for entry in part if entry.phase == "forward"]
        kept = _kept([entry for entry in ahead if entry.allocated][-1])
        return 0 if is_zero(kept) else self.stream

    def _rounds(self) -> dict[int, Any]:
        """Of each segment the rounds that all others are like: those between, where there are some."""
        found: dict[int, Any] = {}
        for index, which in self.counts:
            if index in self.wanted and (index not in found or not which):
                found[index] = (index, which)
        return found

    def _seconds(self) -> dict[Any, dict[str, Any]]:
        """By part, the seconds of one round of a loop."""
        wanted = {"before", "after", *self._rounds().values()}
        spent: dict[Any, dict[str, Any]] = {key: dict.fromkeys(SECONDS, 0.0) for key in wanted}
        for key, part in self.parts:
            if key not in wanted:
                continue
            least = self.clock.least(part, 1 if isinstance(key, tuple) else 0, hidden=self.untimed)
            names = FORWARD if part[0].phase == "forward" else BACKWARD
            found = dict(zip(names, (least.total, least.copies, least.launches, least.sends), strict=True))
            for name, seconds in (*found.items(), ("weights", least.matmuls / 2)):
                spent[key][name] = spent[key][name] + seconds
        return spent


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
    """Without the loops after its backward: they sum over tensor ranks once a step, and have separate numbers."""
    passes = [(key, part[0].phase == "forward") for key, part in parts]
    over = passes.index(("before", False)) if ("before", False) in passes else len(parts)
    return [part for at, part in enumerate(parts) if at <= over or not isinstance(part[0], tuple)]


def _payloads(entries: Sequence[Entry], name: str) -> tuple[Int, Int]:
    """Bytes of collectives of this name: over all ranks that share, and over those of an expert."""
    some = [entry for entry in entries if entry.name == name]
    of_experts = sum((entry.payload for entry in some if entry.group.endswith("/ expert")), 0)
    return sum((entry.payload for entry in some), 0) - of_experts, of_experts


def _working(entries: Sequence[Entry]) -> tuple[Int, Int]:
    """The peak of what entries allocate and free, and what they leave at their end; a round of each loop."""
    rows = []
    for entry in entries:
        allocated = tuple(pair for pair in entry.allocated if pair[0] in _WORKING)
        freed = tuple(pair for pair in entry.freed if pair[0] in _WORKING)
        # The rank's own piece is cast to be gathered: how large it is depends on the ranks.
        scratch = 0 if entry.group in _SHARING else entry.scratch
        rows.append(replace(entry, allocated=allocated, freed=freed, scratch=scratch, loop=()))
    return peak_nbytes(Ledger(tuple(rows))), summed(_change(row, _WORKING) for row in rows)


def _kept(entry: Entry) -> Int:
    """What it keeps on the device, parameters that were gathered left out."""
    if any(category in ("communication", HOST) for category, _ in entry.allocated):
        return 0
    return entry.kept


def _change(entry: Entry, categories: Sequence[str]) -> Int:
    """Bytes of some categories that an entry leaves allocated."""
    allocated = summed(nbytes for category, nbytes in entry.allocated if category in categories)
    return allocated - summed(nbytes for category, nbytes in entry.freed if category in categories)
