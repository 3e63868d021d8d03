"""Which operations copy, and why: because the elements do not lie in order, for another dtype, to another device."""

from __future__ import annotations

import ast
from typing import Any

from torch import Tensor, memory_format
from torch import contiguous_format as CONTIGUOUS
from torch._ops import OpOverload

from trainledger.ledger.core.record import Event
from trainledger.trace.recorder.tensor_facts import dtype_name, touched_nbytes

NON_CONTIGUOUS, EXPANDED, DTYPE, DEVICE, LAYOUT, CLONE = (
    "non-contiguous", "expanded", "dtype", "device", "memory format", "clone",
)  # fmt: skip
REPEATED, JOINED, INDEXED = "repeat", "joined", "indexing"

_REPEATS = ("repeat", "repeat_interleave", "tile")
_JOINS = ("cat", "stack", "concatenate", "hstack", "vstack")
_INDEXES = ("index", "index_select", "gather", "take", "take_along_dim", "masked_select")
# Calls that say themselves that they copy or convert.
_ASKED = {
    "contiguous", "clone", "copy_", "to", "type", "float", "half", "bfloat16", "double", "int", "long", "bool", "cpu",
    "cuda", "cat", "stack", "repeat", "repeat_interleave", "tile", "deepcopy", "type_as", "pin_memory", "einsum",
    "concatenate", "hstack", "vstack",
}  # fmt: skip


class Copy:
    """Copies of one kind at one place in a line."""

    __slots__ = ("expression", "inside", "largest", "nbytes", "source", "source_nbytes", "source_stride", "times", "to")

    def __init__(self, event: Event, source: Tensor, out: Tensor, expression: str, inside: str) -> None:
        self.times = self.nbytes = self.largest = 0
        self.expression, self.inside = expression, inside
        self.source = f"{dtype_name(source.dtype)}{list(source.shape)}"
        self.source_stride = tuple(source.stride())
        self.source_nbytes = touched_nbytes(source)
        self.to = dtype_name(out.dtype)

    @property
    def call(self) -> str:
        """The name of the call or the operator that the expression is."""
        return called(self.expression)

    @property
    def asked(self) -> bool:
        """Whether the words of the line say that it copies."""
        return self.call in _ASKED

    def count(self, nbytes: int) -> None:
        self.times += 1
        self.nbytes += nbytes
        self.largest = max(self.largest, nbytes)


class Copies(dict[tuple[str, str, str, bool], Copy]):
    """The copies of a line by (why, expression, library inside which it happens, whether in backward)."""

    def count(
        self, why: str, event: Event, source: Tensor, out: Tensor, expression: str, inside: str, backward: bool
    ) -> None:
        key = (why, expression, inside, backward)
        found = self.get(key)
        if found is None:
            found = self[key] = Copy(event, source, out, expression, inside)
        found.count(out.numel() * out.element_size())


def why_copied(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> str:
    """Why an operation copies; "" for one that does not."""
    if name in _JOINS:
        return JOINED
    if not args or not isinstance(args[0], Tensor):
        return ""
    source = args[0]
    if name == "_to_copy":
        if kwargs.get("dtype") not in (None, source.dtype):
            return DTYPE
        if kwargs.get("device") not in (None, source.device):
            return DEVICE
        return LAYOUT
    if name == "clone":
        return _why_cloned(source, kwargs.get("memory_format"))
    if name == "copy_":
        other = args[1]
        return DEVICE if other.device != source.device else DTYPE if other.dtype != source.dtype else ""
    if name in _REPEATS:
        return REPEATED
    return INDEXED if name in _INDEXES else ""


def _why_cloned(source: Tensor, form: memory_format | None) -> str:
    if form is CONTIGUOUS and not source.is_contiguous():
        still = any(not step and size > 1 for size, step in zip(source.shape, source.stride(), strict=True))
        return EXPANDED if still else NON_CONTIGUOUS
    if form is not None and not source.is_contiguous(memory_format=form):
        return LAYOUT
    return CLONE


def called(expression: str) -> str:
    """What an expression calls or does last.

    >>> called("x.transpose(1, 2).reshape(B, -1)"), called("F.linear(x, w)"), called("a @ b"), called("")
    ('reshape', 'linear', '@', '')
    """
    try:
        node = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return node.func.attr
        return node.func.id if isinstance(node.func, ast.Name) else ""
    if isinstance(node, ast.BinOp):
        return {ast.MatMult: "@", ast.Mult: "*", ast.Add: "+", ast.Sub: "-", ast.Div: "/"}.get(type(node.op), "")
    return "[]" if isinstance(node, ast.Subscript) else ""
