"""Inputs of a traced module from text: ``int64[8,2048]`` or ``labels=int64[8,2048]``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.units import NotAQuantity, parse_count
from trainledger.trace.recorder.tensor_facts import DTYPE_NAMES

Inputs = dict[str, Tensor] | tuple[Tensor, ...]

_FORM = re.compile(r"(?:([A-Za-z_]\w*)=)?([\w.]+)\[([^\]]*)\]", re.ASCII)
_SHORT = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {"float": torch.float32, "half": torch.float16}
LARGEST = 10**15  # elements: more than any device holds, and far from where sizes overflow
MOST_DIMS = 64  # what torch's kernels take
_FLOATING = ("fp32", "bf16", "fp16", "fp64")


def dtype_named(name: str, field: str) -> torch.dtype:
    """A torch dtype by its own name or the field's short one (``bfloat16``, ``bf16``).

    Raises InvalidInput for what is none, and for formats that torch has a name for but nothing to compute with.
    """
    plain = name.strip().removeprefix("torch.")
    found = _SHORT.get(plain, getattr(torch, plain, None))
    if isinstance(found, torch.dtype):
        if not _can_be_read(found):
            rule = "is a format that torch cannot make or read tensors of on a CPU"
            raise InvalidInput([Problem(field, name, rule, "int8" if "int" in plain else "uint8")])
        return found
    known = [*_SHORT, *(str(each).removeprefix("torch.") for each in DTYPE_NAMES)]
    raise InvalidInput([Problem(field, name, "is not a number format that torch knows", nearest_text(plain, known))])


def floating_dtype_named(name: str, field: str) -> torch.dtype:
    """A dtype that a model can be built in, fp32, bf16, fp16 or fp64 by any of their names; InvalidInput otherwise.

    >>> floating_dtype_named("bfloat16", "--dtype")
    torch.bfloat16
    """
    found = dtype_named(name, field)
    if DTYPE_NAMES.get(found) not in _FLOATING:
        rule = f"must be a floating-point format that torch builds modules in: {', '.join(_FLOATING)}"
        raise InvalidInput([Problem(field, name, rule, "bf16")])
    return found


@cache
def _can_be_read(dtype: torch.dtype) -> bool:
    """Whether a CPU makes numbers of a format and turns them into fp32, with which all work on them begins."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.zeros(1, dtype=dtype, device="cpu").to(torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def autocast_dtype_named(name: str, field: str) -> torch.dtype:
    """A format that autocast runs in by its name; InvalidInput otherwise."""
    found = _SHORT.get(plain := name.strip().removeprefix("torch."), getattr(torch, plain, None))
    if found in (torch.bfloat16, torch.float16):
        return found
    raise InvalidInput([Problem(field, name, "must be a 16-bit floating format", "bf16")])


def input_of(text: str, field: str = "--input") -> tuple[str, Tensor]:
    """A tensor on the meta device, and its name, empty where it is given by position.

    >>> input_of("labels=int64[8,2048]")[1].shape, input_of("bf16[4]")[0]
    (torch.Size([8, 2048]), '')
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        rule = "must be a format and a shape in brackets, with or without a name in front"
        raise InvalidInput([Problem(field, text, rule, "int64[8,2048] or labels=int64[8,2048]")])
    name, dtype, sizes = found.groups()
    words = [each for each in sizes.split(",") if each.strip()]
    if len(words) > MOST_DIMS:
        raise InvalidInput([Problem(field, text, f"has {len(words):,} dims, and torch computes with {MOST_DIMS}")])
    shape = [_size(each, text, field) for each in words]
    elements = 1
    for each in shape:
        elements *= each
    if elements > LARGEST:
        raise InvalidInput([Problem(field, text, f"has more than {LARGEST:,} elements")])
    return name or "", torch.empty(shape, dtype=dtype_named(dtype, field), device="meta")


def _size(word: str, text: str, field: str) -> int:
    try:
        size = parse_count(word.strip())
    except NotAQuantity:
        size = -1
    if size < 0:
        raise InvalidInput([Problem(field, text, f"has a dim that is no whole number ({word.strip()})")])
    return size


def inputs_of(texts: Sequence[str], field: str = "--input", main: str = "") -> Inputs:
    """Inputs by their names (a dict) or by their positions (a tuple); InvalidInput where both are mixed.

    With ``main`` the first that has no name has this one.

    >>> inputs = inputs_of(["int64[2,8]", "int64[2,8]"])
    >>> len(inputs), sorted(inputs_of(["x=fp32[4]", "y=fp32[4]"]))
    (2, ['x', 'y'])
    """
    read = [input_of(each, field) for each in texts]
    if main and read and not read[0][0]:
        read[0] = main, read[0][1]
    names = [name for name, _ in read]
    if all(names):
        if len(set(names)) < len(names):
            raise InvalidInput([Problem(field, ", ".join(texts), "names one input twice")])
        return dict(read) if read else ()
    if any(names):
        rule = "must all have names or none: positions and names cannot be mixed"
        raise InvalidInput([Problem(field, ", ".join(texts), rule, "a name for each")])
    return tuple(tensor for _, tensor in read)
