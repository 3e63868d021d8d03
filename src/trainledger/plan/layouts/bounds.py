"""Memory and time of very many layouts at once, from the pieces of their parts: quick, and never above the account.

Layouts that agree in their tensor, context, pipeline and expert ranks are a block: a table with a row for every variant
of what one device computes and a column for every way to share states, once for every way to run the pipeline. Memory
is the most of a few moments that every step has; time is the longest path through the pipeline with what cannot be
hidden beside it. Both leave out what only the account knows.

Shapes: S ways to run the pipeline, J stages that differ, V variants, U ways to share states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.dtypes import nbytes_in
from trainledger.frozen import frozen
from trainledger.plan.layouts.adding import Adding
from trainledger.plan.layouts.grid import RESHARDS, Shape, Spread
from trainledger.plan.layouts.messages import GRADIENTS, Messages, Rates
from trainledger.plan.layouts.pieces import WORK, Pieces, Work, class_of, pieces_of
from trainledger.plan.layouts.stages import Pipelines
from trainledger.plan.layouts.states import AMOUNTS, ROUNDING, States
from trainledger.plan.layouts.times import Times
from trainledger.spec.precision import precision_of
from trainledger.spec.recompute import layer_runs
from trainledger.spec.run import Run

BELOW = 0.999  # of the bytes: pieces of parameters are filled up to the ranks of the account that the pieces are from


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
    spreads: tuple[Spread, ...]
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
    adding: Adding
    slower: float = 0.0
    contention: float = 0.0


class Bounds:
    """Bounds of blocks; what several blocks need is made once."""

    def __init__(
        self, run: Run, shapes: Sequence[Shape], states: States, costs: Costs, *, gathers: Sequence[bool], backend: str
    ) -> None:
        self.run = run
        self.shapes = shapes
        self.states = states
        self.costs = costs
        self.runs = [each.count * len(each.kinds) for each in layer_runs(run.model, run.recipe)]
        self.tables = {each: self._table(each, backend) for each in gathers}
        precision = precision_of(run.recipe)
        formats = precision.gradients, precision.parameters
        self.gradient_nbytes, self.parameter_nbytes = (nbytes_in(8, each) / 8 for each in formats)

    def _table(self, gathers: bool, backend: str) -> Pieces:
        """The pieces of all shapes, from one account for each class of them."""
        import numpy as np

        classes: dict[tuple[Any, ...], list[int]] = {}
        for index, shape in enumerate(self.shapes):
            classes.setdefault(class_of(shape), []).append(index)
        size, runs = len(self.shapes), len(self.runs)
        whole = Pieces(
            Work(*np.zeros((len(WORK), size))), tuple(Work(*np.zeros((len(WORK), size))) for _ in range(runs)),
            Work(*np.zeros((len(WORK), size))), np.zeros(size),
            *(tuple((np.zeros(size), np.zeros(size)) for _ in range(runs)) for _ in range(2)),
        )  # fmt: skip
        for places in classes.values():
            some = [self.shapes[index] for index in places]
            found = pieces_of(self.run, some, self.costs.times, gathers=gathers, backend=backend)
            pairs = [(whole.before, found.before), (whole.after, found.after)]
            for into, of in (*pairs, *zip(whole.layers, found.layers, strict=True)):
                for name, values in vars(into).items():
                    values[places] = getattr(of, name)
            whole.stream[places] = found.stream
            for name in ("gather", "reduce"):
                for both, of_run in zip(getattr(whole, name), getattr(found, name), strict=True):
                    for values, of_group in zip(both, of_run, strict=True):
                        values[places] = of_group
        return whole

    def of(self, block: Block, pipelines: Pipelines) -> Bound:
        """The bounds of a block."""
        import numpy as np

        parts, rates = [], Rates(self, block)
        for gathers in self.tables:
            at = [index for index, each in enumerate(block.spreads) if (each.sharing >= RESHARDS) == gathers]
            if at:
                parts.append((at, _Part(self, block, pipelines, gathers, at, rates)))
        if len(parts) == 1:
            ((_, part),) = parts
            return Bound(*part.memory(), part.seconds())
        shape = (len(pipelines.ways), len(block.variants), len(block.spreads))
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
        self.sharing = np.array([block.spreads[index].sharing for index in at])
        pieces, variants = bounds.tables[gathers], block.variants
        self.before, self.after = (_rows(each, variants) for each in (pieces.before, pieces.after))
        self.layers = [
            {**_rows(each, variants), "block": sum(gather)[variants] / 2}
            for each, gather in zip(pieces.layers, pieces.gather, strict=True)
        ]
        self.stream = pieces.stream[variants]
        self.standing = self._standing()

    def _standing(self) -> dict[str, Any]:
        """What stands on each stage, [S, J, U]."""
        import numpy as np

        ways, states = self.pipelines, self.bounds.states
        size, most, _ = ways.layers.shape
        table = np.empty((len(AMOUNTS), size, most, len(self.columns)))
        for sharing in set(self.sharing.tolist()):
            at = np.flatnonzero(self.sharing == sharing)
            if self.block.pipeline == 1:
                table[..., at] = states.whole(sharing)[:, None, None, self.columns[at]]
                continue
            for interleaved in set(ways.interleaved):
                which = np.flatnonzero(np.array(ways.interleaved) == interleaved)
                found = states.stages(sharing, interleaved, self.columns[at], ways.layers[which], ways.first[which],
                                      ways.last[which])  # fmt: skip
                table[:, which[:, None, None], np.arange(most)[None, :, None], at] = found
        return dict(zip(AMOUNTS, table, strict=True))

    # Memory

    def memory(self) -> tuple[Any, Any]:
        """Bytes at the peak of the heaviest stage, and the states of it: [S, V, U] both."""
        import numpy as np

        stands = self.standing
        resident, gradients = stands["resident"] - ROUNDING, stands["gradients"]
        held = stands["gathered"] + stands["outside"]  # while micro-batches run
        at_end = stands["gathered"] * (self.block.pipeline > 1)
        first, later, several = self._activations()
        worst: Any = None
        states: Any = None
        for stage in range(resident.shape[1]):
            fixed, more = resident[:, stage, None, :], gradients[:, stage, None, :]
            nbytes = first[stage] + (fixed + held[:, stage, None, :]) + several[:, stage, :, None] * more
            nbytes = np.maximum(nbytes, later[:, stage, :, None] + (fixed + more + at_end[:, stage, None, :]))
            if worst is None:
                worst, states = nbytes, fixed + more
            else:
                worst, states = np.maximum(worst, nbytes), np.maximum(states, fixed + more)
        return worst * BELOW, np.broadcast_to(states, worst.shape)

    def _activations(self) -> tuple[list[Any], Any, Any]:
        """What micro-batches hold when the first backward begins, and a later one; and whether gradients are there.

        For each stage [S, V, U or 1] the first, [S, J, V] the others.
        """
        import numpy as np

        ways = self.pipelines
        kept, in_flight = self._kept()
        own = self._sum(ways.last_chunks()[:, :, None, :])
        head = ways.ends[:, :, None] * self.after["kept"]
        later = np.where(in_flight > 1, kept - own, 0.0)
        several = self.block.micro_batches * ways.chunks[:, None, None] > in_flight
        once = (self.sharing > RESHARDS) & (self.block.pipeline > 1)
        first = []
        for stage in range(kept.shape[1]):
            base = kept[:, stage] - head[:, stage]
            # Where gradients are reduced once, those of the head are where all others are.
            left = (ways.ends[:, stage, None] * self.after["left"])[..., None] * ~once
            moment = np.maximum(kept[:, stage], base + self._tail(stage, "again"))[..., None]
            quiet = (base + self._tail(stage, "quiet"))[..., None]
            # Where parameters stay gathered, those of a layer have gone when its gradients are reduced.
            quiet = quiet - (self.sharing > RESHARDS) * self._tail(stage, "block")[..., None]
            moment = np.maximum(moment, quiet * ~once + left)
            after = np.where(ways.ends[:, stage, None] > 0, base + self.after["quiet"], 0.0)[..., None]
            moment = np.maximum(moment, after - self.after["left"][:, None] * once)
            if self.gathers:
                # What the layer behind has reduced is still there only from the last layer but one on.
                longer = ways.longer[:, stage, None]
                beside = longer * (base - self._tail(stage, "kept") + self._tail(stage, "most"))
                moment = np.maximum(moment, beside[..., None] * (self.sharing == RESHARDS) + left)
            first.append(moment)
        return first, np.maximum(later, 0.0), several

    def _tail(self, stage: int, name: str) -> Any:
        """What the last layer of a stage's last chunk has of something, [S, V]; 0 where the chunk has no layer."""
        import numpy as np

        tail = self.pipelines.tail[:, stage, None]
        total: Any = 0.0
        for run, layer in enumerate(self.layers):
            total = total + np.where(tail == run, layer[name], 0.0)
        return total

    def _kept(self) -> tuple[Any, Any]:
        """Bytes kept in flight, and how many micro-batches of chunks that are: [S, J, V]."""
        import numpy as np

        counts, inverse = np.unique(self.block.micro_batches, return_inverse=True)
        held = np.stack([self.pipelines.held(int(each)) for each in counts], axis=2)[:, :, inverse]
        return self._sum(held), held[..., -1]

    def _sum(self, held: Any) -> Any:
        """Bytes of so many layers, embeddings, heads and messages, as `Pipelines.held` has them."""
        several = len(self.layers)
        total = held[..., several] * self.before["kept"] + held[..., several + 1] * self.after["kept"]
        if self.block.pipeline > 1:
            total = total + held[..., several + 2] * self.stream
        for run, layer in enumerate(self.layers):
            total = total + held[..., run] * layer["kept"]
        return total

    # Time

    def seconds(self) -> Any:
        """Seconds of a step: the longest path through the stages, what comes before and after it: [S, V, U]."""
        import numpy as np

        ways, costs = self.pipelines, self.bounds.costs
        messages = Messages(self.bounds, self.block, self.rates, self.at, ways, self.standing)
        count = self.block.micro_batches[:, None].astype(float)
        ahead, back, weights = (self._work(name) for name in ("forward", "backward", "weights"))
        launch, launch_back = self._work("launch"), self._work("launch_back")
        gather, again, reduce = messages.per_micro_batch()
        if self.gathers:
            several = (self.sharing == RESHARDS) | (self.block.pipeline == 1)
            ahead = ahead + self._work("unpack") * several
            back = back + self._work("pack") * (self.sharing == RESHARDS)
        back = back + self._adding() * np.maximum(0.0, 1 - 1 / count)
        if self.block.pipeline == 1:
            # The streams of a rank on its own go on from one micro-batch to the next.
            messages_beside = gather[:, 0] + again[:, 0] + reduce[:, 0]
            computing = ahead[:, 0] + back[:, 0] + costs.contention * messages_beside
            path = count * np.maximum(computing, messages_beside)
        else:
            # A stage launches nothing of a micro-batch before that has come (`predict.layout_time`).
            reducing = again + reduce
            forwards = np.maximum(np.maximum(ahead + costs.contention * gather, gather), launch)
            backwards = np.maximum(np.maximum(back + costs.contention * reducing, reducing), launch_back)
            both, chunks = forwards + backwards, ways.chunks[:, None, None]
            late = np.minimum(count, ways.pipeline) * weights  # of zero-bubble: what waits for the end
            send, path = messages.send(), None
            for stage in range(ahead.shape[1]):
                first = last = np.zeros(1)
                for other in range(ahead.shape[1]):
                    before = ways.before[:, stage, other, None, None]
                    if before.any():
                        first = first + before * forwards[:, other]
                        last = last + before * (backwards - ways.zero_bubble[:, None, None, None] * weights)[:, other]
                last = np.maximum(0.0, last - ways.zero_bubble[:, None, None] * late[:, stage])
                whole = count * both[:, stage] + 2 * ways.place[:, stage, None, None] * send + (first + last) / chunks
                path = whole if path is None else np.maximum(path, whole)
        begin, end, beside = messages.once()
        hidden = back / ways.chunks[:, None, None, None]
        exposed = np.maximum(costs.contention * beside, beside - hidden)
        end = end[:, 0] + np.max(exposed, axis=1)
        owned = np.max(self.standing["owned"], axis=1)[:, None, :]
        close = owned * costs.update_seconds + messages.updated(owned)
        total = path + begin[:, 0] + end + close
        if self.block.pipeline == 1:
            # The program launches ahead of the device, and waits for it once a step. What is reduced block by block
            # launches less than what these pieces are from.
            launching = count * (launch + launch_back)[:, 0] * (self.sharing != GRADIENTS)
            total = np.maximum(total, launching)
        return total * (1 + costs.slower)

    def _adding(self) -> Any:
        """Seconds in which a micro-batch's gradients are added to others: [S, J, 1, U]."""
        import numpy as np

        ways, adding = self.pipelines, self.bounds.costs.adding
        each = np.array([
            [adding.seconds(sharing, interleaved=how, pipeline=ways.pipeline) for sharing in self.sharing.tolist()]
            for how in ways.interleaved
        ])  # fmt: skip
        return (self.standing["computed"] * each[:, None])[:, :, None]

    def _work(self, name: str) -> Any:
        """A micro-batch's seconds of one kind in all chunks of each stage: [S, J, V, 1]."""
        ways = self.pipelines
        total = ways.first[:, :, None] * self.before[name] + ways.last[:, :, None] * self.after[name]
        for run, layer in enumerate(self.layers):
            total = total + ways.layers[:, :, run, None] * layer[name]
        return total[..., None]


def _rows(work: Work, variants: Any) -> dict[str, Any]:
    return {name: values[variants] for name, values in vars(work).items()}
