"""The whole model on a tape: embedding, blocks, head, multi-token prediction and loss, as in `engine.nn.transformer`.

Sizes: B sequences, T tokens, S tokens of a module of multi-token prediction, D d_model,
H query heads, G key-value heads, K head width, F d_ff, V rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

from trainledger.ledger.core.graph import Array, BlockLeaves, ModelLeaves, SegmentLeaves
from trainledger.ledger.core.sizes import Sizes, is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.memory.checkpointing import Offload, checkpointed, recompute_from_input
from trainledger.ledger.model.attention import Angles, Choice, Shared
from trainledger.ledger.model.attention_core import Masks, held_masks, masks
from trainledger.ledger.model.block import block, compose
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.loss import (
    cross_entropy,
    loss,
    megatron_cross_entropy,
    megatron_cross_entropy_in_place,
    with_loss,
)
from trainledger.ledger.ops.norms import norm
from trainledger.ledger.parallel.tensor import (
    columns_gathered,
    embedded,
    enter,
    scatter,
    tensor_group,
    vocab_parallel_loss,
)
from trainledger.spec.layers import LayerKind, angles_of, expert_layers, mtp_kind, rotary_modules, windows_of
from trainledger.spec.layers_of_backward import kinds_that_learn
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import Selective

Members = tuple[tuple[BlockLeaves, Shared], ...]  # blocks, each with what it shares with others of its kind


def run_layers(
    tape: Tape, sizes: Sizes, leaves: ModelLeaves, x: Array, angles: dict[str, Angles], masks: Masks, recipe: Recipe
) -> Array:
    """All blocks one after the other; ``angles`` are the rotary ones by the module that has them, masks by window."""
    choices, shares = [Choice()], sizes.spec.indexer is not None and sizes.spec.indexer.every > 1

    def run_of(blocks: tuple[BlockLeaves, ...]) -> Callable[[Array], Array]:
        """A function that runs these blocks: it keeps only what they share with others of their kind."""
        shared: list[Shared] = []
        for kind in (block_leaves.kind for block_leaves in blocks):
            name = angles_of(sizes.spec, kind)
            choices[0] = Choice() if kind.chooses else choices[0]
            mask = choices[0] if shares else masks.get(kind.window)
            shared.append((None if name is None else angles[name], mask))
        return partial(_run, tape, sizes, tuple(zip(blocks, shared, strict=True)))

    first = [x]  # no name here keeps it alive while the blocks run
    del x
    again = recipe.activation_checkpointing
    if again.kind == "offload":
        shared = [*chain(*angles.values()), *(mask for mask in masks.values() if mask is not None)]
        with tape.hooked(Offload(tape, shared)):
            return _run_groups(tape, leaves, first.pop(), run_of, checkpointed)
    if again.kind == "from-start":
        rounds = [one for segment in leaves.segments for one in segment.rounds("layers")]
        return recompute_from_input(tape, rounds, first.pop(), lambda x, blocks: run_of(blocks)(x))
    keep = again.keep or () if isinstance(again, Selective) else ()
    checked = partial(checkpointed, keep=keep, offload=again.offload, on_host=again.inputs == "host")
    return _run_groups(tape, leaves, first.pop(), run_of, checked)


def _run(tape: Tape, sizes: Sizes, members: Members, x: Array) -> Array:
    for leaves, shared in members:
        x = tape.block_input(leaves, x)
        x = block(tape, sizes, leaves, x, shared)
        x = tape.block_output(leaves, x)
    return x


RunOf = Callable[[tuple[BlockLeaves, ...]], Callable[[Array], Array]]


def _run_groups(tape: Tape, leaves: ModelLeaves, x: Array, run_of: RunOf, checked: Callable[..., Array]) -> Array:
    for index, segment in enumerate(leaves.segments):
        for name, count, blocks in segment.rounds(f"layers {index}"):
            with tape.loop(name, count):
                for again, group in _groups(segment, blocks) if tape.graph else ((False, (each,)) for each in blocks):
                    run = run_of(group)
                    x = checked(tape, run, x) if again else run(x)
    return x


def _groups(segment: SegmentLeaves, blocks: tuple[BlockLeaves, ...]) -> Iterator[tuple[bool, tuple[BlockLeaves, ...]]]:
    first = 0
    for group in segment.groups:
        yield group.again, blocks[first : first + group.size]
        first += group.size


PATH = "mtp.*"
SharedOf = Callable[[Sizes, LayerKind], Shared]


def mtp_loss(
    tape: Tape, sizes: Sizes, leaves: ModelLeaves, h: Array, e: Array, recipe: Recipe,
    head: Callable[[Array, Int], Array], shared: SharedOf,
) -> Array:  # fmt: skip
    """The sum of the modules' mean losses; h is the output of the last block, e the input of the first."""
    total: Array | None = None
    for ahead in range(1, sizes.spec.n_mtp_layers + 1):
        own, part, parts = _own(sizes, leaves, ahead - 1), sizes, (h, e)
        if not sizes.of_megatron:  # which moves tokens on and keeps as many (roll_tensor)
            part = replace(sizes, T=sizes.T - 1 - ahead)
            size = part.rows * sizes.spec.d_model
            parts = op.leading(tape, h, size), op.leading(tape, e, size)
        h = _module(tape, part, own, *parts, recipe, shared)
        del parts
        loss = _loss(tape, part, own, h, recipe, head)
        total = loss if total is None else op.add(tape, total, loss)
    assert total is not None, "there is no module"
    return total


