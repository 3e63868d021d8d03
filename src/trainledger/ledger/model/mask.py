"""The masks of attention's scores on a tape: the same expressions as in `engine.nn.positions`.

Sizes: B sequences, T tokens, H query heads.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.attention_core import refusals, written_out_here
from trainledger.ledger.ops import operations as op
from trainledger.spec.layers import kinds_again
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe

Masks = dict[int | None, Array | None]


def masks(tape: Tape, sizes: Sizes, windows: Iterable[int | None], ids: Array | None = None) -> Masks:
    """The masks that the layers need, by window; None where a kernel needs no mask.

    Those that stop at documents are made of token ``ids``.

    FlashAttention has windows and ALiBi (the package of Dao 2023), PyTorch's kernels only causal attention.
    `InvalidInput` where the recipe's attention cannot do what the model needs.
    """
    _refuse(tape, sizes)
    if sizes.attention == "flash":
        return dict.fromkeys(windows)
    always = written_out_here(sizes) or sizes.spec.positions.kind == "alibi" or sizes.documents
    made: Masks = {}
    found: Masks = {}
    with tape.at("masks"):
        others = _of_other_documents(tape, sizes, ids) if sizes.documents else None
        for window in windows:
            narrow = None if window is None or hides_nothing(window, sizes.T) else window
            if narrow not in made:
                made[narrow] = _mask(tape, sizes, narrow, others) if always or narrow is not None else None
            found[window] = made[narrow]
    return found


def masks_of_last(tape: Tape, sizes: Sizes, windows: Iterable[int | None]) -> Masks:
    """For the last token as the only query, which attends to all keys: ALiBi's penalties, or nothing."""
    _refuse(tape, sizes)
    found: Masks = dict.fromkeys(windows)
    if sizes.spec.positions.kind != "alibi" or sizes.attention == "flash":
        return found
    if set(found) != {None}:
        rule = "with ALiBi is not decoded: keys of a window are stored out of order"
        raise InvalidInput([Problem("model.attention.window", sizes.spec.attention.window, rule, "none")])
    S, H = sizes.cached_tokens, sizes.spec.attention.n_heads
    assert S is not None
    position = tape.make("arange", "copy", elements=S, dtype="fp32")
    bias = tape.pointwise("mul", Array(H, "fp32", None), position, elements=H * S)
    return {None: op.cast(tape, bias, tape.compute_dtype)}


def _refuse(tape: Tape, sizes: Sizes) -> None:
    """Raise `InvalidInput` where the recipe's attention cannot do what the model needs."""
    problems = list(refusals(sizes, tape.compute_dtype))
    if problems:
        raise InvalidInput(problems)


def held_masks(sizes: Sizes, masks: Masks, recipe: Recipe) -> tuple[Array, ...]:
    """Those kept for backward: a fused kernel reads them again, and so does a recomputed block."""
    read = list(masks.values())
    if written_out_here(sizes):
        windows = {each.window for each in kinds_again(sizes.spec, recipe)}
        read = [mask for window, mask in masks.items() if window in windows]
    return tuple({id(each): each for each in read if each is not None}.values())


def hides_nothing(window: int, tokens: Int) -> bool:
    """Whether a sequence is known to fit the window; symbols, and arrays with a longer one, are assumed not to."""
    fits = tokens <= window
    return bool(fits.all()) if hasattr(fits, "all") else bool(fits == True)  # noqa: E712 (a relation is no bool)


def _of_other_documents(tape: Tape, sizes: Sizes, ids: Array | None) -> Array:
    """A byte for each query and key that are of two documents."""
    assert ids is not None, "documents are found by their token ids"
    document = tape.make(
        "cumsum", "reduction", tape.pointwise("eq", ids, dtype="bool"), dtype="int64", flops=ids.elements
    )
    return tape.pointwise("ne", document, document, elements=sizes.rows * sizes.T, dtype="bool")


def _mask(tape: Tape, sizes: Sizes, window: int | None, others: Array | None) -> Array:
    mask = _of_all_sequences(tape, sizes, window)
    if others is None:
        return mask
    return tape.pointwise("masked_fill", mask, others, elements=sizes.B * mask.elements)


def _of_all_sequences(tape: Tape, sizes: Sizes, window: int | None) -> Array:
    T, dtype, heads = sizes.T, tape.compute_dtype, sizes.spec.attention.n_heads
    hidden = tape.make("full", "copy", elements=T * T, dtype=dtype)
    mask = tape.make("triu", "copy", hidden)
    if window is not None:
        left = tape.make("tril", "copy", hidden)
        tape.change("add_", mask, left)
        del left
    del hidden
    if sizes.spec.positions.kind != "alibi":
        return mask
    position = tape.make("arange", "copy", elements=T, dtype="fp32")
    distance = tape.pointwise("sub", position, position, elements=T * T)
    bias = tape.pointwise("mul", Array(heads, "fp32", None), distance, elements=heads * T * T)
    del distance
    bias = op.cast(tape, bias, dtype)
    tape.change("add_", bias, mask)
    return bias
