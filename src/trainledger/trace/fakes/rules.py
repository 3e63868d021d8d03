"""Fake tensors take the way of real ones: rules that torch lacks, and results whose size depends on values.

``nonzero``, ``torch.where(mask)``, ``x[mask]`` and ``unique`` have such results; mixtures of experts pick the tokens of
an expert so. The size is assumed: the most that it can be, or what the user says, a share of that or a count
(``nonzero=1/8``). The notes say each line of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import ceil_div, counted
from trainledger.trace.patches import Patch, all_replaced, around
from trainledger.trace.recorder.source_lines import Refused
from trainledger.trace.recorder.storages import ASSUMED, BOUND, AssumedSizes

# Where transformers asks nothing of a mask but whether all of it is set, by way of `fast_all`.
_ANSWERED = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def as_if_real(batch: Any = None) -> Iterator[None]:
    """Let transformers take the way that it takes for real tensors after looking at their values.

    Of fake tensors it cannot look at the values and, to be safe, writes out a mask of [B, 1, T, T], which a real
    run may not have. Sequences are assumed not to be packed. A padding mask that the model makes itself hides nothing;
    one in the batch is looked at, and one without values there is assumed to hide something. Nothing is imported here:
    where transformers is not loaded, no model is made of it.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    answer = not _hides_something(batch)
    patches: list[Patch] = [(F, "one_hot", around(_one_hot))]
    if masking is not None:
        patches += [
            (masking, "find_packed_sequence_indices", around(_packed)),
            (masking, "is_tracing", around(_is_tracing)),
            (masking, "fast_all", around(lambda fast_all, mask: _known(fast_all(mask), answer))),
        ]
    with all_replaced(*patches):
        yield


def _hides_something(batch: Any) -> bool:
    """Whether a mask in the batch hides a token; without values it may."""
    if not isinstance(batch, Mapping):
        return False
    masks = [
        tensor for name, tensor in batch.items() if str(name).endswith("attention_mask") and isinstance(tensor, Tensor)
    ]
    for mask in masks:
        if mask.is_meta or isinstance(mask, FakeTensor):
            return True
        with unset_fake_temporarily(), _disable_current_modes():
            if not bool(mask.all()):
                return True
    return False


def _packed(find: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> Tensor | None:
    # transformers looks at the values of position ids to know whether sequences are packed (masking_utils.py,
    # find_packed_sequence_indices).
    sequence = find(position_ids)
    if not isinstance(sequence, FakeTensor):
        return sequence
    return None if _known((sequence[:, -1] == 0).all(), True) else sequence


def _is_tracing(before: Callable[..., bool], tensor: Any = None) -> bool:
    asks = sys._getframe(2).f_code.co_name  # behind `around`
    return before() if isinstance(tensor, FakeTensor) and asks in _ANSWERED else before(tensor)


def _known(value: Tensor, answer: bool) -> Tensor:
    """A fake truth value that has a value."""
    if isinstance(value, FakeTensor):
        with _disable_current_modes():
            value.constant = torch.tensor(answer)
    return value


def _one_hot(before: Callable[..., Tensor], tensor: Tensor, num_classes: int = -1) -> Tensor:
    # Of real tensors torch.one_hot scatters ones into zeros; its decomposition for fake ones (torch/_decomp) compares
    # with all numbers and makes more memory.
    if not isinstance(tensor, FakeTensor) or num_classes < 0:
        return before(tensor, num_classes)
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


@contextmanager
def fake_rules(also: Mapping[Any, Callable[..., Any]] | None = None) -> Iterator[None]:
    """Inside, fake tensors follow our rules where torch has none, and those of ``also`` in any case."""
    known = fake_impls.op_implementations_dict
    added = {func: rule for func, rule in _RULES.items() if func not in known}
    added |= {func: _unless_symbolic(rule, known.get(func)) for func, rule in (also or {}).items()}
    before = {func: known[func] for func in added if func in known}
    known.update(added)
    try:
        yield
    finally:
        for func in added:
            del known[func]
        known.update(before)


def _matmul(
    mode: FakeTensorMode, func: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *others: Any, **options: Any
) -> Tensor:
    # The result of torch's `grouped_mm`: rows in groups by a matrix of each, or summed over each group.
    # Of any format, as the kernel of a CPU takes them; torch's own rule is for bf16 only.
    groups = [a.shape[0]] if a.dim() == b.dim() == 3 else []
    if a.dim() == b.dim() == 2:
        assert offs is not None
        groups = [offs.shape[0]]
    with mode:
        return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=options.get("out_dtype") or a.dtype)


def _embedding(mode: FakeTensorMode, func: Any, weight: Tensor, indices: Tensor, *others: Any, **options: Any) -> Any:
    # Refuse indices that real tensors refuse; torch's own rule does so since 2.13.
    if indices.dtype not in (torch.int64, torch.int32):
        rule = "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int"
        raise RuntimeError(f"{rule}; but got {indices.dtype} instead (while checking arguments for embedding)")
    return NotImplemented


_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _matmul,
    torch.ops.aten.embedding.default: _embedding,
}


aten = torch.ops.aten
NAME = "nonzero"
_FIELD, _EXAMPLE = "--assume", "nonzero=1/8, or for one line nonzero@model.py:14=1/8"


