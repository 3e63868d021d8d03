"""Memory and time of very many layouts at once, from the pieces of their parts: quick, and never above the account.

Layouts that agree in their tensor, context, pipeline and expert ranks are a block: a table with a row for every variant
of what one device computes and a column for every way to share states, once for every way to run the pipeline. Memory
is the most of a few moments that every step has; time is the longest path through the pipeline with what cannot be
hidden beside it. Both leave out what only the account knows.

Shapes: S ways to run the pipeline, J stages that differ, V variants, U ways to share states.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trainledger.dtypes import nbytes_in
from trainledger.frozen import frozen
from trainledger.plan.layouts.block_costs import COLUMNS, BlockCosts, PartCosts, block_costs, class_of
from trainledger.plan.layouts.collectives import ZERO2, Collectives, Rates, rates_of
from trainledger.plan.layouts.gradient_accumulation import GradientAccumulation
from trainledger.plan.layouts.grid import ZERO3_RESHARDS, Shape, Sharding, runs_of
from trainledger.plan.layouts.stages import Pipelines
from trainledger.plan.layouts.states import AMOUNTS, ROUNDING, States
from trainledger.plan.layouts.times import Times
from trainledger.spec.layout import overlaps
from trainledger.spec.precision import precision_of
from trainledger.spec.run import Run

BELOW = 0.998  # of the bytes: pieces of parameters are filled up to the ranks of the account that the pieces are from


@frozen
class Block:
    """The layouts with the same ranks of tensor, context, pipeline and experts.

    ``variants`` are places in the list of shapes, ``columns`` places in the tables of states.
    """

    tensor: int
    context: int
    pipeline: int
    expert: int
    data_ranks: int
    variants: Any
    micro_batches: Any
    shardings: tuple[Sharding, ...]
    columns: tuple[int, ...]


@frozen
class Bound:
    """Bytes at the peak and seconds of a step, [S, V, U]; of the bytes those that are states."""

    nbytes: Any
    states: Any
    seconds: Any


@frozen
class Costs:
    """What a machine takes.

    How parts are timed, the seconds of an update and of adding up gradients per element, the share that slow nodes add,
    and the share of a collective's seconds that compute beside it loses.
    """

    times: Times
    update_seconds: float
    adding: GradientAccumulation
    slower: float = 0.0
    contention: float = 0.0


class Bounds:
    """Bounds of blocks; what several blocks need is made once."""

    def __init__(
        self, run: Run, shapes: Sequence[Shape], states: States, costs: Costs, *, gathers: Sequence[bool], backend: str
    ) -> None:
        import numpy as np

        self.run = run
        self.shapes = shapes
        self.states = states
        self.costs = costs
        self.runs = runs_of(run)
        self.tables = {each: self._empty() for each in gathers}
        self._fill(backend)
        self.rows = {each: _rows(table) for each, table in self.tables.items()}
        self.paired = overlaps(run.layout, "experts")
        self.hidden = {each: _hidden(table, costs.contention) for each, table in self.tables.items() if self.paired}
        self.segments = np.array([each.checkpointing == "segments" for each in shapes])
        precision = precision_of(run.recipe)
        formats = precision.gradients, precision.parameters
        self.gradient_nbytes, self.parameter_nbytes = (nbytes_in(8, each) / 8 for each in formats)

    def _empty(self) -> BlockCosts:
        """The pieces of all shapes, to be filled."""
        import numpy as np

        size, runs = len(self.shapes), range(len(self.runs))

        def part() -> PartCosts:
            return PartCosts(*np.zeros((len(COLUMNS), size)))

        def payloads() -> tuple[tuple[Any, Any], ...]:
            return tuple((np.zeros(size), np.zeros(size)) for _ in runs)

        return BlockCosts(
            part(), tuple(part() for _ in runs), part(), np.zeros(size), np.zeros(size), payloads(), payloads()
        )

    def _fill(self, backend: str) -> None:
        """The pieces of all shapes, from one account for each class of them."""
        classes: dict[tuple[Any, ...], list[int]] = {}
        for index, shape in enumerate(self.shapes):
            classes.setdefault(class_of(shape), []).append(index)
        # Classes that differ in what is recomputed alone run the same operations with the same sizes.
        for _, alike in groupby(sorted(classes), key=lambda each: each[:-1]):
            for each in alike:
                some = [self.shapes[index] for index in classes[each]]
                for gathers, whole in self.tables.items():
                    found = block_costs(self.run, some, self.costs.times, gathers=gathers, backend=backend)
                    _put(whole, found, classes[each])
            self.costs.times.forget()

    def of(self, block: Block, pipelines: Pipelines, rates: Rates | None = None) -> Bound:
        """The bounds of a block; its ``rates`` where those of many blocks were made together."""
        import numpy as np

        if rates is None:
            (rates,) = rates_of(self, [block])
        parts = []
        for gathers in self.tables:
            at = [index for index, each in enumerate(block.shardings) if (each.zero_mode >= ZERO3_RESHARDS) == gathers]
            if at:
                parts.append((at, _Part(self, block, pipelines, gathers, at, rates)))
        if len(parts) == 1:
            ((_, part),) = parts
            return Bound(*part.memory(), part.seconds())
        shape = (len(pipelines.ways), len(block.variants), len(block.shardings))
        nbytes, states, seconds = np.empty(shape), np.empty(shape), np.empty(shape)
        for at, part in parts:
            nbytes[:, :, at], states[:, :, at] = part.memory()
            seconds[:, :, at] = part.seconds()
        return Bound(nbytes, states, seconds)


class _Part:
    """The columns of a block whose parameters are gathered block by block, or those whose are not."""

    def __init__(
        self, bounds: Bounds, block: Block, pipelines: Pipelines, gathers: bool, at: Sequence[int], rates: Rates
    ) -> None:
        import numpy as np

        self.bounds, self.block, self.pipelines, self.gathers = bounds, block, pipelines, gathers
        self.at, self.rates = at, rates
        self.columns = np.array([block.columns[index] for index in at])
        self.zero_mode = np.array([block.shardings[index].zero_mode for index in at])
        rows, stream = bounds.rows[gathers], bounds.tables[gathers].stream
        self.before, self.after = (dict(zip(COLUMNS, each[:, block.variants], strict=True)) for each in rows[:2])
        self.layers = dict(
            zip((*COLUMNS, "block", "experts"), rows[2][:, :, block.variants], strict=True)
        )  # [K, V] each
        self.stream = stream[block.variants]
        self.paired = bounds.paired and block.expert > 1
        several = block.pipeline > 1
        self.parted = bounds.segments[block.variants] & several  # a stage may have a part of a segment
        self.received = bounds.tables[gathers].received[block.variants] * several
        self.standing = self._standing()

    def _standing(self) -> dict[str, Any]:
        """What stands on each stage, [S, J, U]."""
        import numpy as np

        ways, states = self.pipelines, self.bounds.states
        size, most, _ = ways.layers.shape
        table = np.empty((len(AMOUNTS), size, most, len(self.columns)))
        for zero_mode in set(self.zero_mode.tolist()):
            at = np.flatnonzero(self.zero_mode == zero_mode)
            if self.block.pipeline == 1:
                table[..., at] = states.whole(zero_mode)[:, None, None, self.columns[at]]
                continue
            for interleaved in set(ways.interleaved):
                which = np.flatnonzero(np.array(ways.interleaved) == interleaved)
                found = states.stages(zero_mode, interleaved, self.columns[at], ways.layers[which], ways.first[which],
                                      ways.last[which])  # fmt: skip
                table[:, which[:, None, None], np.arange(most)[None, :, None], at] = found
        return dict(zip(AMOUNTS, table, strict=True))

    # Memory

    def memory(self) -> tuple[Any, Any]:
        """Bytes at the peak of the heaviest stage, and the states of it: [S, V, U] both."""
        import numpy as np

        stands = {name: each[:, :, None] for name, each in self.standing.items()}  # [S, J, 1, U]
        fixed, more = stands["resident"] - ROUNDING, stands["gradients"]
        held = stands["gathered"] + stands["outside"]  # while micro-batches run
        at_end = stands["gathered"] * (self.block.pipeline > 1)
        first, later, several = self._activations()
        worst = first + (fixed + held) + several * more
        worst = np.maximum(worst, later + (fixed + more + at_end)).max(axis=1)
        states = (fixed + more).max(axis=1)
        return worst * BELOW, np.broadcast_to(states, worst.shape)

    def _activations(self) -> tuple[Any, Any, Any]:
        """What micro-batches hold when the first backward begins, and a later one; and whether gradients are there.

        [S, J, V, U or 1] each.
        """
        import numpy as np

        ways = self.pipelines
        kept, in_flight = self._kept()
        own = self._sum(ways.last_chunks()[:, :, None, :])
        ends = ways.ends[:, :, None]
        later = np.maximum(0.0, np.where(in_flight > 1, kept - own, 0.0))
        several = self.block.micro_batches * ways.chunks[:, None, None] > in_flight
        piped = self.block.pipeline > 1
        once = self.zero_mode > ZERO3_RESHARDS if self.gathers and piped else np.zeros(1, bool)
        head = kept - ends * self.after["kept"]
        base = head - ends * self.stream  # the head's backward leaves the gradient of its input, not its input
        # Where gradients are reduced once, those of the head are where all others are; in a pipeline without gathers
        # so are those of a table that is the embedding's too.
        elsewhere = once | (piped and not self.gathers)
        left = (ends * self.after["left"])[..., None] * ~elsewhere
        quiet = (base + self._tail("quiet"))[..., None] * ~once + left
        after = np.where(ends > 0, head + self.after["quiet"], 0.0)[..., None]
        after = after - self.after["left"][:, None] * elsewhere
        again = np.maximum(kept, base + self._tail("again"))[..., None]
        if self.gathers:
            shared = self._experts_shared()
            gathered = self._tail("block")[..., None] + self._tail("experts")[..., None] * shared
            # What the layer behind has reduced is still there only from the last layer but one on.
            beside = ways.longer[:, :, None] * (base - self._tail("kept") + self._tail("most"))
            reshards = self.zero_mode == ZERO3_RESHARDS
            beside = beside[..., None] * (reshards & shared) + left
            quiet = np.maximum(quiet, beside) + gathered * reshards
        moment = np.maximum(np.maximum(again, quiet), after)
        return moment, later[..., None], several[..., None]

    def _tail(self, name: str) -> Any:
        """What the last layer of each stage's last chunk has of something, [S, J, V]; 0 where the chunk has none."""
        return self.pipelines.tails @ (self.layers[name] * ~self.parted)

    def _kept(self) -> tuple[Any, Any]:
        """Bytes kept in flight, and how many micro-batches of chunks that are: [S, J, V]."""
        import numpy as np

        counts, inverse = np.unique(self.block.micro_batches, return_inverse=True)
        every = [self.pipelines.held(int(each), paired=self.paired) for each in counts]
        held = np.stack(every, axis=2)[:, :, inverse]
        return self._sum(held), held[..., -1]

    def _sum(self, held: Any) -> Any:
        """Bytes of so many layers, embeddings, heads and messages, as `Pipelines.held` has them."""
        import numpy as np

        nbytes = np.stack([*self.layers["kept"], self.before["kept"], self.after["kept"], self.received])
        return np.einsum("sjvk,kv->sjv", held[..., :-1], nbytes)

    # Time

    def seconds(self) -> Any:
        """Seconds of a step: the longest path through the stages, what comes before and after it: [S, V, U]."""
        import numpy as np

        ways, costs = self.pipelines, self.bounds.costs
        messages = Collectives(self.bounds, self.block, self.rates, self.at, ways, self.standing)
        count = self.block.micro_batches[:, None].astype(float)
        ahead, back, weights = (self._work(name) for name in ("forward", "backward", "weights"))
        launch, launch_back = self._work("launch"), self._work("launch_back")
        saved, saved_back = self._beside_another() if self.paired else (0.0, 0.0)
        ahead, back = ahead - saved, back - saved_back
        gather, again, reduce = messages.per_micro_batch()
        begin, end, beside = messages.once()
        if self.gathers:
            several = (self.zero_mode == ZERO3_RESHARDS) | (self.block.pipeline == 1)
            ahead = ahead + self._copies("unpack") * several
            back = back + self._copies("pack") * (self.zero_mode == ZERO3_RESHARDS)
        adding = self._adding() * (count > 1)  # but for the first
        back = back + adding * (1 - 1 / count)
        if self.block.pipeline == 1:
            # The streams of a rank on its own go on from one micro-batch to the next.
            messages_beside = gather[:, 0] + again[:, 0] + reduce[:, 0]
            computing = ahead[:, 0] + back[:, 0] + costs.contention * messages_beside
            path = count * np.maximum(computing, messages_beside)
            begin, end = begin[:, 0], end[:, 0]
        else:
            # A stage launches nothing of a micro-batch before that has come (`predict.parallel_step`).
            reducing = again + reduce
            forwards = np.maximum(np.maximum(ahead + costs.contention * gather, gather), launch)
            backwards = np.maximum(np.maximum(back + costs.contention * reducing, reducing), launch_back)
            # What is gathered once comes block by block beside the first forward.
            begin = np.maximum(0.0, begin[:, 0] - forwards[:, 0])
            # Of a single micro-batch the first stage's reductions are launched as a part of its backward.
            end = np.maximum(0.0, end[:, 0] - (count == 1) * (backwards - back)[:, 0])
            both, chunks = forwards + backwards, ways.chunks[:, None, None]
            late = np.minimum(count, ways.pipeline) * weights  # of zero-bubble: what waits for the end
            zero_bubble = ways.zero_bubble[:, None, None, None]
            # Those that come first and last have no other micro-batch beside them.
            first = _before(ways, forwards + saved)
            last = _before(ways, backwards + saved_back - zero_bubble * weights)
            last = np.maximum(0.0, last - zero_bubble * late)
            alone = 0.0
            if self.paired:
                alone = np.minimum(ways.alone[:, :, None, None], chunks[..., None] * count) * (saved + saved_back)
            sent = 2 * ways.place[:, :, None, None] * messages.send()
            path = np.max(count * both + sent + (first + last + alone) / chunks[..., None], axis=1)
        hidden = (back + adding / count) / ways.chunks[:, None, None, None]  # by the last
        exposed = np.maximum(costs.contention * beside, beside - hidden)
        end = end + np.max(exposed, axis=1)
        owned = np.max(self.standing["owned"], axis=1)[:, None, :]
        close = owned * costs.update_seconds + messages.updated()
        total = path + begin + end + close
        if self.block.pipeline == 1:
            # The program launches ahead of the device, and waits for it once a step. What is reduced block by block
            # launches less than what these pieces are from.
            launching = count * (launch + launch_back)[:, 0] * (self.zero_mode != ZERO2)
            total = np.maximum(total, launching)
        return total * (1 + costs.slower)

    def _experts_shared(self) -> Any:
        """Where other ranks hold the same experts, [U] or [1]; else those are neither gathered nor reduced."""
        import numpy as np

        return self.rates.shared[self.at] > self.block.expert if self.block.expert > 1 else np.ones(1, bool)

    def _copies(self, name: str) -> Any:
        """Seconds of copies out of what is gathered or into what is reduced: [S, J, V, 1 or U]."""
        shared, total = self._experts_shared(), self._work(name)
        if shared.all():
            return total
        experts = self.layers["experts"] / (self.layers["block"] + self.layers["experts"])
        return total - (self.pipelines.layers @ (self.layers[name] * experts))[..., None] * ~shared

    def _beside_another(self) -> Any:
        """Seconds of a forward's and of a backward's sends to experts that another one hides: [2, S, J, V, 1]."""
        ways, (after, layers) = self.pipelines, self.bounds.hidden[self.gathers]
        at, several = self.block.variants, self.block.micro_batches > 1
        total = ways.last[:, :, None] * after[:, None, None, at] + ways.layers @ layers[:, None, :, at]
        there = ways.paired[:, None] if self.block.pipeline > 1 else several[None]
        return (total * there[:, None])[..., None]

    def _adding(self) -> Any:
        """Seconds in which a micro-batch's gradients are added to others: [S, J, 1, U]."""
        import numpy as np

        adding, pipeline = self.bounds.costs.adding, self.block.pipeline
        each = np.array([adding.seconds(zero_mode, pipeline=pipeline) for zero_mode in self.zero_mode.tolist()])
        return (self.standing["computed"] * each)[:, :, None]

    def _work(self, name: str) -> Any:
        """A micro-batch's seconds of one kind in all chunks of each stage: [S, J, V, 1]."""
        ways = self.pipelines
        total = ways.first[:, :, None] * self.before[name] + ways.last[:, :, None] * self.after[name]
        return (total + ways.layers @ self.layers[name])[..., None]


