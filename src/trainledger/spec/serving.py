"""Serving of a trained model: what it reads at once, and the formats of weights and cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainledger.spec.dtypes import BLOCK_FORMATS
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.units import ceil_div

Int = Any
PHASES = ("prefill", "decode")


@frozen
class WeightFormat:
    """A format of weight matrices [O, I]: codes of ``bits``, plus the bytes that ``scales`` returns for O and I.

    Codes are packed row by row, so that a row begins at a new byte, or all in one if the format is ``flat``.
    """

    name: str
    title: str
    bits: int
    scales: Callable[[Int, Int], Int]
    source: str
    flat: bool = False

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
        return count * codes, count * self.scales(rows, columns)


def _by_row(nbytes: int) -> Callable[[Int, Int], Int]:
    return lambda rows, columns: nbytes * rows


def _in_groups(size: int, scale_bits: int, zero_bits: int = 0) -> Callable[[Int, Int], Int]:
    """Groups of a row, each with a scale and perhaps a zero point; zero points are packed."""

    def nbytes(rows: Int, columns: Int) -> Int:
        groups = ceil_div(columns, size)
        return ceil_div(rows * groups * scale_bits, 8) + rows * ceil_div(groups * zero_bits, 8)

    return nbytes


def _tiles(rows: Int, columns: Int) -> Int:
    return 4 * ceil_div(rows, 128) * ceil_div(columns, 128)


def _flat(name: str) -> Callable[[Int, Int], Int]:
    """The scales of a block format over all elements of a matrix in a row."""
    return lambda rows, columns: BLOCK_FORMATS[name].scale_nbytes_for(rows * columns)


def _nothing(rows: Int, columns: Int) -> Int:
    return 0


_GPTQ = "Frantar et al. 2022, GPTQ (arXiv 2210.17323), section 4: groups; zero points of 4 bits as AutoGPTQ packs them"
_MX = "OCP Microscaling Formats Specification v1.0, table 1"
WEIGHT_FORMATS = {
    entry.name: entry
    for entry in (
        WeightFormat("fp32", "32 bits", 32, _nothing, ""),
        WeightFormat("bf16", "16 bits", 16, _nothing, ""),
        WeightFormat("fp16", "16 bits", 16, _nothing, ""),
        WeightFormat(
            "int8", "8-bit integers, a 16-bit scale per row", 8, _by_row(2),
            "Dettmers et al. 2022, LLM.int8() (arXiv 2208.07339), section 2.1: row-wise scales",
        ),
        WeightFormat(
            "fp8", "e4m3, an fp32 scale per row", 8, _by_row(4), "vLLM and torchao: weights of fp8 scaled per channel"
        ),
        WeightFormat(
            "fp8-block", "e4m3, an fp32 scale per 128 x 128", 8, _tiles,
            "DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 3.3.2",
        ),
        WeightFormat(
            "int4", "4-bit integers, a 16-bit scale and a 4-bit zero point per 128", 4, _in_groups(128, 16, 4), _GPTQ
        ),
        WeightFormat("int4-g64", "the same per 64", 4, _in_groups(64, 16, 4), _GPTQ),
        WeightFormat("int4-g32", "the same per 32", 4, _in_groups(32, 16, 4), _GPTQ),
        WeightFormat("int4-symmetric", "4-bit integers, a 16-bit scale per 128", 4, _in_groups(128, 16), _GPTQ),
        WeightFormat("int4-symmetric-g64", "the same per 64", 4, _in_groups(64, 16), _GPTQ),
        WeightFormat("int4-symmetric-g32", "the same per 32", 4, _in_groups(32, 16), _GPTQ),
        WeightFormat(
            "nf4", "4-bit quantiles, an fp32 scale per 64", 4, _flat("nf4"), BLOCK_FORMATS["nf4"].source, flat=True
        ),
        WeightFormat(
            "nf4-double", "4-bit quantiles, 8-bit scales per 64, an fp32 scale per 256 of them", 4, _flat("nf4-double"),
            BLOCK_FORMATS["nf4-double"].source, flat=True,
        ),
        WeightFormat("mxfp8", "e4m3 in blocks of 32 with a power of two", 8, _in_groups(32, 8), _MX),
        WeightFormat("mxfp6", "e3m2 in blocks of 32 with a power of two", 6, _in_groups(32, 8), _MX),
        WeightFormat("mxfp4", "e2m1 in blocks of 32 with a power of two", 4, _in_groups(32, 8), _MX),
        WeightFormat(
            "nvfp4", "e2m1 in blocks of 16 with an e4m3 scale, an fp32 scale per matrix", 4,
            lambda rows, columns: rows * ceil_div(columns, 16) + 4, BLOCK_FORMATS["nvfp4"].source,
        ),
    )
}  # fmt: skip
WHOLE = ("fp32", "bf16", "fp16")  # nothing is quantized


@frozen
class CacheFormat:
    """A format of keys and values: that of the elements, and additional bytes for ``width`` elements of a head.

    The scales of a tensor as a whole are no bytes that count.
    """

    name: str
    title: str
    bits: int
    group: int | None
    source: str

    def nbytes(self, elements: Int, width: Int) -> Int:
        """Bytes of so many elements in heads of a width; a group ends with its head.

        >>> CACHE_FORMATS["fp8"].nbytes(1024, 128), CACHE_FORMATS["int4"].nbytes(1024, 128)
        (1024, 576)
        """
        codes = ceil_div(elements * self.bits, 8)
        if self.group is None:
            return codes
        return codes + 4 * (elements // width) * ceil_div(width, self.group)


_KIVI = "transformers' QuantizedCache: groups of 64 (q_group_size), each a 16-bit scale and a 16-bit zero point"
CACHE_FORMATS = {
    entry.name: entry
    for entry in (
        CacheFormat("fp32", "32 bits", 32, None, ""),
        CacheFormat("bf16", "16 bits", 16, None, ""),
        CacheFormat("fp16", "16 bits", 16, None, ""),
        CacheFormat("fp8", "e4m3, one scale for all", 8, None, "vLLM: kv_cache_dtype fp8, a scale per layer"),
        CacheFormat("int8", "8-bit integers in groups of 64", 8, 64, _KIVI),
        CacheFormat("int4", "4-bit integers in groups of 64", 4, 64, _KIVI),
        CacheFormat("int2", "2-bit integers in groups of 64", 2, 64, _KIVI),
    )
}
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