def _own(sizes: Sizes, leaves: ModelLeaves, index: int) -> BlockLeaves:
    prefix = f"mtp.{index}."
    named = {name.removeprefix(prefix): leaf for name, leaf in leaves.after.items() if name.startswith(prefix)}
    return BlockLeaves(mtp_kind(sizes.spec), named)


def _module(tape: Tape, sizes: Sizes, own: BlockLeaves, h: Array, e: Array, recipe: Recipe, shared: SharedOf) -> Array:
    D = sizes.spec.d_model
    inner = {name.removeprefix("block."): leaf for name, leaf in own.named.items() if name.startswith("block.")}
    block = BlockLeaves(own.kind, inner)

    def run(x: Array) -> Array:
        with tape.at(f"{PATH}.block"):
            return compose(tape, sizes, block, x, theirs)

    with tape.at(PATH):
        parts = [norm(tape, sizes, e, own.named, "enorm"), norm(tape, sizes, h, own.named, "hnorm")]
        wide = "fp32" if any(part.dtype == "fp32" for part in parts) else parts[0].dtype
        joined = op.concatenate(tape, [op.cast(tape, part, wide) for part in parts])
        del parts  # the call holds what it was given until it is over
        with tape.at("eh_proj"):
            joined = enter(tape, sizes, joined)
            x = op.linear(tape, joined, own["eh_proj.weight"], None, sizes.rows, 2 * D, D // sizes.layout.tensor)
            x = scatter(tape, sizes, columns_gathered(tape, sizes, x))
        del joined
    theirs = shared(sizes, own.kind)
    return checkpointed(tape, run, x) if recipe.activation_checkpointing.kind == "full" else run(x)


def _loss(
    tape: Tape, sizes: Sizes, own: BlockLeaves, h: Array, recipe: Recipe, head: Callable[[Array, Int], Array]
) -> Array:
    with tape.at(PATH):
        normed = norm(tape, sizes, h, own.named, "norm")
    targets = Array(sizes.rows, "int64", None)
    with tape.holding("logits and loss"):
        if recipe.of_megatron:
            logits = head(_entered(tape, sizes, normed), sizes.rows)
            with tape.at(f"{PATH}.loss"):
                return _megatron_loss(tape, sizes, logits, targets, recipe)
        logits = head(normed, sizes.rows)
        with tape.at(f"{PATH}.loss"):
            if not is_one(sizes.B) and not is_one(sizes.T):  # else the slice of targets is a view of one dim
                (targets,) = tape.emit("clone", "copy", reads=[targets], makes=[(sizes.rows, "int64")])
            return cross_entropy(tape, logits, targets, upcast=recipe.loss.upcast)


def forward(
    tape: Tape,
    sizes: Sizes,
    leaves: ModelLeaves,
    ids: Array,
    recipe: Recipe,
    received: Array | None = None,
    *,
    within: str = "",
) -> Array:
    """Token ids to the mean loss over them, or of preferences to the loss of each sequence.

    A part of a model begins with what it ``received``, and ends with what the next one reads; ``within`` is its path.
    """
    inside = within if recipe.loss.chunks is None else ""  # a loss that is part of the model is within it too
    with tape.at(within):
        op.gather(tape, leaves.outside)
    trained = [leaf for leaf in (leaves.head, leaves.after.get("lm_head.bias")) if leaf is not None and leaf.trained]

    def states() -> Array:
        with tape.at(inside):
            return hidden(tape, sizes, leaves, ids, recipe, received)

    def logits_of(x: Array, rows: Int) -> Array:
        with tape.at(inside):
            logits = head(tape, sizes, leaves, x, rows)
        op.drop_copies(leaves.outside)
        # A model that takes its loss itself, chunk by chunk, ends with that.
        return logits if recipe.loss.chunks is not None else tape.model_output(logits)

    if leaves.head is None:
        x = states()
        op.drop_copies(leaves.outside)
        return tape.model_output(x)
    # No name here keeps the hidden states alive while the loss is taken.
    if recipe.of_megatron:
        logits = logits_of(_entered(tape, sizes, states()), sizes.rows)
        with tape.at("loss"):
            return _megatron_loss(tape, sizes, logits, ids, recipe)
    if is_one(sizes.layout.tensor):
        sequences = sizes.B if recipe.objective.answers else None
        with tape.at("" if inside else within):
            value = loss(tape, recipe, states(), logits_of, trained, ids, sequences)
            return value if recipe.loss.chunks is None else tape.model_output(value)
    logits = logits_of(_entered(tape, sizes, states()), sizes.rows)
    with tape.at("loss"):
        return vocab_parallel_loss(tape, sizes, logits, ids, upcast=recipe.loss.upcast)


def _megatron_loss(tape: Tape, sizes: Sizes, logits: Array, ids: Array, recipe: Recipe) -> Array:
    if recipe.loss.kind == "in-place":
        return megatron_cross_entropy_in_place(tape, logits, ids, tensor_group(sizes))
    return megatron_cross_entropy(tape, logits, ids, tensor_group(sizes), compiled=recipe.loss.kind == "compiled")


def _entered(tape: Tape, sizes: Sizes, x: Array) -> Array:
    with tape.at("lm_head"):
        return enter(tape, sizes, x)


def hidden(
    tape: Tape, sizes: Sizes, leaves: ModelLeaves, ids: Array, recipe: Recipe, received: Array | None = None
) -> Array:
    """Token ids, or what was received, to what the head or the next part reads."""
    x = embed(tape, sizes, leaves, ids) if received is None else received
    del received
    angles = all_angles(tape, sizes)
    seen = masks(tape, sizes, windows_of(sizes.spec), ids)
    e = x if sizes.spec.n_mtp_layers and leaves.head is not None else None
    if e is not None and leaves.before == {}:  # the last stage of several has only seen what its layers read
        e = embed(tape, sizes, leaves, ids)
    held = _held(sizes, angles, seen, recipe)
    if held:
        # All blocks read the same angles and masks: they live until the backward of the first block is over.
        if x.node is None:  # of a frozen embedding
            tape.hold(held)
        x.node = tape.node([x.node], held, lambda g, *_: [g])
    del held
    first = [x]  # no name here keeps the first block's input alive while the others run
    del x
    x = run_layers(tape, sizes, leaves, first.pop(), angles, seen, recipe)
    del angles, seen
    if e is not None:
        own = partial(head, tape, sizes, leaves), partial(_shared, tape)
        value = mtp_loss(tape, sizes, leaves, x, e, recipe, *own)
        x = with_loss(tape, x, op.times_number(tape, value))
        del value, e
    if leaves.head is None or sizes.spec.norm_place == "after-add":
        return x
    return norm(tape, sizes, x, leaves.after, "norm")


def _held(sizes: Sizes, angles: dict[str, Angles], seen: Masks, recipe: Recipe) -> tuple[Array, ...]:
    """The rotary angles and masks that are kept for backward."""
    kinds = kinds_that_learn(sizes.spec, recipe)
    names = {angles_of(sizes.spec, kind) for kind in kinds}
    windows = {kind.window for kind in kinds if kind.attends}
    read = {window: mask for window, mask in seen.items() if window in windows}
    turning = chain(*(angle for name, angle in angles.items() if name in names))
    return (*turning, *held_masks(sizes, read, recipe))


def embed(tape: Tape, sizes: Sizes, leaves: ModelLeaves, ids: Array) -> Array:
    """Token ids to what the first block reads."""
    spec = sizes.spec
    table = leaves.before.get("embed_tokens.weight") or leaves.after.get("embed_tokens.weight") or leaves.head
    assert table is not None
    with tape.at("embed_tokens"):
        x = embedded(tape, sizes, op.embedding(tape, ids, table, spec.d_model))
    if spec.embedding_scale != 1:
        x = op.times_number(tape, x)
    if spec.positions.kind == "learned":
        x = op.add_positions(tape, x, leaves.before["embed_positions.weight"], sizes.T, spec.d_model)
    if spec.embedding_norm:
        x = norm(tape, sizes, x, leaves.before, "embed_norm")
    with tape.at("dropout"):
        x = op.dropout(tape, x, sizes.dropout)
    return scatter(tape, sizes, x) if spec.positions.kind == "learned" else x


def _shared(tape: Tape, sizes: Sizes, kind: LayerKind) -> Shared:
    """The angles and masks of one layer of a kind for so many tokens, made for it alone."""
    angles = all_angles(tape, sizes)
    seen = masks(tape, sizes, windows_of(sizes.spec))
    name = angles_of(sizes.spec, kind)
    return None if name is None else angles[name], seen.get(kind.window)


def all_angles(tape: Tape, sizes: Sizes) -> dict[str, Angles]:
    """The rotary angles that the layers read, by the module that has them."""
    modules = rotary_modules(sizes.spec)
    return {name: rotary(tape, name, sizes.T * (spec.rotary_size // 2)) for name, spec in modules.items()}


def rotary(tape: Tape, name: str, count: Int) -> Angles:
    """Cosines and sines of the positions in the format of the matmuls; in fp32 they are the model's buffers."""
    with tape.at(name):
        buffers = (Array(count, "fp32", None), Array(count, "fp32", None))
        return op.cast(tape, buffers[0], tape.compute_dtype), op.cast(tape, buffers[1], tape.compute_dtype)


def buffers_nbytes(spec: ModelSpec) -> Int:
    """Bytes of the buffers in fp32: cosines and sines of every position or ALiBi's slopes, and routers' corrections."""
    slopes = 4 * spec.attention.n_heads if spec.positions.kind == "alibi" else 0
    if spec.experts is not None and spec.experts.router.correction:
        slopes += 4 * spec.experts.n_experts * expert_layers(spec)
    pairs = sum(own.rotary_size // 2 for own in rotary_modules(spec).values())
    return 2 * 4 * spec.max_seq_len * pairs + slopes


def head(tape: Tape, sizes: Sizes, leaves: ModelLeaves, x: Array, rows: Int) -> Array:
    """The logits of so many tokens."""
    spec = sizes.spec
    assert leaves.head is not None
    with tape.at("lm_head"):
        bias = leaves.after.get("lm_head.bias")
        logits = op.linear(tape, x, leaves.head, bias, rows, spec.d_model, spec.head_rows)
        if spec.logit_scale != 1:
            logits = op.times_number(tape, logits)
        if spec.logit_softcap is not None:
            logits = op.softcap(tape, logits)
    return logits.of("logits and loss")