class Counts:
    """How many elements of unknown values are assumed to be found; ``line`` is the one that runs now.

    Each of ``assume`` is ``nonzero=SHARE`` of all elements, or a count of 2 and more, for every line or for one
    (``nonzero@FILE:LINE=``). Raises InvalidInput for anything else. ``sizes`` knows what rests on the numbers.
    """

    def __init__(self, assume: Sequence[str], line: Callable[[], str]) -> None:
        self._given = dict(_given(each) for each in assume)
        self._line = line
        self._noted: dict[str, str] = {}
        self.sizes = AssumedSizes()

    def number(self, elements: int) -> int:
        """How many of so many elements are found by what runs now."""
        line = self._line()
        given = self._given.get("", None)
        for place, amount in self._given.items():
            if place and (line == place or line.endswith("/" + place)):
                given = amount
        if given is None:
            self._noted[line] = (
                f"{line}: how many elements are found depends on values; all {counted(elements, 'element')} are "
                "assumed, which is the most: what follows is an upper bound (--assume nonzero=1/8 takes a share)"
            )
            self.sizes.found(elements, elements, BOUND)
            return elements
        found = min(elements, int(given) if given > 1 else ceil_div(elements * given.numerator, given.denominator))
        self.sizes.found(found, elements, ASSUMED)
        self._noted[line] = f"{line}: {found:,} of {counted(elements, 'element')} are assumed to be found, as given"
        return found

    def notes(self) -> Iterator[str]:
        """A sentence for each line."""
        yield from self._noted.values()

    def clear(self) -> None:
        """Forget the lines so far, and their numbers."""
        self._noted.clear()
        self.sizes.clear()

    @contextmanager
    def followed(self, batch: Any = None) -> Iterator[None]:
        """Inside, fake tensors have results of this size, and take the way of real ones (`as_if_real`)."""
        rules: dict[Any, Callable[..., Any]] = {
            aten.nonzero.default: self._nonzero,
            aten.masked_select.default: self._masked_select,
            **dict.fromkeys((aten._unique2.default, aten.unique_consecutive.default), self._unique),
            aten.unique_dim.default: self._unique_rows,
            aten.bincount.default: self._bincount,
        }
        with as_if_real(batch), fake_rules(rules):
            yield

    def _nonzero(self, mode: FakeTensorMode, func: Any, x: Tensor) -> Tensor:
        """[found, dims] places."""
        found = self.number(x.numel())
        with mode:
            places = x.new_empty(max(x.dim(), 1) if x.dim() else 0, found, dtype=torch.int64)
            # Column by column, as real kernels give them
            return places.t()

    def _masked_select(self, mode: FakeTensorMode, func: Any, x: Tensor, mask: Tensor) -> Tensor:
        shape: Any = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
        with mode:
            return x.new_empty(self.number(shape.numel()))

    def _bincount(self, mode: FakeTensorMode, func: Any, x: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
        """As many bins as are asked for at least."""
        if not minlength:
            raise Refused(
                "bincount has as many bins as its largest value, which fake tensors do not have: give minlength"
            )
        line = self._line()
        self._noted[line] = (
            f"{line}: the values that bincount counts are assumed to be below its minlength, {minlength:,}"
        )
        dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
        with mode:
            return x.new_empty(minlength, dtype=dtype)

    def _unique(
        self, mode: FakeTensorMode, func: Any, x: Tensor, *flags: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, the place of each element among them, and how often each occurs."""
        dim = options.get("dim", flags[2] if len(flags) > 2 else None)
        if func is aten.unique_consecutive.default and dim is not None:
            return self._unique_rows(mode, func, x, dim)
        found = self.number(x.numel())
        with mode:
            whole = {"dtype": torch.int64}
            return x.new_empty(found), x.new_empty(x.shape, **whole), x.new_empty(found, **whole)  # type: ignore[call-overload]

    def _unique_rows(
        self, mode: FakeTensorMode, func: Any, x: Tensor, dim: int, *flags: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = self.number(x.shape[dim])
        shape = list(x.shape)
        shape[dim] = found
        with mode:
            places = x.new_empty(x.shape[dim], dtype=torch.int64)
            return x.new_empty(shape), places, x.new_empty(found, dtype=torch.int64)


def _unless_symbolic(rule: Callable[..., Any], before: Callable[..., Any] | None) -> Callable[..., Any]:
    # A rule for our own fake tensors; those of the compiler, whose sizes are symbols, keep theirs.

    def chosen(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        if mode.shape_env is not None and before is not None:
            return before(mode, func, *args, **kwargs)
        return rule(mode, func, *args, **kwargs)

    return chosen


def _given(text: str) -> tuple[str, Fraction]:
    """The line that an assumption is of ("" for every one), and the share or count."""
    name, _, amount = text.partition("=")
    name, _, line = name.strip().partition("@")
    try:
        value = Fraction(amount.strip())
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if name != NAME or value <= 0 or (value > 1 and value.denominator != 1):
        rule = "must be a share of the elements, or a count, that nonzero, torch.where and x[mask] find"
        raise InvalidInput([Problem(_FIELD, text, rule, _EXAMPLE)])
    return line, value
