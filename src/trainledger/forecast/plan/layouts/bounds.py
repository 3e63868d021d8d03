"""Estimates of memory and time for very many layouts at once: bytes are never above the account, seconds near it.

Layouts that agree in their tensor, context, pipeline and expert ranks are a block: a table with a row for every variant
of what one device computes and a column for every way to share states, once for every way to run the pipeline. Memory
is the static memory of a rank, the saved activations in flight, and the peak of the backward of the last layer or of
the head. Time is the critical path through the pipeline with perfect overlap (`predict.pipeline.critical_path`,
`forecast.predict.clock.Clock.least`). All of it is read off the account of one micro-batch, whose sizes are arrays
(`forecast.plan.layouts.block_costs`).

Shapes: S ways to run the pipeline, J stages that differ, V variants, U ways to share states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainledger.forecast.plan.layouts.accounts import Progress
from trainledger.forecast.plan.layouts.block_costs import COLUMNS, BlockCosts, block_costs, class_of
from trainledger.forecast.plan.layouts.blocks import Block
from trainledger.forecast.plan.layouts.grid import ZERO3_RESHARDS, ZERO_MODES, Shape, runs_of
from trainledger.forecast.plan.layouts.stages import ROUNDING, Pipelines
from trainledger.forecast.predict.clock import Clock
from trainledger.forecast.predict.collective import placement
from trainledger.forecast.predict.pipeline import critical_path
from trainledger.forecast.predict.streams import perfectly_overlapped
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout, overlaps
from trainledger.spec.run import Run

BELOW = 0.998  # of the bytes: block costs pad parameters to the ranks of the account that they are read from
# What is reduced block by block, and not gathered, launches less than the account that costs are read from: 0.80 to 1
# of it in layouts drawn from eight kinds of run.
ZERO2_LAUNCHES = 0.75
ZERO3_KEEPS = ZERO_MODES.index((3, False))
ZERO1, ZERO2 = ZERO_MODES.index((1, None)), ZERO_MODES.index((2, None))
LARGE = float(2**44)  # bytes of a message whose time is all bandwidth, for any ranks


@frozen
class Rates:
    """Seconds of the collectives of the columns of some blocks: of each byte of a large message, and of layers.

    ``shared`` are the ranks that share states, those of ``expert`` the ones that hold the same experts. ``sum`` is over
    replicas. ``gather`` and ``reduce`` [K, U] are of one layer of each run; None where no parameters are gathered.
    """

    shared: Any
    one: Any
    expert: Any
    sum: Any
    gather: Any = None
    reduce: Any = None

    def at(self, columns: Any) -> Rates:
        """Of some columns alone."""
        return Rates(*(None if var is None else var[..., columns] for var in vars(self).values()))


@frozen
class Costs:
    """The machine: ``update_seconds`` of an element, ``adding_seconds`` of a gradient to another; slow nodes' share."""

    clock: Clock
    update_seconds: float
    adding_seconds: float
    slower: float = 0.0


