"""Operations that copy, and places where a program waits for a value.

Copies have a reason: elements out of order, another dtype, another device, a broadcast written out. Two kinds are
followed further: those in a wider dtype that are converted straight back, and fp32 copies of half-precision tensors
that a loss reads. A program waits at operators that read a value, lists, arrays, prints, copies to the host.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from trainledger.ledger.entry import Event, Storage
from trainledger.trace.annotate.source import Caller, Callers
from trainledger.trace.patches import Args, Kwargs, all_replaced, names
from trainledger.trace.recorder.storages import dtype_name, tensors_in, touched_nbytes

NON_CONTIGUOUS, EXPANDED, DTYPE, DEVICE = "non-contiguous", "expanded", "dtype", "device"
LAYOUT, CLONE, REPEATED, JOINED, INDEXED = "memory format", "clone", "repeat", "joined", "indexing"
TIMES_LARGER = 16  # a broadcast: than the largest tensor that it is made of

_REPEATS = ("repeat", "repeat_interleave", "tile")
_JOINS = ("cat", "stack", "concatenate", "hstack", "vstack")
_INDEXES = ("index", "index_select", "gather", "take", "take_along_dim", "masked_select")
# Calls that say themselves that they copy or convert.
_ASKED = (
    names("""
    contiguous clone copy_ to type float half bfloat16 double int long bool cpu cuda deepcopy type_as pin_memory einsum
""")
    + _REPEATS
    + _JOINS
)
_HALVES = (torch.bfloat16, torch.float16)
_WIDER = {
    **dict.fromkeys(_HALVES, (torch.float32, torch.float64)),
    torch.float32: (torch.float64,),
    torch.int32: (torch.int64, torch.float64),
}
LOSSES = names("""
    _log_softmax nll_loss_forward nll_loss2d_forward logsumexp mse_loss binary_cross_entropy
    binary_cross_entropy_with_logits smooth_l1_loss huber_loss
""")


class Copy:
    """Copies of one kind at one expression of a line: the first one's tensors, and how often and how many bytes."""

    __slots__ = [
        "expression",
        "largest",
        "line",
        "nbytes",
        "of_loss",
        "shape",
        "source",
        "source_dtype",
        "source_nbytes",
        "source_stride",
        "sources",
        "times",
        "to",
    ]

    def __init__(self, line: str, expression: str, sources: Sequence[Tensor], out: Tensor) -> None:
        self.line, self.expression = line, expression
        self.times = self.nbytes = self.largest = self.of_loss = 0
        source = sources[0]
        self.source_dtype, self.to = dtype_name(source.dtype), dtype_name(out.dtype)
        self.source = f"{self.source_dtype}{list(source.shape)}"
        self.source_stride, self.source_nbytes = tuple(source.stride()), touched_nbytes(source)
        self.sources, self.shape = [list(tensor.shape) for tensor in sources], list(out.shape)

    @property
    def call(self) -> str:
        """The name of the call or the operator that the expression is."""
        return called(self.expression)

    @property
    def by(self) -> str:
        """What copies, for a sentence."""
        return f"`{self.expression}`" if self.expression else self.call or "it"

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
        self, why: str, line: str, source: Tensor, out: Tensor, expression: str, inside: str, backward: bool
    ) -> None:
        key = (why, expression, inside, backward)
        if key not in self:
            self[key] = Copy(line, expression, [source], out)
        self[key].count(out.numel() * out.element_size())


class Conversions:
    """Follows copies in another dtype: ``round_trips`` to a wider one and back, ``upcasts`` of halves to fp32."""

    def __init__(self) -> None:
        self.round_trips: dict[tuple[str, str], Copy] = {}
        self.upcasts: dict[tuple[str, str, tuple[int, ...]], Copy] = {}
        self._narrower: dict[Storage, torch.dtype] = {}  # of wider copies that nothing has written to since
        self._upcast: dict[Storage, Copy] = {}

    @property
    def watches(self) -> bool:
        return bool(self._narrower)

    def gone(self, record: Storage) -> None:
        self._narrower.pop(record, None)
        self._upcast.pop(record, None)

    def written(self, record: Storage | None) -> None:
        """A tensor is changed in place: it is no mere copy any more."""
        if record is not None:
            self._narrower.pop(record, None)

    def converted(
        self, source: Storage | None, made: Storage, before: Tensor, after: Tensor, line: str, expression: str
    ) -> None:
        """The program has copied a tensor in another dtype."""
        if source is not None and self._narrower.get(source) is after.dtype and line:
            trip = self.round_trips.setdefault((line, expression), Copy(line, expression, [before], after))
            trip.count(source.nbytes + made.nbytes)
        if after.dtype in _WIDER.get(before.dtype, ()):
            self._narrower[made] = before.dtype

    def copied(
        self, source: Storage | None, made: Storage, why: str, before: Tensor, after: Tensor, line: str, expression: str
    ) -> None:
        """A tensor was copied, for whatever reason."""
        if why == DTYPE and before.dtype in _HALVES and after.dtype == torch.float32 and before.dim() > 1:
            # A call of a library may convert many tensors
            key = (line, expression, tuple(before.shape))
            upcast = self.upcasts.setdefault(key, Copy(line, expression, [before], after))
            upcast.count(made.nbytes)
            self._upcast[made] = upcast
        elif source is not None and source in self._upcast:
            self._upcast[made] = self._upcast[source]

    def reached_loss(self, records: Iterable[Storage | None]) -> None:
        """A loss, or the softmax of one, reads tensors."""
        for record in records:
            if record is not None and record in self._upcast:
                self._upcast[record].of_loss += 1


