"""Sharded parameters and gradients on a tape, as FSDP2 (torch 2.13) gathers, keeps and reduces them.

Each block is a separate group, and all parameters outside the blocks are one more, which stays gathered from the
first operation to the last. With ``zero = 2`` nothing is gathered, and gradients are
reduced block by block all the same (DeepSpeed and Megatron-LM reduce buckets, which are not the blocks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from trainledger.ledger.core.graph import Array, BlockLeaves, Leaf, ModelLeaves, component_of
from trainledger.ledger.core.recording import Hook
from trainledger.ledger.core.sizes import greater, is_one, several
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import COMMUNICATION, Group, Int
from trainledger.ledger.ops.adapters import stored
from trainledger.ledger.parallel.rank_plan import RankPlan
from trainledger.ledger.parallel.reduction import sum_over_tensor
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.recipe import Recipe


def formats(leaf: Leaf, recipe: Recipe) -> Iterator[tuple[Leaf, str, str]]:
    """The tensors that a parameter is stored in, each with the format of it and that in which FSDP2 gathers it."""
    precision, base_format = recipe.precision, None if recipe.lora is None else recipe.lora.base_format
    for each, dtype in stored(leaf, base_format, precision.parameters):
        yield each, dtype, precision.arriving if precision.copies == "gathered" else dtype


class Part:
    """The parameters of a unit that go over the same ranks; ``own`` are the trained elements of this rank's padded
    pieces, ``sent`` is what it sends of all pieces, of which ``narrowed`` bytes are copies in another format.
    ``stored`` are the bytes of all pieces as they are held, ``widest`` those of the largest that is narrowed.
    """

    def __init__(self, rank: RankPlan, group: Group, leaves: Sequence[Leaf]) -> None:
        self.group = group
        self.leaves = tuple(leaves)
        self.own: Int = sum(rank.piece(each) for each in leaves if each.trained)
        self.gradient: Array | None = None
        self.frozen_nbytes: Int = 0
        self.narrowed: Int = 0
        self.stored: Int = 0
        self.widest: Int = 0
        pieces: list[Array] = []
        for leaf in leaves:
            for each, dtype, sent in formats(leaf, rank.run.recipe):
                own = rank.piece(each)
                self.frozen_nbytes += 0 if leaf.trained else nbytes_in(own, dtype)
                pieces.append(Array(own, sent, None))
                self.stored += nbytes_in(own, dtype)
                if sent != dtype:
                    self.narrowed += pieces[-1].nbytes
                    self.widest = greater(self.widest, nbytes_in(own, dtype))
        # FSDP2 gathers parameters of several formats as bytes (torch 2.13, ``_get_all_gather_input_metadatas``).
        dtypes = {piece.dtype for piece in pieces}
        alike = len(dtypes) == 1
        sizes = (piece.elements if alike else piece.nbytes for piece in pieces)
        self.sent = Array(sum(sizes), dtypes.pop() if alike else "uint8", None)

    @property
    def padded(self) -> Int:
        return self.own * self.group.ranks


class Unit:
    """Parameters that are gathered and reduced together."""

    def __init__(self, rank: RankPlan, leaves: Sequence[Leaf], path: str) -> None:
        by_group: dict[str, list[Leaf]] = {}
        groups: dict[str, Group] = {}
        for leaf in leaves:
            group = rank.group_of(leaf)
            groups[group.axes] = group
            by_group.setdefault(group.axes, []).append(leaf)
        self.parts = tuple(Part(rank, groups[axes], each) for axes, each in by_group.items())
        self.gathered = tuple(part for part in self.parts if not is_one(part.group.ranks))
        self.path = path
        self.full: list[Array] = []


class FullySharded(Hook):
    """The parameters and gradients of a chunk of layers on a rank while it runs."""

    def __init__(self, tape: Tape, rank: RankPlan, leaves: ModelLeaves) -> None:
        self.tape = tape
        self.rank = rank
        self.gathers = rank.gathers
        self.offload = rank.offload(tape.backend)
        self.reshards = rank.layout.reshards
        # torch's pipelines gather once, add up whole gradients, and reduce them when the last micro-batch is over.
        self.once = rank.layout.pipeline > 1 and not (self.gathers and self.reshards)
        self.leaves = leaves
        self.ahead: int = rank.layout.prefetch
        self.dtype = tape.precision.arriving
        self.root = Unit(rank, leaves.outside, "") if leaves.outside else None
        self.units: dict[int, Unit] = {}
        self.whole: list[tuple[Leaf, Int]] = []  # experts that no other rank has, and how often each comes
        self.order: list[Unit] = []
        for segment in leaves.segments:
            for _, count, blocks in segment.rounds(""):
                pattern = [self._unit_of(block, count) for block in blocks]
                self.units |= {id(block): unit for block, unit in zip(blocks, pattern, strict=True)}
                # A round that counts for several is there as often as the prefetch looks behind.
                rounds = 1 if is_one(count) else 2 + self.ahead // len(pattern)
                self.order += pattern * rounds
        self.arrived: list[Array] = []
        self.waiting: deque[list[Array]] = deque()
        self.reduced: list[Array] = []

    def _unit_of(self, block: BlockLeaves, count: Int) -> Unit:
        """A block's parameters without experts that no other rank has."""
        leaves = tuple(block.all())
        if self.rank.whole_experts:
            self.whole += [(leaf, count) for leaf in leaves if component_of(leaf.path) == "experts"]
            leaves = tuple(leaf for leaf in leaves if component_of(leaf.path) != "experts")
        return Unit(self.rank, leaves, "layers.*")

    # Gathering

    def _gather(self, unit: Unit) -> list[Array]:
        with self.tape.at(unit.path):
            return [self._gather_part(part) for part in unit.gathered]

    def _gather_part(self, part: Part) -> Array:
        sent, narrowed = (part.sent, part.narrowed) if self.offload != "parameters" else (self._from_host(part), 0)
        (gathered,) = self.tape.collective(
            "all_gather",
            part.group,
            sent.nbytes * part.group.ranks,
            reads=[sent],
            overlap="compute",
            category=COMMUNICATION,
            makes=[(sent.elements * part.group.ranks * several(part.group.ranks), sent.dtype)],
            scratch=narrowed,
        )
        return gathered

    def _from_host(self, part: Part) -> Array:
        """A rank's pieces on the device: each is copied as it is stored, and then cast (torch 2.13, FSDPParam's
        ``all_gather_inputs``)."""
        (arrived,) = self.tape.emit(
            "to_device",
            "transfer",
            reads=[Array(part.stored, "uint8", None)],
            makes=[(part.sent.elements, part.sent.dtype)],
            overlap="compute",
            category=COMMUNICATION,
            scratch=part.widest,
        )
        return arrived

    def _copy_out(self, unit: Unit, flat: list[Array]) -> None:
        with self.tape.at(unit.path):
            for part, buffer in zip(unit.gathered, flat, strict=True):
                self._copy_out_part(unit, part, buffer)

    def _copy_out_part(self, unit: Unit, part: Part, buffer: Array) -> None:
        elements = part.sent.elements * part.group.ranks * several(part.group.ranks)
        # Out of the flat buffer into one of the unsharded parameters (fsdp::split_with_sizes_copy).
        copied = self.tape.make("split_with_sizes_copy", "copy", buffer, elements=elements, category=COMMUNICATION)
        unit.full.append(copied)

    def total(self, amount: Callable[[Part], Int]) -> Int:
        """An amount of each unit's parts, added up."""
        total: Int = 0 if self.root is None else sum(amount(part) for part in self.root.parts)
        for segment in self.leaves.segments:
            parts = (part for block in segment.blocks for part in self.units[id(block)].parts)
            total += segment.count * sum(amount(part) for part in parts)
        return total

    def own_elements(self) -> Int:
        """Trained elements of this rank's pieces, padding included."""
        whole = sum(leaf.elements * count for leaf, count in self.whole if leaf.trained)
        return self.total(lambda part: part.own) + whole

    @property
    def frozen_nbytes(self) -> Int:
        """Bytes of what is not trained: this rank's pieces, and experts that no other rank has."""
        dtype = self.rank.run.recipe.precision.parameters
        whole = sum(nbytes_in(leaf.elements, dtype) * count for leaf, count in self.whole if not leaf.trained)
        return self.total(lambda part: part.frozen_nbytes) + whole

    def drop_gradients(self) -> None:
        """Free all gradients."""
        for unit in (*self.units.values(), *([self.root] if self.root is not None else [])):
            for part in unit.parts:
                part.gradient = None
        for leaf, _ in self.whole:
            leaf.gradient = None

    def step_begins(self) -> None:
        """Gather all parameters for the whole step, where that is done once."""
        if self.once:
            self._everywhere(self._before_forward)
            self.arrived = []

    def step_ends(self) -> None:
        """Reduce all gradients, where that is done once."""
        if self.once:
            with self.tape.during("backward"):
                self._everywhere(self._after_backward)
            self.reduced = []

    def _everywhere(self, act: Callable[[Unit], None]) -> None:
        for index, segment in enumerate(self.leaves.segments):
            for name, count, blocks in segment.rounds(f"layers {index}"):
                with self.tape.loop(name, count):
                    for block in blocks:
                        act(self.units[id(block)])
        if self.root is not None:
            act(self.root)

    # Forward

    def begins(self) -> None:
        """Gather the parameters outside the blocks."""
        if self.root is not None and not self.once:
            self._before_forward(self.root)

    def ends(self) -> None:
        """Free what a forward without a backward has gathered."""
        self.arrived = []
        if self.root is not None:
            self.root.full = []

    def _before_forward(self, unit: Unit) -> None:
        if not self.gathers or unit.full:
            return
        # In forward a flat buffer lives until the next one is copied out, of this block or the next, as FSDP2 overlaps
        # that copy with the next gather (torch 2.13, _fsdp_param_group.py, wait_for_unshard: "save a reference to the
        # current all-gather result to free after the next copy-out").
        with self.tape.at(unit.path):
            for part in unit.gathered:
                flat = self._gather_part(part)
                self.arrived = []
                self._copy_out_part(unit, part, flat)
                self.arrived = [flat]

    # Backward

    def _before_backward(self, unit: Unit) -> None:
        if not self.gathers:
            return
        if not unit.full:
            # In backward the copy overlaps the reduction before it, so the buffer is freed with the copy (the same
            # comment there).
            flat = self.waiting.popleft() if self.waiting else self._gather(unit)
            self._copy_out(unit, flat)
            del flat
        if self.reshards:
            place = max(index for index, each in enumerate(self.order) if each is unit)
            while len(self.waiting) < self.ahead and place > len(self.waiting):
                self.waiting.append(self._gather(self.order[place - 1 - len(self.waiting)]))

    def _before_all_backward(self) -> None:
        if self.gathers and self.root is not None and not self.root.full:
            # Let go by another micro-batch's backward, where forwards ran ahead.
            self._copy_out(self.root, self._gather(self.root))
        if self.gathers and self.reshards and self.order:
            self.waiting.append(self._gather(self.order[-1]))

    def _after_backward(self, unit: Unit) -> None:
        """Free the unit's parameters and sum its gradients over the ranks, each keeping its piece."""
        tape, precision = self.tape, self.tape.precision
        gradients = [
            [_taken(leaf) for leaf in each.leaves if (leaf.buffer or leaf.gradient) is not None] for each in unit.parts
        ]
        for each in unit.parts:
            for leaf in each.leaves:
                if leaf.trained:
                    sum_over_tensor(tape, self.rank, leaf, self.dtype)
        unit.full = []
        # FSDP2 waits for a reduction after the next block's backward, and holds its input until then
        # (reduce_scatter_states).
        self.reduced = []
        with self.tape.at(unit.path):
            for part, arrived in zip(unit.parts, gradients, strict=True):
                if not arrived:
                    continue
                if is_one(part.group.ranks):  # experts that are on one rank only
                    makes = [(part.own, precision.gradients)]
                    (own,) = tape.emit("copy_", "copy", reads=arrived, makes=makes)
                    arrived.clear()
                    self._keep(part, own)
                    del own
                    continue
                makes = [(part.padded * several(part.group.ranks), precision.gradients)]
                # All gradients of a block are copied into one buffer, which NCCL reduces at once
                # (foreach_reduce_scatter_copy_in).
                (flat,) = tape.emit("chunk_cat", "copy", reads=arrived, makes=makes, category=COMMUNICATION)
                last = arrived[-1]  # FSDP2's foreach_reduce names it to its end
                arrived.clear()
                nbytes = Array(part.padded, precision.gradients, None).nbytes
                (own,) = tape.collective(
                    "reduce_scatter",
                    part.group,
                    nbytes,
                    reads=[flat],
                    makes=[(part.own, precision.gradients)],
                    overlap="compute",
                    category=COMMUNICATION,
                )
                self.reduced.append(flat)
                del flat
                self._keep(part, own)
                del own, last

    def _keep(self, part: Part, own: Array) -> None:
        """This rank's piece of the gradient, summed over the replicas too, is kept or added to what is there."""
        tape = self.tape
        tape.all_reduce(self.rank.replicas, own, overlap="compute")
        if self.offload is not None:
            part.gradient = tape.added_on_host(part.gradient, own)
        elif part.gradient is None:
            part.gradient = own.of("gradients").of_each_round()
        else:
            tape.change("add_", part.gradient, own)

    def backward_is_over(self) -> None:
        """Wait for all reductions after the last unit's backward."""
        if self.once:
            return
        with self.tape.during("backward"):
            if self.root is not None:
                self._after_backward(self.root)
            self._everywhere(self._finish)
        self.reduced = []
        self.waiting.clear()  # what was gathered ahead for a block that no gradient reaches

    def _finish(self, unit: Unit) -> None:
        """Reductions that no input gradient starts, of blocks before which nothing is trained; the root's come first
        (torch 2.13, ``_root_post_backward_final_callback``)."""
        if any(leaf.gradient is not None for part in unit.parts for leaf in part.leaves):
            self._after_backward(unit)
        unit.full = []

    # The graph

    def block_input(self, leaves: BlockLeaves, x: Array) -> Array:
        """A block's input: its parameters are gathered; when the input's gradient exists, the block's gradients do."""
        unit = self.units[id(leaves)]
        if self.once:
            return x
        self._before_forward(unit)
        return self._with_gradient(x, lambda: self._after_backward(unit))

    def block_output(self, leaves: BlockLeaves, x: Array) -> Array:
        """A block's output: its parameters are freed, and gathered again when the output's gradient exists."""
        unit = self.units[id(leaves)]
        if self.once:
            return x
        if self.reshards and self.tape.phase != "recompute":
            unit.full = []
        return self._with_gradient(x, lambda: self._before_backward(unit))

    def model_output(self, x: Array) -> Array:
        """The chunk's output, or the logits: the forward of the parameters is over."""
        self.arrived = []
        return self._with_gradient(x, self._before_all_backward)

    def _with_gradient(self, x: Array, act: Callable[[], None]) -> Array:
        """x, with an action once its gradient exists."""

        def backward(g: Array) -> list[Array | None]:
            act()
            return [g]

        return x.view(node=self.tape.node([x.node], (), backward))


def _taken(leaf: Leaf) -> Array:
    """A whole parameter's gradient, which is freed; a buffer of gradients is not."""
    if leaf.buffer is not None:
        return leaf.buffer
    gradient, leaf.gradient = leaf.gradient, None
    assert gradient is not None
    return gradient.of("scratch")