class Bounds:
    """Estimates of blocks; what several blocks need is made once.

    ``wanted`` are the places of the shapes whose costs are needed where parameters are gathered block by block, and
    where they are not.
    """

    def __init__(
        self, run: Run, shapes: Sequence[Shape], costs: Costs, *, wanted: Mapping[bool, Collection[int]], backend: str,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        import numpy as np

        self.run, self.shapes, self.costs, self.backend = run, shapes, costs, backend
        self.runs = runs_of(run)
        self.paired = overlaps(run.layout, "experts")
        self.segments = np.array([shape.checkpointing == "segments" for shape in shapes])
        self.divides_sends = np.array([run.layout.split_sends and not shape.sequence_parallel for shape in shapes])
        self.tables = {gathers: self._table(gathers, some, progress) for gathers, some in wanted.items() if some}
        self.hidden = {each: table.hidden(costs.clock.contention) for each, table in self.tables.items()}

    def _table(self, gathers: bool, wanted: Collection[int], progress: Progress | None) -> BlockCosts:
        """The costs of shapes, from one account for each class of them."""
        table = BlockCosts.empty(len(self.shapes), len(self.runs))
        classes: dict[tuple[Any, ...], list[int]] = {}
        for index in sorted(wanted):
            classes.setdefault(class_of(self.shapes[index]), []).append(index)
        last: tuple[Any, ...] = ()
        for done, key in enumerate(sorted(classes)):
            if progress is not None:
                progress("kinds of layers accounted", done, len(classes))
            if key[:-1] != last:  # classes that differ in what is recomputed alone run the same operations
                self.costs.clock.forget()
            last, places = key[:-1], classes[key]
            some = [self.shapes[index] for index in places]
            table.put(block_costs(self.run, some, self.costs.clock, gathers=gathers, backend=self.backend), places)
        self.costs.clock.forget()
        return table

    def rates_of(self, blocks: Sequence[Block]) -> Iterator[Rates]:
        """The rates of the collectives of each block; the columns of all are computed together, as each's are few."""
        import numpy as np

        clock, gathered = self.costs.clock, self.tables.get(True)
        assert clock.fabric is not None
        per_node, sizes = clock.fabric.devices_per_node, [len(block.shardings) for block in blocks]

        def by_block(values: Any) -> Any:
            return np.repeat(np.array(values), sizes, axis=-1)

        axes = {
            name: by_block([getattr(block, name) for block in blocks])
            for name in ("tensor", "context", "pipeline", "expert")
        }
        shards, replicas = np.array(
            [(sharding.shard, sharding.replicate) for some in blocks for sharding in some.shardings]
        ).T
        layout = Layout()
        vars(layout).update(axes, shard=shards, replicate=replicas)
        shared = shards * axes["context"]
        fewer = np.maximum(1, shared // axes["expert"])
        near = placement(layout, "shard x context", shared, per_node)
        alike = placement(layout, "shard x context / expert", fewer, per_node)
        far = placement(layout, "replicate", replicas, per_node)
        one, expert = (clock.collective("all_gather", LARGE, place) / LARGE for place in (near, alike))
        rates = Rates(shared, one, expert, clock.collective("all_reduce", LARGE, far) / LARGE)
        if gathered is not None:
            first = [block.variants[0] for block in blocks]
            gather = reduce = np.zeros((gathered.gather.shape[1], len(shared)))
            for which, (place, ranks) in enumerate(((near, shared), (alike, fewer))):
                payload, reduced = (
                    by_block(gathered.gather[which][:, first]),
                    by_block(gathered.reduce[which][:, first]),
                )
                there = ((payload > 0) | (reduced > 0)) & (ranks > 1)
                if there.any():
                    gather = gather + there * clock.collective("all_gather", payload, place)
                    reduce = reduce + there * clock.collective("reduce_scatter", reduced, place)
                    reduce = reduce + there * clock.collective("all_reduce", reduced / ranks, far)
            rates = replace(rates, gather=gather, reduce=reduce)
        at = 0
        for size in sizes:
            yield rates.at(slice(at, at := at + size))

    def of(self, block: Block, ways: Pipelines, states: dict[str, Any], rates: Rates) -> tuple[Any, Any, Any]:
        """Bytes at the peak of the heaviest stage, the same with what an allocator reserves, seconds: [S, V, U].

        ``states`` is the static memory of the stages (`States.of`).
        """
        import numpy as np

        gathered = block.zero_modes >= ZERO3_RESHARDS
        found = np.empty((3, len(ways.ways), len(block.variants), len(gathered)))
        for gathers in self.tables:
            at = np.flatnonzero(gathered == gathers)
            if len(at):
                some = {name: state[..., at] for name, state in states.items()}
                part = _Part(self, block, ways, gathers, at, some, rates.at(at))
                found[..., at] = *part.memory(), part.seconds()
        nbytes, reserved, seconds = found
        return nbytes, reserved, seconds


class _Part:
    """The columns of a block whose parameters are gathered block by block, or those whose are not."""

    def __init__(
        self, bounds: Bounds, block: Block, ways: Pipelines, gathers: bool, at: Any, states: dict[str, Any],
        rates: Rates,
    ) -> None:  # fmt: skip
        import numpy as np

        self.bounds, self.block, self.pipelines, self.gathers = bounds, block, ways, gathers
        self.states, self.rates = states, rates
        self.zero_mode = block.zero_modes[at]
        table, which = bounds.tables[gathers], block.variants
        self.before, self.layers, self.after = (  # [V], [K, V] and [V] for each name
            dict(zip(COLUMNS, each[..., which], strict=True)) for each in (table.before, table.layers, table.after)
        )
        self.gather, self.stream = table.gather[..., which], table.stream[which]
        self.paired = bounds.paired and block.expert > 1
        self.piped = block.pipeline > 1
        self.parted = bounds.segments[which] & self.piped  # a stage may have a part of a segment
        self.received = table.received[which] * self.piped
        # Where other ranks hold the same experts; elsewhere they are neither gathered nor reduced.
        self.shares_experts = rates.shared > block.expert if block.expert > 1 else np.ones(1, bool)
        precision = bounds.run.recipe.precision
        self.gradient_nbytes, self.parameter_nbytes = (
            nbytes_in(8, each) / 8 for each in (precision.gradients, precision.parameters)
        )

    # Memory

    def memory(self) -> tuple[Any, Any]:
        """Bytes at the peak of the heaviest stage, without and with what its allocator reserves: [S, V, U] both."""
        import numpy as np

        static = {name: state[:, :, None] for name, state in self.states.items()}  # [S, J, 1, U]
        fixed, gradients = static["resident"] - ROUNDING, static["gradients"]
        first, later, several = self._activations()
        worst = first + (fixed + static["gathered"] + static["outside"]) + several * gradients
        worst = BELOW * np.maximum(worst, later + (fixed + gradients + static["gathered"] * self.piped))
        nbytes = worst.max(axis=1)
        if self.bounds.backend == "cpu" or self.bounds.run.recipe.framework != "torch":
            return nbytes, nbytes
        # FSDP2's buffers in separate streams (`ledger.memory.reserved`), without the allocator's fragmentation.
        reserved = static["outside"] + static["owned"] * self.gradient_nbytes
        return nbytes, (worst + 0.97 * reserved * (self.zero_mode == ZERO3_RESHARDS)).max(axis=1)

    def _activations(self) -> tuple[Any, Any, Any]:
        """Activations when the first backward runs, and a later one; and whether gradients are there at the first.

        [S, J, V, U or 1] each.
        """
        import numpy as np

        ways, piped = self.pipelines, self.piped
        counts, inverse = np.unique(self.block.micro_batches, return_inverse=True)
        held = np.stack([ways.held(int(count), paired=self.paired) for count in counts], axis=2)[:, :, inverse]
        kept, in_flight = self._sum(held), held[..., -1]
        own = self._sum(ways.last_chunks[:, :, None, :])
        ends = ways.ends[:, :, None]
        later = np.maximum(0.0, np.where(in_flight > 1, kept - own, 0.0))
        several = self.block.micro_batches * ways.chunks[:, None, None] > in_flight
        once = self.zero_mode > ZERO3_RESHARDS if self.gathers and piped else np.zeros(1, bool)
        behind = kept - ends * self.after["kept"]
        # The backward of the last layer: the head's has left the gradient of its input, and not its input.
        layer = (behind - ends * self.stream + self._tail(self.layers["working"]))[..., None] * ~once
        if self.gathers:
            block, experts = self._tail(self.gather[0]), self._tail(self.gather[1])
            gathered = block[..., None] + experts[..., None] * self.shares_experts
            # Gradients of experts that no other rank has do not wait for the block's reduction.
            layer = layer + gathered * (self.zero_mode == ZERO3_RESHARDS) - experts[..., None] * ~self.shares_experts
        # The backward of the head. Where gradients are reduced once, its own are counted with all others; in a pipeline
        # without gathers so are those of a table that is the embedding's too.
        head = np.where(ends > 0, behind + self.after["working"], 0.0)[..., None]
        head = head - self.after["left"][:, None] * (once | (piped and not self.gathers))
        return np.maximum(np.maximum(kept[..., None], layer), head), later[..., None], several[..., None]

    def _tail(self, layers: Any) -> Any:
        """An amount [K, V] of the last layer of each stage's last chunk, [S, J, V]; 0 where the chunk has none."""
        return self.pipelines.tails @ (layers * ~self.parted)

    def _sum(self, held: Any) -> Any:
        """Bytes of so many layers, embeddings, heads and messages, as `Pipelines.held` has them."""
        import numpy as np

        nbytes = np.stack([*self.layers["kept"], self.before["kept"], self.after["kept"], self.received])
        return np.einsum("sjvk,kv->sjv", held[..., :-1], nbytes)

    # Time

    def seconds(self) -> Any:
        """Seconds of a step: the critical path, and what is before and after the micro-batches: [S, V, U]."""
        import numpy as np

        ways, costs, mode = self.pipelines, self.bounds.costs, self.zero_mode
        contention = costs.clock.contention
        count = self.block.micro_batches[:, None].astype(float)
        ahead, back, weights = (self._work(name) for name in ("forward", "backward", "weights"))
        launch, launch_back = self._work("launch"), self._work("launch_back")
        saved, saved_back = self._experts_overlapped() if self.paired else (0.0, 0.0)
        ahead, back = ahead - saved, back - saved_back
        gather, again, reduce, begin, end, overlapped = self._collectives()
        if self.gathers:
            ahead = ahead + self._copies("unpack") * ((mode == ZERO3_RESHARDS) | (not self.piped))
            back = back + self._copies("pack") * (mode == ZERO3_RESHARDS)
        # Gradients of a micro-batch, but for the first's, are added to those before, where no block reduces them.
        adds = (mode != ZERO3_RESHARDS) & (self.piped | (mode <= ZERO1)) & (self.bounds.run.recipe.lora is None)
        adding = (self.states["computed"] * adds * costs.adding_seconds)[:, :, None] * (count > 1)
        back = back + adding * (1 - 1 / count)
        if self.piped:
            # A stage launches nothing of a micro-batch before its input has come (`forecast.predict.parallel_step`).
            forwards = np.maximum(perfectly_overlapped(ahead, gather, contention), launch)
            backwards = np.maximum(perfectly_overlapped(back, again + reduce, contention), launch_back)
            # What is gathered once comes block by block during the first forward.
            begin = np.maximum(0.0, begin[:, 0] - forwards[:, 0])
            # Of a single micro-batch the first stage's reductions are launched as a part of its backward.
            end = np.maximum(0.0, end[:, 0] - (count == 1) * (backwards - back)[:, 0])
            path = critical_path(
                forwards,
                backwards,
                weights * ways.zero_bubble[:, None, None, None],
                ahead=lambda seconds: _ahead(ways, seconds),
                micro_batches=count,
                chunks=ways.chunks[:, None, None, None],
                stages=ways.pipeline,
                sends=2 * ways.place[:, :, None, None] * self._send_seconds(),
                alone=(saved, saved_back),
                rounds_alone=ways.alone[:, :, None, None],
            ).max(axis=1)
        else:
            # The streams of a rank on its own go on from one micro-batch to the next.
            path = count * perfectly_overlapped((ahead + back)[:, 0], (gather + again + reduce)[:, 0], contention)
            begin, end = begin[:, 0], end[:, 0]
        # What is reduced once overlaps the last backward.
        hidden = (back + adding / count) / ways.chunks[:, None, None, None]
        end = end + np.maximum(contention * overlapped, overlapped - hidden).max(axis=1)
        owned = self.states["owned"].max(axis=1)[:, None, :]
        total = path + begin + end + owned * costs.update_seconds + self._updated()
        if not self.piped:
            # The program launches ahead of the device, and waits for it once a step.
            launching = count * (launch + launch_back)[:, 0] * np.where(mode == ZERO2, ZERO2_LAUNCHES, 1.0)
            total = np.maximum(total, launching)
        return total * (1 + costs.slower)

    def _collectives(self) -> tuple[Any, ...]:
        """Seconds of what is gathered and reduced, [S, J, 1, U] each: in a forward of a micro-batch, in its backward,
        reductions of its backward; before the first forward, after the last backward, and during it.
        """
        import numpy as np

        mode, rates, layers = self.zero_mode, self.rates, self.pipelines.layers
        gather = reduce = np.zeros((1, 1, 1))
        if rates.gather is not None:
            gather, reduce = layers @ rates.gather, layers @ rates.reduce
        reshards, keeps, two = mode == ZERO3_RESHARDS, mode == ZERO3_KEEPS, mode == ZERO2
        alone = not self.piped
        nbytes = self.states["computed"] * self.gradient_nbytes
        scattered = self._shared_seconds(self.gradient_nbytes) + nbytes * rates.sum / rates.shared
        found = (
            (reshards | (keeps & alone), gather + self.states["outside"] * rates.one),
            (reshards, gather),
            (reshards | ((keeps | two) & alone), reduce),
            (keeps & self.piped, gather),
            ((keeps | two) & self.piped, reduce),
            (mode <= ZERO1, np.where(mode == ZERO1, scattered, nbytes * rates.sum)),
        )
        return tuple(np.where(there, seconds, 0.0)[:, :, None] for there, seconds in found)

    def _shared_seconds(self, nbytes: float) -> Any:
        """All parameters of each stage once over the ranks that share them, at so many bytes each: [S, J, U]."""
        experts = self.states["experts"]
        return nbytes * ((self.states["computed"] - experts) * self.rates.one + experts * self.rates.expert)

    def _updated(self) -> Any:
        """What nothing overlaps at the end, [S, 1, U]: gathering what was updated, where each rank needs all of it, and
        summing gradients of experts that no other rank that shards has over replicas.
        """
        import numpy as np

        whole = (self.zero_mode == ZERO1) | (self.zero_mode == ZERO2)
        whole = whole & (not overlaps(self.bounds.run.layout, "parameters"))
        experts = self.states["experts"] * self.gradient_nbytes * self.rates.sum
        seconds = np.where(whole, self._shared_seconds(self.parameter_nbytes).max(axis=1), 0.0)
        summed = (self.zero_mode > ZERO2) & ~self.shares_experts
        return (seconds + np.where(summed, experts.max(axis=1), 0.0))[:, None, :]

    def _send_seconds(self) -> Any:
        """Seconds of a message from one stage to the next, [V, 1]."""
        import numpy as np

        block, clock = self.block, self.bounds.costs.clock
        assert clock.fabric is not None
        layout = Layout(tensor=block.tensor, context=block.context, pipeline=block.pipeline, shard=block.data_ranks)
        place = placement(layout, "pipeline", block.pipeline, clock.fabric.devices_per_node)
        nbytes = np.where(self.bounds.divides_sends[block.variants], self.stream / block.tensor, self.stream)
        return clock.collective("send", nbytes, place)[:, None]

    def _copies(self, name: str) -> Any:
        """Seconds of copies out of what is gathered or into what is reduced: [S, J, V, 1 or U]."""
        total = self._work(name)
        if self.shares_experts.all():
            return total
        experts = self.gather[1] / self.gather.sum(axis=0)
        return total - (self.pipelines.layers @ (self.layers[name] * experts))[..., None] * ~self.shares_experts

    def _experts_overlapped(self) -> Any:
        """Seconds of a forward's and of a backward's sends to experts that another one hides: [2, S, J, V, 1]."""
        ways, (after, layers) = self.pipelines, self.bounds.hidden[self.gathers]
        at, several = self.block.variants, self.block.micro_batches > 1
        total = ways.last[:, :, None] * after[:, None, None, at] + ways.layers @ layers[:, None, :, at]
        there = ways.paired[:, None] if self.piped else several[None]
        return (total * there[:, None])[..., None]

    def _work(self, name: str) -> Any:
        """A micro-batch's seconds of one kind in all chunks of each stage: [S, J, V, 1]."""
        ways = self.pipelines
        total = ways.first[:, :, None] * self.before[name] + ways.last[:, :, None] * self.after[name]
        return (total + ways.layers @ self.layers[name])[..., None]


def _ahead(ways: Pipelines, seconds: Any) -> Any:
    """The seconds of all stages ahead of the last of each kind, [S, J, V, U]; of every kind one has as many."""
    size, most, *others = seconds.shape
    return (ways.before @ seconds.reshape(size, most, -1)).reshape(size, most, *others)