def _put(whole: BlockCosts, found: BlockCosts, places: Sequence[int]) -> None:
    """The pieces of some shapes into those of all."""
    pairs = [(whole.before, found.before), (whole.after, found.after)]
    for into, of in (*pairs, *zip(whole.layers, found.layers, strict=True)):
        for name, values in vars(into).items():
            values[places] = getattr(of, name)
    whole.stream[places], whole.received[places] = found.stream, found.received
    for name in ("gather", "reduce"):
        for both, of_run in zip(getattr(whole, name), getattr(found, name), strict=True):
            for values, of_group in zip(both, of_run, strict=True):
                values[places] = of_group


def _before(ways: Pipelines, seconds: Any) -> Any:
    """The seconds of all stages before the last of each kind, [S, J, V, U]; of every kind one has as many."""
    size, most, *others = seconds.shape
    return (ways.before @ seconds.reshape(size, most, -1)).reshape(size, most, *others)


def _rows(pieces: BlockCosts) -> tuple[Any, Any, Any]:
    """What stands before and after all layers, [COLUMNS, shapes], and layers, [COLUMNS and parameters, K, shapes]."""
    import numpy as np

    def row(work: PartCosts) -> Any:
        return np.stack([getattr(work, name) for name in COLUMNS])

    gathered = [[each / 2 for each in both] for both in pieces.gather]  # forward and backward do
    layers = [np.stack([*row(each), *both]) for each, both in zip(pieces.layers, gathered, strict=True)]
    return row(pieces.before), row(pieces.after), np.stack(layers, axis=1)


def _hidden(pieces: BlockCosts, contention: float) -> tuple[Any, Any]:
    """Seconds of a forward's and of a backward's sends to experts that go beside the other, at most.

    See `predict.overlap`. Of what stands after all layers, [2, shapes], and of layers, [2, K, shapes].
    """
    import numpy as np

    def hidden(work: PartCosts) -> Any:
        with np.errstate(invalid="ignore"):  # over a network that is not known sends take forever, and so do both
            ahead, back = work.forward + work.unpack - work.sends, work.backward + work.pack - work.sends_back
        return (1 - contention) * np.stack([np.minimum(work.sends, back), np.minimum(work.sends_back, ahead)])

    return hidden(pieces.after), np.stack([hidden(each) for each in pieces.layers], axis=1)
