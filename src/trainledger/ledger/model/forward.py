"""The whole model on a tape: embedding, blocks, head and loss, as in `engine.nn.transformer`.

Sizes: B sequences, T tokens, D d_model, H query heads, G key-value heads, K head width, F d_ff, V rows of the
embedding.
"""

from __future__ import annotations

from functools import partial
from itertools import chain

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import ModelLeaves
from trainledger.ledger.core.sizes import Sizes, is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.attention import Angles, Shared
from trainledger.ledger.model.blocks import run_layers
from trainledger.ledger.model.mask import Masks, held_masks, masks
from trainledger.ledger.model.mtp import mtp_loss
from trainledger.ledger.ops import megatron
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.loss import loss, with_loss
from trainledger.ledger.ops.norms import norm
from trainledger.ledger.parallel.tensor import embedded, enter, scatter, tensor_group, vocab_parallel_loss
from trainledger.spec.layers import LayerKind, angles_of, expert_layers, kinds_that_learn, rotary_modules, windows_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe


def forward(
    tape: Tape, sizes: Sizes, leaves: ModelLeaves, ids: Array, recipe: Recipe, received: Array | None = None
) -> Array:
    """Token ids to the mean loss over them.

    A part of a model begins with what it ``received`` from the part before, and ends with what the next one reads.
    """
    op.gather(tape, leaves.outside)
    trained = [each for each in (leaves.head, leaves.after.get("lm_head.bias")) if each is not None and each.trained]

    def logits_of(x: Array, rows: Int) -> Array:
        logits = head(tape, sizes, leaves, x, rows)
        op.drop_copies(leaves.outside)
        # A model that takes its loss itself, chunk by chunk, ends with that.
        return logits if recipe.loss.chunks is not None else tape.model_output(logits)

    if leaves.head is None:
        x = hidden(tape, sizes, leaves, ids, recipe, received)
        op.drop_copies(leaves.outside)
        return tape.model_output(x)

    # No name here keeps the hidden states alive while the loss is taken.
    if recipe.of_megatron:
        logits = logits_of(_entered(tape, sizes, hidden(tape, sizes, leaves, ids, recipe, received)), sizes.rows)
        with tape.at("loss"):
            if recipe.loss.kind == "in-place":
                return megatron.cross_entropy_in_place(tape, logits, ids, tensor_group(sizes))
            fused = recipe.loss.kind == "compiled"
            return megatron.cross_entropy(tape, logits, ids, tensor_group(sizes), compiled=fused)
    if is_one(sizes.layout.tensor):
        value = loss(tape, recipe, hidden(tape, sizes, leaves, ids, recipe, received), logits_of, trained, ids)
        return value if recipe.loss.chunks is None else tape.model_output(value)
    logits = logits_of(_entered(tape, sizes, hidden(tape, sizes, leaves, ids, recipe, received)), sizes.rows)
    with tape.at("loss"):
        return vocab_parallel_loss(tape, sizes, logits, ids, upcast=recipe.loss.upcast)


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
    del seen
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
    names = {angles_of(sizes.spec, each) for each in kinds}
    windows = {each.window for each in kinds}
    read = {window: mask for window, mask in seen.items() if window in windows}
    turning = chain(*(each for name, each in angles.items() if name in names))
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
    return None if name is None else angles[name], seen[kind.window]


def all_angles(tape: Tape, sizes: Sizes) -> dict[str, Angles]:
    """The rotary angles that the layers read, by the module that has them."""
    return {name: rotary(tape, sizes, name) for name in rotary_modules(sizes.spec)}


def rotary(tape: Tape, sizes: Sizes, name: str) -> Angles:
    """Cosines and sines of the positions in the format of the matmuls; in fp32 they are the model's buffers."""
    count = sizes.T * (sizes.spec.rotary_size // 2)
    with tape.at(name):
        buffers = (Array(count, "fp32", None), Array(count, "fp32", None))
        return op.cast(tape, buffers[0], tape.compute_dtype), op.cast(tape, buffers[1], tape.compute_dtype)


def buffers_nbytes(spec: ModelSpec) -> Int:
    """Bytes of the buffers in fp32: cosines and sines of every position or ALiBi's slopes, and routers' corrections."""
    slopes = 4 * spec.attention.n_heads if spec.positions.kind == "alibi" else 0
    if spec.experts is not None and spec.experts.router.correction:
        slopes += 4 * spec.experts.n_experts * expert_layers(spec)
    return len(rotary_modules(spec)) * 2 * 4 * spec.max_seq_len * (spec.rotary_size // 2) + slopes


def head(tape: Tape, sizes: Sizes, leaves: ModelLeaves, x: Array, rows: Int) -> Array:
    """The logits of so many tokens."""
    spec = sizes.spec
    assert leaves.head is not None
    with tape.at("lm_head"):
        bias = leaves.after.get("lm_head.bias")
        logits = op.linear(tape, x, leaves.head, bias, rows, spec.d_model, spec.padded_vocab)
        if spec.logit_scale != 1:
            logits = op.times_number(tape, logits)
        if spec.logit_softcap is not None:
            logits = op.softcap(tape, logits)
    return logits.of("logits and loss")
