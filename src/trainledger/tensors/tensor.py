"""A tensor by its format and shape: how many bytes, where each element lies, and what one operation on it costs."""

from __future__ import annotations

import re
from functools import reduce
from operator import mul

from trainledger.ledger.rules import FLOPS_PER_ELEMENT
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import NotAQuantity, parse_count
from trainledger.tensors.number import known_format
from trainledger.tensors.strides import row_major

MOST_DIMS = 64  # of a torch tensor
LARGEST = 10**18
_FORM = re.compile(r"\s*([\w.\-]+)\s*[\[(](.*)[\])]\s*", re.ASCII)


@frozen
class Tensor:
    """A tensor in row-major order; ``strides`` are steps in elements, one for each dim.

    >>> tensor = Tensor("fp32", (4, 8))
    >>> tensor.nbytes, tensor.strides
    (128, (8, 1))
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return reduce(mul, self.shape, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; in a format of blocks with their scales."""
        nbytes: int = nbytes_in(self.elements, self.dtype)
        return nbytes

    @property
    def strides(self) -> tuple[int, ...]:
        return row_major(self.shape)

    @property
    def elementwise_flops(self) -> int:
        """FLOPs of one operation on each element, such as ReLU or a square (`ledger.rules`: one per element)."""
        return FLOPS_PER_ELEMENT["elementwise"] * self.elements

    @property
    def elementwise_nbytes(self) -> int:
        """Bytes that such an operation moves: the tensor read, and a result of its size written."""
        return 2 * self.nbytes

    @property
    def elementwise_intensity(self) -> float:
        """FLOPs per byte of such an operation.

        >>> Tensor("bf16", (1024, 512)).elementwise_intensity
        0.25
        """
        return self.elementwise_flops / self.elementwise_nbytes if self.elements else 0.0


def read_tensor(text: str) -> Tensor:
    """A tensor from text such as ``float32[4,8]``; `InvalidInput` with a sentence otherwise.

    >>> read_tensor("float32[4,8]"), read_tensor("torch.bfloat16(4, 8)").nbytes
    (Tensor(dtype='fp32', shape=(4, 8)), 64)
    """
    found = _FORM.fullmatch(text[:1000])
    if found is None:
        rule = "must be a format and a shape in brackets"
        raise InvalidInput([Problem("tensor", text, rule, _nearest(text))])
    return Tensor(known_format(found[1], "tensor"), read_shape(found[2], "tensor"))


def read_shape(text: str, field: str = "shape") -> tuple[int, ...]:
    """Sizes from text such as ``4,8`` or ``4x8``; nothing is a single number's shape. `InvalidInput` otherwise.

    >>> read_shape("4,8"), read_shape("49152x12288"), read_shape("")
    ((4, 8), (49152, 12288), ())
    """
    if not text.strip():
        return ()
    words = [each.strip() for each in re.split(r"[,x×*]", text.strip().rstrip(","))]
    if len(words) > MOST_DIMS:
        raise InvalidInput([Problem(field, text, f"has {len(words)} dims; a tensor has at most {MOST_DIMS}")])
    sizes = [_size(each, text, field) for each in words]
    if reduce(mul, sizes, 1) > LARGEST:
        raise InvalidInput([Problem(field, text, f"has more than {LARGEST:.0e} elements".replace("+", ""))])
    return tuple(sizes)


def _size(word: str, text: str, field: str) -> int:
    rule = "has dims that are no whole numbers of elements; write it like 4,8"
    try:
        size = parse_count(word)
    except NotAQuantity as error:
        near = text.replace(word, str(error.nearest)) if word and error.nearest is not None else None
        raise InvalidInput([Problem(field, text, f"{rule} ({word!r} is none)", near)]) from None
    if size < 0:
        raise InvalidInput([Problem(field, text, "has a dim below 0", text.replace(word, str(-size)))])
    return size


def _nearest(text: str) -> str:
    """The text in the form that is read, where a format and sizes can be made out."""
    name = re.match(r"\s*([A-Za-z][\w.]*)", text)
    sizes = re.findall(r"\d+", text[name.end() :] if name else text)
    known = name[1] if name else "float32"
    try:
        known_format(known, "tensor")
    except InvalidInput:
        known = "float32"
    return f"{known}[{','.join(sizes[:MOST_DIMS]) or '4,8'}]"
