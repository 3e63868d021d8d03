"""The micro-batches of a step on a tape: forward and backward of each, in the order of the pipeline's schedule.

How many are in flight is in `schedule`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

from trainledger.ledger.core.graph import Array, Gradients, Node, Port, component_of
from trainledger.ledger.core.sizes import Sizes, is_one, sizes_of
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import COMMUNICATION, Group, Int
from trainledger.ledger.model.forward import forward
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.adapters import adapters_off, frozen_nbytes
from trainledger.ledger.ops.linear import cast_weights, copies_nbytes
from trainledger.ledger.ops.objective import (
    desirability,
    distance,
    distillation,
    odds_ratio,
    preference,
    ranking,
    softened,
)
from trainledger.ledger.optimizers.states import empty_buffers, set_formats
from trainledger.ledger.parallel.expert import finish_gradients
from trainledger.ledger.parallel.fully_sharded import FullySharded
from trainledger.ledger.parallel.rank_plan import ChunkPlan, RankPlan
from trainledger.ledger.parallel.reduction import scatter_gradients, sum_over_replicas, sum_partial_gradients
from trainledger.ledger.parallel.schedule import in_flight_by_chunk
from trainledger.ledger.parallel.tensor import tensor_group
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.objective import Distillation


class Work:
    """A chunk of layers that a rank runs: its parameters, and what of them is sharded."""

    def __init__(self, tape: Tape, rank: RankPlan, sizes: Sizes, plan: ChunkPlan) -> None:
        self.tape = tape
        self.rank = rank
        self.sizes = sizes
        self.chunk, self.leaves = plan.chunk, plan.leaves
        recipe = rank.run.recipe
        fuses = recipe.gradient_fusion and not rank.gathers
        set_formats(self.leaves, tape.precision, keeps_copies=recipe.of_megatron, fuses=fuses)
        sharded = rank.sharded and rank.layout.zero > 1
        self._hold_gradients(sharded)
        self.sharded = FullySharded(tape, rank, self.leaves) if sharded else None
        self.reference = None
        beside = rank.run.reference
        if plan.reference is not None and beside is not None:
            sized = sizes_of(beside, tape.backend)
            with tape.computing_in(beside.recipe.precision):
                self.reference = Work(tape, replace(rank, run=beside), sized, ChunkPlan(plan.chunk, plan.reference))
            if self.reference.sharded is not None:
                self.reference.sharded.reshards = True  # no backward comes that would read the whole again

    def _hold_gradients(self, sharded: bool) -> None:
        """Sharded gradients come and go block by block; an interleaved pipeline adds up in buffers (Megatron-LM)."""
        # So does FSDP2 where it reduces once for all micro-batches, in the format that it reduces in (torch 2.13,
        # ``FSDPParam.to_accumulated_grad_if_needed``).
        precision, layout = self.tape.precision, self.rank.layout
        interleaved = len(self.rank.chunks) > 1
        once = self.rank.gathers and layout.pipeline > 1 and not layout.reshards
        widened = once and precision.gradients != precision.arriving
        self.buffered = interleaved or widened or (precision.gradient_buffers and not sharded)
        self.buffered = self.buffered or (self.rank.run.recipe.of_megatron and not sharded)
        for leaf in self.leaves.every():
            leaf.alone = self.rank.whole_experts and component_of(leaf.path) == "experts"
            if self.rank.gathers and not leaf.alone:
                leaf.dtype = precision.arriving
            leaf.buffer = Array(leaf.elements, precision.gradients, None) if self.buffered else None

    @property
    def buffers_nbytes(self) -> Int:
        """Bytes of the gradients that exist for the whole step."""
        return nbytes_in(self.leaves.elements(), self.tape.precision.gradients) if self.buffered else 0

    @property
    def parameters_nbytes(self) -> Int:
        """Bytes of the stored parameters: pieces as large as the largest, or whole and padded."""
        dtype = self.tape.precision.parameters
        if self.rank.gathers:
            assert self.sharded is not None
            return nbytes_in(self.sharded.own_elements(), dtype)
        if self.rank.sharded:
            groups = self.rank.by_group(self.leaves)
            return nbytes_in(sum(self.rank.pieces(some) * group.ranks for group, some in groups), dtype)
        return nbytes_in(self.leaves.elements(), dtype)

    @property
    def frozen_nbytes(self) -> Int:
        """Bytes of the weights that are not trained: pieces of them where they are gathered, else whole."""
        recipe, beside = self.rank.run.recipe, 0 if self.reference is None else self.reference.frozen_nbytes
        if recipe.lora is None and recipe.objective.reference != "device" and self.rank.run.model.indexer is None:
            return 0
        if self.sharded is not None and self.rank.gathers:
            return beside + self.sharded.frozen_nbytes
        base_format = None if recipe.lora is None else recipe.lora.base_format
        return beside + frozen_nbytes(self.leaves, base_format, recipe.precision.parameters)

    @property
    def copies_nbytes(self) -> Int:
        """Bytes of the weights that stay in 8 bits."""
        float8 = self.tape.precision.cached
        if float8 is None:
            return 0
        return copies_nbytes(self.leaves, float8)

    def step_begins(self) -> None:
        """Zero buffers, gather what is gathered once, cast weights that are cast once."""
        tape = self.tape
        if self.buffered:
            empty_buffers(tape, self.leaves)
        if self.sharded is not None:
            self.sharded.step_begins()
        if tape.precision.cached is not None:
            cast_weights(tape, self.leaves, tape.precision.cached)

    def step_ends(self) -> None:
        """Reduce what is reduced once a step."""
        if self.sharded is not None:
            self.sharded.step_ends()
            finish_gradients(self.tape, self.rank, self.leaves)
        else:
            sum_partial_gradients(self.tape, self.rank, self.leaves)
            if self.rank.sharded:
                scatter_gradients(self.tape, self.rank, self.leaves)
            else:
                sum_over_replicas(self.tape, self.rank, self.leaves)

    def drop_gradients(self) -> None:
        """Free pieces of gradients."""
        if self.sharded is not None:
            self.sharded.drop_gradients()

    def forward(self) -> Array:
        """The loss of a micro-batch, or what the next stage reads."""
        tape, run = self.tape, self.rank.run
        ids = Array(self.sizes.rows, "int64", None)
        autocast: AbstractContextManager[None] = nullcontext()
        if tape.precision.copies == "autocast":
            autocast = tape.autocast()
        with autocast, ExitStack() as stack:
            # Before the model's own forward, whose activations are then not there beside the reference's logits. TRL
            # runs it afterwards (1.16, trl/trainer/dpo_trainer.py, ``_compute_loss``).
            beside = self._beside(ids)
            stack.enter_context(self._sharding())
            if self.sharded is not None:
                self.sharded.begins()
            received = None if self.chunk.begins else self._receive()
            value = forward(tape, self.sizes, self.leaves, ids, run.recipe, received)
            del received
            if run.recipe.objective.kind != "next-token":
                beside.append(value)
                del value  # logits, which are freed within
                with tape.at("loss"):
                    value = self._compared(beside)
            beside.clear()
            if not self.chunk.ends:
                self._send(value)
                # What was sent is freed (Megatron-LM's deallocate_pipeline_outputs); the graph stays.
                value = Array(value.elements, value.dtype, None, value.node)
            elif not is_one(run.grad_accum):
                with tape.at("loss"):
                    value = op.divide_by_number(tape, value)
        return value

    def _beside(self, ids: Array) -> list[Array]:
        """What an objective compares with, taken without a graph: a teacher's log-probabilities, or the losses of a
        micro-batch's sequences under the reference and the distance from it of mismatched ones."""
        objective, tape = self.rank.run.recipe.objective, self.tape
        if objective.reference is None:
            return []
        if isinstance(objective, Distillation):
            logits = [self._of_reference(ids)]
            with tape.at("loss"):
                return [softened(tape, logits.pop(), objective, upcast=self.rank.run.recipe.loss.upcast)]
        losses = [self._of_reference(ids) for _ in range(1 + objective.mismatched)]
        if objective.mismatched:
            with tape.without_graph(), self._sharding():
                if self.sharded is not None:
                    self.sharded.begins()
                own = [forward(tape, self.sizes, self.leaves, ids, self.rank.run.recipe)]
            with tape.at("loss"):
                losses.append(distance(tape, losses.pop(), own.pop()))
        return losses

    def _compared(self, beside: list[Array]) -> Array:
        """The loss of preferences from those of sequences, or of distillation from logits, the last in the list."""
        objective, targets = self.rank.run.recipe.objective, Array(self.sizes.rows, "int64", None)
        if isinstance(objective, Distillation):
            return distillation(self.tape, beside, targets, objective, upcast=self.rank.run.recipe.loss.upcast)
        losses = beside.pop()
        if objective.kind == "reward":
            return ranking(self.tape, losses, targets, self.sizes.B, self.sizes.T)
        if objective.reference is None:
            return odds_ratio(self.tape, losses, targets)
        return (desirability if objective.mismatched else preference)(self.tape, losses, *beside)

    def _of_reference(self, ids: Array) -> Array:
        """The losses of a micro-batch's sequences under the frozen reference, or its logits of a teacher."""
        tape, beside = self.tape, self.reference
        if self.rank.run.recipe.objective.reference == "precomputed":
            return Array(self.sizes.B, "fp32", None)
        model, within = (self, "") if beside is None else (beside, "reference")
        recipe = model.rank.run.recipe
        own = tape.computing_in(recipe.precision)
        with tape.without_graph(), own, model._sharding(), adapters_off(model.leaves):
            if model.sharded is not None:
                with tape.at(within):
                    model.sharded.begins()
            losses = forward(tape, model.sizes, model.leaves, ids, recipe, within=within)
        if beside is not None and beside.sharded is not None:
            beside.sharded.ends()
        return losses

    def backward(self, value: Array) -> None:
        """Backward of a loss, or from the gradient that the next stage sends."""
        tape = self.tape
        scaled = value
        if self.chunk.ends and tape.precision.loss_scaling:
            with tape.at("loss"):
                scaled = op.times_constant(tape, value, Array(1, "fp32", None))
        with self._sharding(), tape.during("backward"):
            if self.chunk.ends:
                with tape.at("loss"):
                    seed = tape.make("ones_like", "copy", scaled)
                held = seed
            else:
                seed = self._received(value.elements, value.dtype)
                # The schedule keeps what it received to the end; a block must still free its gradient,
                # as the next round of the loop over equal blocks has another one. (One too many in the first round.)
                held = tape.make("held", "allocate", elements=seed.elements, dtype=seed.dtype, category="activations")
            tape.start(scaled, seed)
            del seed
            tape.backward()  # autograd holds the seed of a loss to the end, and so does a name here
        value.node = scaled.node = None
        del scaled, held
        if self.sharded is not None:
            self.sharded.backward_is_over()

    def _sharding(self) -> AbstractContextManager[None]:
        return nullcontext() if self.sharded is None else self.tape.hooked(self.sharded)

    # Stages

    def _group(self) -> Group:
        return Group("pipeline", self.rank.layout.pipeline)

    def _receive(self) -> Array:
        """The output of the stage before; its gradient goes back there."""
        x = self._received(self.sizes.stream_rows * self.sizes.spec.d_model, self.tape.precision.stream)

        def backward(g: Array) -> Gradients:
            self._send(g)
            return [g]

        x.node = self.tape.node([Port()], (), backward)
        return x

    def _received(self, elements: Int, dtype: str) -> Array:
        tape, whole, part = self.tape, nbytes_in(elements, dtype), elements // self._parts
        (x,) = tape.collective(
            "recv",
            self._group(),
            nbytes_in(part, dtype),
            makes=[(part, dtype)],
            overlap="compute",
            category="activations",
        )
        if self.rank.layout.split_sends:
            (x,) = tape.collective(
                "all_gather",
                tensor_group(self.sizes),
                whole,
                reads=[x],
                makes=[(elements, dtype)],
                category="activations",
            )
        return x

    def _send(self, x: Array) -> None:
        # Each rank sends 1/t of an activation, and the next stage gathers it (Narayanan et al. 2021, section 4.1).
        part = x.view(x.elements // self._parts)
        self.tape.collective(
            "send", self._group(), part.nbytes, reads=[part], overlap="compute", category=COMMUNICATION
        )

    @property
    def _parts(self) -> Int:
        """The ranks that each send a part of the same activation (Narayanan et al. 2021, section 4.1)."""
        layout = self.rank.layout
        return layout.tensor if layout.split_sends else 1


def run_micro_batches(works: tuple[Work, ...]) -> Array | None:
    """All micro-batches of a step: forwards up to the number in flight, one forward and one backward in turn, and the
    backwards that are left. The loss, where this rank takes it.

    Of an interleaved pipeline one chunk's micro-batches run after the other's, with those of the others in flight as
    the schedule has them when the last chunk begins its backwards.
    """
    rank, tape = works[-1].rank, works[-1].tape
    micro_batches = rank.run.grad_accum
    counts = in_flight_by_chunk(rank.layout, rank.stage, micro_batches)
    earlier = [InFlight(works[index], counts[index], f"in flight {index}") for index in range(len(works) - 1)]
    last = InFlight(works[-1], counts[-1] - 1, "in flight")
    for each in (*earlier, last):
        each.set_ahead()
    total = _forward_backward(works[-1], None)
    with _rounds(tape, "micro-batches", micro_batches - counts[-1]) as some:
        if some:
            total = _forward_backward(works[-1], total)
    last.catch_up()
    for index, each in reversed(list(enumerate(earlier))):
        with _rounds(tape, f"micro-batches {index}", micro_batches - each.count) as some:
            if some:
                each.work.backward(each.work.forward())
        each.catch_up()
    return total


def _forward_backward(work: Work, total: Array | None) -> Array | None:
    """One micro-batch; the loss so far comes in and goes out."""
    tape = work.tape
    value = work.forward()
    work.backward(value)
    if total is None or not work.chunk.ends:
        return value if work.chunk.ends else None
    with tape.during("other"), tape.at("loss"):
        return tape.pointwise("add", total, value)


class InFlight:
    """Forwards of a chunk whose backwards come later: each keeps its saved activations."""

    def __init__(self, work: Work, count: Int, name: str) -> None:
        self.work = work
        self.count = count
        self.name = name
        self._waiting: tuple[Array, list[Node]] | None = None

    def set_ahead(self) -> None:
        """The forwards; parameters outside the blocks are gathered before the first one and stay until a backward."""
        if self.work.sharded is not None:
            self.work.sharded.begins()
            self.work.sharded.arrived = []
        with _rounds(self.work.tape, self.name, self.count) as some:
            if some:
                self._waiting = self.work.forward(), self.work.tape.set_aside()

    def catch_up(self) -> None:
        """The backwards."""
        if self._waiting is None:
            return
        (value, nodes), self._waiting = self._waiting, None
        self.work.tape.take_up(nodes)
        with _rounds(self.work.tape, self.name, self.count):
            self.work.backward(value)
            del value


@contextmanager
def _rounds(tape: Tape, name: str, count: Int) -> Iterator[bool]:
    """A loop; False where it is known to be empty."""
    if is_one(count + 1):
        yield False
        return
    with tape.loop(name, count):
        yield True