class Broadcasts(dict[tuple[str, str], Copy]):
    """Pointwise results of two tensors or more, each stretched along a dim of the other, by line and expression."""

    def take(self, event: Event, args: Args, out: Tensor, callers: Callers) -> None:
        if event.facts["kind"] != "elementwise" or not event.allocated:
            return
        sources, size = tensors_in(args), out.numel()
        if len(sources) < 2 or size < max(1024, TIMES_LARGER * max(source.numel() for source in sources)):
            return
        caller = callers.now()
        if caller is not None and not caller.inside:
            copy = self.setdefault((caller.at, caller.expression), Copy(caller.at, caller.expression, sources, out))
            copy.count(event.allocated[0].nbytes)


def why_copied(func: OpOverload, name: str, args: Args, kwargs: Kwargs, out: Any) -> str:
    """Why an operation copies; "" for one that does not."""
    if name in _JOINS:
        return JOINED
    if not args or not isinstance(args[0], Tensor):
        return ""
    source = args[0]
    if name == "_to_copy":
        if kwargs.get("dtype") not in (None, source.dtype):
            return DTYPE
        return DEVICE if kwargs.get("device") not in (None, source.device) else LAYOUT
    if name == "clone":
        form = kwargs.get("memory_format")
        if form is None or source.is_contiguous(memory_format=form):
            return CLONE
        still = any(not step and size > 1 for size, step in zip(source.shape, source.stride(), strict=True))
        return LAYOUT if form is not torch.contiguous_format else EXPANDED if still else NON_CONTIGUOUS
    if name == "copy_":
        other = args[1]
        return DEVICE if other.device != source.device else DTYPE if other.dtype != source.dtype else ""
    if name in _REPEATS:
        return REPEATED
    return INDEXED if name in _INDEXES else ""


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


SYNCHRONIZING = names("""
    _local_scalar_dense nonzero masked_select equal _unique2 unique_consecutive unique_dim nonzero_numpy
""")
_READS = "reads a number off a tensor"
_SAID = {
    "nonzero": "counts what is not zero",
    "masked_select": "counts what a mask picks",
    "equal": "compares values",
    "index": "counts what a mask picks",
    "_unique2": "counts distinct values",
}


@dataclass(slots=True)
class Sync:
    """One place that waits for a device: how often, in how many steps, the last of these; ``inside`` which library."""

    caller_line: str
    what: str
    device: str
    inside: str
    times: int = 0
    steps: int = 0
    last: int = -1


class Syncs:
    """Counts by line and expression. Of a program that uses an accelerator, only what waits for that counts.

    ``accelerated`` is set as soon as the program has a tensor there.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Sync] = {}
        self.accelerated = False

    def take(self, caller: Caller, name: str, device: str, step: int) -> None:
        """Count one; ``step`` is how many steps have ended before."""
        self.accelerated = self.accelerated or not device.startswith("cpu")
        what = words(name, caller.expression)
        sync = self.found.get((caller.at, what))
        if sync is None:
            sync = self.found[caller.at, what] = Sync(caller.at, what, device, caller.inside)
        sync.times += 1
        if sync.last != step:
            sync.steps += 1
            sync.last = step

    def waits(self) -> list[Sync]:
        """Those that wait for a device, of a program that uses one; else all."""
        return [sync for sync in self.found.values() if not (self.accelerated and sync.device.startswith("cpu"))]


def words(name: str, expression: str) -> str:
    """A wait in words.

    >>> words("_local_scalar_dense", "loss.item()"), words("_local_scalar_dense", "x > 0"), words("cpu", "x.cpu()")
    ('.item()', 'reads a number off a tensor', '.cpu()')
    """
    if not name.startswith("_") and name not in _SAID:
        return {"print": "print of a tensor"}.get(name) or (name if "." in name else f".{name}()")
    call = called(expression)
    if call in ("item", "tolist", "nonzero", "equal", "unique", "masked_select", "allclose", "cpu", "numpy"):
        return f".{call}()" if call not in ("equal", "allclose") else f"torch.{call}"
    if call in ("float", "int", "bool", "print", "range", "math"):
        return f"{call}(tensor)"
    return _SAID.get(name, _READS)


@contextmanager
def reads_seen(synchronized: Callable[[str, list[Tensor]], None], guessed: Callable[[], None]) -> Iterator[None]:
    """Call ``synchronized`` at reads that no operator shows. Of fake tensors a list is of zeros, after a call of
    ``guessed``, and a numpy array is refused.
    """

    inside = False

    def noticed(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        # A function mode calls the method again once it has seen the call (torch.overrides): it is noticed once.

        @functools.wraps(before)
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            # Operators print tensors into the words of an error that they may need; that is no print of the program.
            if inside or (name == "print" and sys._getframe(1).f_code.co_filename == torch._ops.__file__):
                return before(self, *args, **kwargs)
            synchronized(name, [self])
            if isinstance(self, FakeTensor) and name == "tolist" and self.constant is None:
                guessed()
                return _zeros(tuple(self.shape), 0.0 if self.is_floating_point() else 0)
            inside = True
            try:
                return before(self, *args, **kwargs)
            finally:
                inside = False

        return read

    def made(name: str) -> Callable[[Any], Callable[..., Any]]:
        return lambda before: noticed(name, before)

    methods = {"tolist": "tolist", "numpy": "numpy", "cpu": "cpu", "__repr__": "print"}
    patched = [(torch.Tensor, method, made(name)) for method, name in methods.items()]
    with all_replaced(*patched, (FakeTensor, "tolist", made("tolist"))):
        yield


def _zeros(shape: tuple[int, ...], value: float) -> Any:
    if not shape:
        return value
    return [_zeros(shape[1:], value) for _ in range(shape[0])]
