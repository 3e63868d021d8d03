"""Each of our tensors in the files of a model type of transformers: layouts, and names by the family's record.

Shapes: H query heads, G key-value heads, K head width, E experts, F their inner width, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainledger.spec.convert.huggingface.family import ExpertNames, Names
from trainledger.spec.model import ModelSpec

Tensors = list[Tensor]


@dataclass(frozen=True)
class Form:
    """How some tensors of ours become some of theirs, and the other way."""

    theirs: Callable[[Tensors], Tensors]
    ours: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Piece:
    """Tensors of theirs that hold the same numbers as tensors of ours."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    form: Form


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def as_modules(names: Names) -> Names:
    """The same where the experts are stacked, as the modules of transformers 5 have them; files rarely do."""
    block = {our: their.replace("block_sparse_moe", "mlp") for our, their in names.block.items()}
    return replace(names, block=block, experts=ExpertNames(each=None, interleaved=names.experts.interleaved))


def pieces(names: Names, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Piece]:
    """Every tensor of ours (by name, with its shape), once; their names without the prefix."""
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        piece = _piece(names, spec, name, shapes)
        done.update(piece.ours)
        yield piece


def shapes_in_files(piece: Piece, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of their tensors of a piece, from those of ours."""
    found = piece.form.theirs([torch.empty(shapes[name], device="meta") for name in piece.ours])
    return {name: tuple(each.shape) for name, each in zip(piece.theirs, found, strict=True)}


def _piece(names: Names, spec: ModelSpec, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Piece:
    if not name.startswith("layers."):
        module, _, kind = name.rpartition(".")
        if module == "lm_head":
            return Piece((f"{names.head}.{kind}",), (name,), SAME)
        return Piece((f"{names.top.get(module, module)}.{kind}",), (name,), SAME)
    _, layer, inner = name.split(".", 2)
    before, module, kind = f"{names.layers}.{layer}.", *inner.rpartition(".")[::2]
    if module in _QKV and names.qkv is not None:
        ours = tuple(f"layers.{layer}.{each}.{kind}" for each in _QKV)
        if names.grouped:
            return Piece((f"{before}{names.qkv}.{kind}",), ours, grouped(spec.kv_heads, spec.head_size))
        form = joined([shapes[each][0] for each in ours], names.transposed)
        return Piece((f"{before}{names.qkv}.{kind}",), ours, form)
    if module in _GATE_UP and names.gate_up is not None:
        ours = tuple(f"layers.{layer}.{each}.{kind}" for each in _GATE_UP)
        return Piece((f"{before}{names.gate_up}.{kind}",), ours, joined([shapes[each][0] for each in ours]))
    if module == "mlp.experts":
        return _experts(names.experts, before, name, kind, shapes[name][0])
    turned = names.transposed and kind == "weight" and module.endswith("_proj")
    return Piece((before + _renamed(names.block, inner),), (name,), TRANSPOSED if turned else SAME)


def _experts(experts: ExpertNames, before: str, name: str, kind: str, n_experts: int) -> Piece:
    if experts.each is None:
        form = SAME
        if experts.interleaved:
            form = ALTERNATING if kind.startswith("gate_up") else SAME if kind.endswith("bias") else TRANSPOSED
        return Piece((f"{before}{experts.at}.{kind}",), (name,), form)
    gate, up, down = experts.each
    parts = (gate, up) if kind == "gate_up_proj" else (up,) if kind == "up_proj" else (down,)
    theirs = tuple(f"{before}{experts.at}.{e}.{part}.weight" for e in range(n_experts) for part in parts)
    return Piece(theirs, (name,), per_expert(n_experts, len(parts)))


def _renamed(table: Mapping[str, str], inner: str) -> str:
    """A name with its longest part that the table knows replaced."""
    known = [each for each in table if inner == each or inner.startswith(f"{each}.")]
    if not known:
        return inner
    longest = max(known, key=len)
    return table[longest] + inner[len(longest) :]


SAME = Form(lambda ours: ours, lambda theirs: theirs)
TRANSPOSED = Form(lambda ours: [ours[0].mT], lambda theirs: [theirs[0].mT])


def _alternate(ours: Tensors) -> Tensors:
    """[E, 2 F, D], gate first, to [E, D, 2 F] with gate and up in turn; biases have no D."""
    stack = ours[0]
    mixed = stack.reshape(stack.shape[0], 2, -1, *stack.shape[2:]).transpose(1, 2).flatten(1, 2)
    return [mixed.mT if mixed.ndim == 3 else mixed]


def _apart(theirs: Tensors) -> Tensors:
    mixed = theirs[0].mT if theirs[0].ndim == 3 else theirs[0]
    return [mixed.reshape(mixed.shape[0], -1, 2, *mixed.shape[2:]).transpose(1, 2).flatten(1, 2)]


ALTERNATING = Form(_alternate, _apart)


def joined(sizes: list[int], turned: bool = False) -> Form:
    """One after the other along the rows; ``turned``: along the columns of transposed matrices."""

    def theirs(ours: Tensors) -> Tensors:
        whole = torch.cat(ours)
        return [whole.mT if turned and whole.ndim == 2 else whole]

    def ours(theirs: Tensors) -> Tensors:
        whole = theirs[0].mT if turned and theirs[0].ndim == 2 else theirs[0]
        return list(whole.split_with_sizes(sizes))

    return Form(theirs, ours)


def grouped(groups: int, width: int) -> Form:
    """Queries [H K, ...], keys and values [G K, ...] to [G, H / G + 2, K, ...]: each group's queries, key and value."""

    def theirs(ours: Tensors) -> Tensors:
        return [torch.cat([each.reshape(groups, -1, width, *each.shape[1:]) for each in ours], dim=1).flatten(0, 2)]

    def ours(theirs: Tensors) -> Tensors:
        whole = theirs[0].reshape(groups, -1, width, *theirs[0].shape[1:])
        parts = whole.split_with_sizes([whole.shape[1] - 2, 1, 1], dim=1)
        return [each.flatten(0, 2) for each in parts]

    return Form(theirs, ours)


def per_expert(n_experts: int, parts: int) -> Form:
    """A stack [E, parts F, ...] to E x parts matrices."""

    def theirs(ours: Tensors) -> Tensors:
        return [part for each in ours[0].unbind() for part in each.chunk(parts)]

    def ours(theirs: Tensors) -> Tensors:
        each = [torch.cat(theirs[first : first + parts]) for first in range(0, len(theirs), parts)]
        assert len(each) == n_experts
        return [torch.stack(each)]

    return Form(theirs, ours)
