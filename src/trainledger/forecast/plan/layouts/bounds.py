"""Lower bounds of memory and time for very many layouts at once; never above the account and the forecast of a layout.

Layouts that agree in their tensor, context, pipeline and expert ranks are a block: a table with a row for every variant
of what one device computes and a column for every way to share states, once for every way to run the pipeline. Memory
is the static memory of a rank, the saved activations in flight, and the peak of the backward of the last layer or of
the head. Time is the critical path through the pipeline with perfect overlap (`predict.pipeline.critical_path`,
`forecast.predict.clock.Clock.least`). All of it is read off the account of one micro-batch, whose sizes are arrays
(`forecast.plan.layouts.block_costs`).

Shapes: S ways to run the pipeline, J stages that differ, V variants, U ways to share states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from trainledger.forecast.plan.layouts.accounts import Progress
from trainledger.forecast.plan.layouts.block_costs import COLUMNS, BlockCosts, block_costs, class_of
from trainledger.forecast.plan.layouts.blocks import Block
from trainledger.forecast.plan.layouts.collectives import ZERO2, Collectives, Rates, experts_shared, rates_of
from trainledger.forecast.plan.layouts.grid import ZERO3_RESHARDS, Shape, runs_of
from trainledger.forecast.plan.layouts.stages import Pipelines
from trainledger.forecast.plan.layouts.states import AMOUNTS, ROUNDING, States
from trainledger.forecast.predict.clock import Clock
from trainledger.forecast.predict.pipeline import critical_path
from trainledger.forecast.predict.streams import perfectly_overlapped
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import overlaps
from trainledger.spec.run import Run

BELOW = 0.998  # of the bytes: block costs pad parameters to the ranks of the account that they are read from
# What is reduced block by block, and not gathered, launches less than the account that costs are read from: 0.80 to 1
# of it in layouts drawn from eight kinds of run.
ZERO2_LAUNCHES = 0.75


@frozen
class Bound:
    """Bytes at the peak and seconds of a step, [S, V, U]; of the bytes those that are states."""

    nbytes: Any
    states: Any
    seconds: Any


@frozen
class Costs:
    """What a machine takes.

    ``update_seconds`` and ``accumulation`` (`accumulation_seconds` by how states are shared and whether there is no
    pipeline) are per element that is updated and whose gradients are added up, ``slower`` is the share that slow nodes
    add.
    """

    clock: Clock
    update_seconds: float
    accumulation: Callable[[int, bool], float]
    slower: float = 0.0


class Bounds:
    """Bounds of blocks; what several blocks need is made once."""

    def __init__(
        self, run: Run, shapes: Sequence[Shape], states: States, costs: Costs, *, gathers: Sequence[bool], backend: str,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        import numpy as np

        self.run, self.shapes, self.states, self.costs = run, shapes, states, costs
        self.runs = runs_of(run)
        self.tables = {each: BlockCosts.empty(len(shapes), len(self.runs)) for each in gathers}
        self._fill(backend, progress or (lambda what, done, of: None))
        self.paired = overlaps(run.layout, "experts")
        contention = costs.clock.contention
        self.hidden = {each: _hidden(table, contention) for each, table in self.tables.items() if self.paired}
        self.segments = np.array([each.checkpointing == "segments" for each in shapes])
        self.divides_sends = np.array([run.layout.split_sends and not each.sequence_parallel for each in shapes])

    def _fill(self, backend: str, report: Progress) -> None:
        """The costs of all shapes, from one account for each class of them."""
        classes: dict[tuple[Any, ...], list[int]] = {}
        for index, shape in enumerate(self.shapes):
            classes.setdefault(class_of(shape), []).append(index)
        of, done = len(classes) * len(self.tables), 0
        # Classes that differ in what is recomputed alone run the same operations with the same sizes.
        for _, alike in groupby(sorted(classes), key=lambda each: each[:-1]):
            for each in alike:
                some = [self.shapes[index] for index in classes[each]]
                for gathers, table in self.tables.items():
                    report("kinds of layers accounted", done, of)
                    done += 1
                    found = block_costs(self.run, some, self.costs.clock, gathers=gathers, backend=backend)
                    table.put(found, classes[each])
            self.costs.clock.forget()

    def rates_of(self, blocks: Sequence[Block]) -> list[Rates]:
        """The rates of the collectives of blocks, computed together."""
        return rates_of(self.costs.clock, self.tables.get(True), blocks)

    def of(self, block: Block, pipelines: Pipelines, rates: Rates | None = None) -> Bound:
        """The bounds of a block; its ``rates`` where those of many blocks were computed together."""
        import numpy as np

        if rates is None:
            (rates,) = self.rates_of([block])
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
        table, which = bounds.tables[gathers], block.variants
        self.before, self.layers, self.after = (  # [V], [K, V] and [V] for each name
            dict(zip(COLUMNS, each[..., which], strict=True)) for each in (table.before, table.layers, table.after)
        )
        self.gather = table.gather[..., which]
        self.stream = table.stream[which]
        self.paired = bounds.paired and block.expert > 1
        several = block.pipeline > 1
        self.parted = bounds.segments[which] & several  # a stage may have a part of a segment
        self.received = table.received[which] * several
        self.states = self._states()

    def _states(self) -> dict[str, Any]:
        """Static memory of each stage, [S, J, U]."""
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
                found = states.stages(
                    zero_mode, interleaved, self.columns[at], ways.layers[which], ways.first[which], ways.last[which]
                )
                table[:, which[:, None, None], np.arange(most)[None, :, None], at] = found
        return dict(zip(AMOUNTS, table, strict=True))

    # Memory

    def memory(self) -> tuple[Any, Any]:
        """Bytes at the peak of the heaviest stage, and the states of it: [S, V, U] both."""
        import numpy as np

        static = {name: each[:, :, None] for name, each in self.states.items()}  # [S, J, 1, U]
        fixed, gradients = static["resident"] - ROUNDING, static["gradients"]
        running = static["gathered"] + static["outside"]  # while micro-batches run
        at_end = static["gathered"] * (self.block.pipeline > 1)
        first, later, several = self._activations()
        worst = first + (fixed + running) + several * gradients
        worst = np.maximum(worst, later + (fixed + gradients + at_end)).max(axis=1)
        states = (fixed + gradients).max(axis=1)
        return worst * BELOW, np.broadcast_to(states, worst.shape)

    def _activations(self) -> tuple[Any, Any, Any]:
        """Activations when the first backward runs, and a later one; and whether gradients are there at the first.

        [S, J, V, U or 1] each.
        """
        import numpy as np

        ways = self.pipelines
        kept, in_flight = self._kept()
        own = self._sum(ways.last_chunks[:, :, None, :])
        ends = ways.ends[:, :, None]
        later = np.maximum(0.0, np.where(in_flight > 1, kept - own, 0.0))
        several = self.block.micro_batches * ways.chunks[:, None, None] > in_flight
        piped = self.block.pipeline > 1
        once = self.zero_mode > ZERO3_RESHARDS if self.gathers and piped else np.zeros(1, bool)
        behind = kept - ends * self.after["kept"]
        # The backward of the last layer: the head's has left the gradient of its input, and not its input.
        layer = behind - ends * self.stream + self._tail(self.layers["working"])
        layer = layer[..., None] * ~once
        if self.gathers:
            block, experts = self._tail(self.gather[0]), self._tail(self.gather[1])
            shared = self._experts_shared()
            gathered = block[..., None] + experts[..., None] * shared
            # Gradients of experts that no other rank has do not wait for the block's reduction.
            layer = layer + gathered * (self.zero_mode == ZERO3_RESHARDS) - experts[..., None] * ~shared
        # The backward of the head. Where gradients are reduced once, its own are counted with all others; in a pipeline
        # without gathers so are those of a table that is the embedding's too.
        head = np.where(ends > 0, behind + self.after["working"], 0.0)[..., None]
        head = head - self.after["left"][:, None] * (once | (piped and not self.gathers))
        return np.maximum(np.maximum(kept[..., None], layer), head), later[..., None], several[..., None]

    def _tail(self, layers: Any) -> Any:
        """An amount [K, V] of the last layer of each stage's last chunk, [S, J, V]; 0 where the chunk has none."""
        return self.pipelines.tails @ (layers * ~self.parted)

    def _kept(self) -> tuple[Any, Any]:
        """Saved activations in flight, and how many micro-batches of chunks those are: [S, J, V]."""
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
        """Seconds of a step: the critical path, and what is before and after the micro-batches: [S, V, U]."""
        import numpy as np

        ways, costs, contention = self.pipelines, self.bounds.costs, self.bounds.costs.clock.contention
        messages = Collectives(costs.clock, self.block, self.rates, self.at, ways, self.states)
        count = self.block.micro_batches[:, None].astype(float)
        ahead, back, weights = (self._work(name) for name in ("forward", "backward", "weights"))
        launch, launch_back = self._work("launch"), self._work("launch_back")
        saved, saved_back = self._experts_overlapped() if self.paired else (0.0, 0.0)
        ahead, back = ahead - saved, back - saved_back
        gather, again, reduce = messages.per_micro_batch()
        begin, end, overlapped = messages.once()
        if self.gathers:
            several = (self.zero_mode == ZERO3_RESHARDS) | (self.block.pipeline == 1)
            ahead = ahead + self._copies("unpack") * several
            back = back + self._copies("pack") * (self.zero_mode == ZERO3_RESHARDS)
        adding = self._accumulation() * (count > 1)  # but for the first
        back = back + adding * (1 - 1 / count)
        if self.block.pipeline == 1:
            # The streams of a rank on its own go on from one micro-batch to the next.
            path = count * perfectly_overlapped((ahead + back)[:, 0], (gather + again + reduce)[:, 0], contention)
            begin, end = begin[:, 0], end[:, 0]
        else:
            # A stage launches nothing of a micro-batch before its input has come (`forecast.predict.parallel_step`).
            forwards = np.maximum(perfectly_overlapped(ahead, gather, contention), launch)
            backwards = np.maximum(perfectly_overlapped(back, again + reduce, contention), launch_back)
            # What is gathered once comes block by block during the first forward.
            begin = np.maximum(0.0, begin[:, 0] - forwards[:, 0])
            # Of a single micro-batch the first stage's reductions are launched as a part of its backward.
            end = np.maximum(0.0, end[:, 0] - (count == 1) * (backwards - back)[:, 0])
            path = critical_path(
                forwards, backwards, weights * ways.zero_bubble[:, None, None, None],
                ahead=lambda seconds: _ahead(ways, seconds), micro_batches=count,
                chunks=ways.chunks[:, None, None, None], stages=ways.pipeline,
                sends=2 * ways.place[:, :, None, None] * messages.send(self._sent()),
                alone=(saved, saved_back), rounds_alone=ways.alone[:, :, None, None],
            ).max(axis=1)  # fmt: skip
        # What is reduced once overlaps the last backward.
        hidden = (back + adding / count) / ways.chunks[:, None, None, None]
        end = end + np.maximum(contention * overlapped, overlapped - hidden).max(axis=1)
        owned = self.states["owned"].max(axis=1)[:, None, :]
        total = path + begin + end + owned * costs.update_seconds + messages.updated()
        if self.block.pipeline == 1:
            # The program launches ahead of the device, and waits for it once a step.
            launching = count * (launch + launch_back)[:, 0] * np.where(self.zero_mode == ZERO2, ZERO2_LAUNCHES, 1.0)
            total = np.maximum(total, launching)
        return total * (1 + costs.slower)

    def _sent(self) -> Any:
        """Bytes from one stage to the next, [V]."""
        import numpy as np

        return np.where(self.bounds.divides_sends[self.block.variants], self.stream / self.block.tensor, self.stream)

    def _experts_shared(self) -> Any:
        return experts_shared(self.block, self.rates.shared[self.at])

    def _copies(self, name: str) -> Any:
        """Seconds of copies out of what is gathered or into what is reduced: [S, J, V, 1 or U]."""
        shared, total = self._experts_shared(), self._work(name)
        if shared.all():
            return total
        experts = self.gather[1] / self.gather.sum(axis=0)
        return total - (self.pipelines.layers @ (self.layers[name] * experts))[..., None] * ~shared

    def _experts_overlapped(self) -> Any:
        """Seconds of a forward's and of a backward's sends to experts that another one hides: [2, S, J, V, 1]."""
        ways, (after, layers) = self.pipelines, self.bounds.hidden[self.gathers]
        at, several = self.block.variants, self.block.micro_batches > 1
        total = ways.last[:, :, None] * after[:, None, None, at] + ways.layers @ layers[:, None, :, at]
        there = ways.paired[:, None] if self.block.pipeline > 1 else several[None]
        return (total * there[:, None])[..., None]

    def _accumulation(self) -> Any:
        """Seconds in which a micro-batch's gradients are added to others: [S, J, 1, U]."""
        import numpy as np

        alone = self.block.pipeline == 1
        each = np.array([self.bounds.costs.accumulation(mode, alone) for mode in self.zero_mode.tolist()])
        return (self.states["computed"] * each)[:, :, None]

    def _work(self, name: str) -> Any:
        """A micro-batch's seconds of one kind in all chunks of each stage: [S, J, V, 1]."""
        ways = self.pipelines
        total = ways.first[:, :, None] * self.before[name] + ways.last[:, :, None] * self.after[name]
        return (total + ways.layers @ self.layers[name])[..., None]


def _ahead(ways: Pipelines, seconds: Any) -> Any:
    """The seconds of all stages ahead of the last of each kind, [S, J, V, U]; of every kind one has as many."""
    size, most, *others = seconds.shape
    return (ways.before @ seconds.reshape(size, most, -1)).reshape(size, most, *others)


def _hidden(table: BlockCosts, contention: float) -> tuple[Any, Any]:
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

    return hidden(table.after), hidden(table.layers)
