"""Serving of a trained model: what it reads at once, and the formats of weights and cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.spec.dtypes import BLOCK_FORMATS, TABLES
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.units import ceil_div

Int = Any
PHASES = ("prefill", "decode")


@frozen
class WeightFormat:
    """A format of weight matrices [O, I]: codes of ``bits``, and a scale of ``scale_bits`` for each group.

    A group is ``group`` columns (None: a whole row) of ``rows`` rows; its zero point of ``zero_bits`` is packed.
    ``matrix_nbytes`` come once for a matrix. Codes are packed row by row, so that a row begins at a new byte, or all in
    one with the scales of the block format ``flat``.
    """

    name: str
    title: str
    bits: int
    source: str = ""
    group: int | None = None
    rows: int = 1
    scale_bits: int = 0
    zero_bits: int = 0
    matrix_nbytes: int = 0
    flat: str = ""

    def nbytes(self, shape: tuple[Int, ...]) -> tuple[Int, Int]:
        """Bytes of the codes and of the scales of a matrix, or of a stack of them.

        >>> WEIGHT_FORMATS["int4"].nbytes((4096, 4096)), WEIGHT_FORMATS["fp8"].nbytes((8, 100, 20))
        ((8388608, 327680), (16000, 3200))
        """
        *stack, rows, columns = shape
        count: Int = 1
        for size in stack:
            count = count * size
        codes = ceil_div(rows * columns * self.bits, 8) if self.flat else rows * ceil_div(columns * self.bits, 8)
        return count * codes, count * self._scales(rows, columns)

    def _scales(self, rows: Int, columns: Int) -> Int:
        if self.flat:
            return BLOCK_FORMATS[self.flat].scale_nbytes_for(rows * columns)
        groups = 1 if self.group is None else ceil_div(columns, self.group)
        scales = ceil_div((rows if self.rows == 1 else ceil_div(rows, self.rows)) * groups * self.scale_bits, 8)
        return scales + rows * ceil_div(groups * self.zero_bits, 8) + self.matrix_nbytes


WEIGHT_FORMATS = {
    name: WeightFormat(name, **{"source": BLOCK_FORMATS[row["flat"]].source, **row} if "flat" in row else row)
    for name, row in TABLES["weights"].items()
}
WHOLE = ("fp32", "bf16", "fp16")  # nothing is quantized


@frozen
class CacheFormat:
    """A format of keys and values: that of the elements, and additional bytes for ``width`` elements of a head.

    The scales of a tensor as a whole are no bytes that count.
    """

    name: str
    title: str
    bits: int
    group: int | None = None
    source: str = ""

    def nbytes(self, elements: Int, width: Int) -> Int:
        """Bytes of so many elements in heads of a width; a group ends with its head.

        >>> CACHE_FORMATS["fp8"].nbytes(1024, 128), CACHE_FORMATS["int4"].nbytes(1024, 128)
        (1024, 576)
        """
        codes = ceil_div(elements * self.bits, 8)
        if self.group is None:
            return codes
        return codes + 4 * (elements // width) * ceil_div(width, self.group)


CACHE_FORMATS = {name: CacheFormat(name, **row) for name, row in TABLES["cache"].items()}
QUANTIZED = ("linear", "experts")  # all linear layers of the blocks, or the experts alone


@frozen(kw_only=True)
class Serving:
    """One forward of a served model.

    ``prefill`` reads ``context`` tokens of each of ``batch`` sequences; ``decode`` one more of each, the last of
    ``context`` that are in the cache then. ``compute`` is the format of the matmuls, ``weights`` and ``cache`` are
    formats above, ``quantized`` says which matrices have that of the weights: all linear layers of the blocks, or the
    experts; what else there is stays in ``compute``.
    """

    phase: str = "decode"
    batch: Int = 1
    context: Int = 1024
    weights: str = "bf16"
    cache: str = "bf16"
    compute: str = "bf16"
    quantized: str = "linear"

    @property
    def new_tokens(self) -> Int:
        """Tokens of each sequence that this forward reads."""
        return self.context if self.phase == "prefill" else 1

    def problems(self) -> Iterator[Problem]:
        """Values that are no choice, each with the nearest."""
        for field, known in (("phase", PHASES), ("weights", WEIGHT_FORMATS), ("cache", CACHE_FORMATS),
                             ("compute", WHOLE), ("quantized", QUANTIZED)):  # fmt: skip
            value = getattr(self, field)
            taken = field in ("weights", "cache") and value == self.compute and value not in WHOLE  # reported there
            if value not in known and not taken:
                rule = f"must be one of {', '.join(known)}"
                yield Problem(field, value, rule, nearest_text(str(value), known))
        for field in ("batch", "context"):
            value = getattr(self, field)
            if isinstance(value, int) and not 1 <= value <= 10**9:
                yield Problem(field, value, "must be from 1 to 1,000,000,000", min(max(value, 1), 10**9))
