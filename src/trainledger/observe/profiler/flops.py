"""FLOPs of the operators of a recording, from the shapes that were recorded with them, by the rules of the ledger.

Those of matmuls, attention and convolutions, which an MFU is of. An operator that calls another one of them is
not counted with it: `aten::linear` runs `aten::addmm`, which is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from trainledger.ledger import rules
from trainledger.observe.profiler.kinds import kind_of_operator
from trainledger.observe.profiler.recording import NONE, Column, Recording, Shapes, one_by_one
from trainledger.spec.units import NANOSECONDS_PER_SECOND

_TF32 = re.compile(r"tf32|xf32|tensorop_s1688gemm")  # kernels that round fp32 to it as they multiply
Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Matmul:
    """A matmul, attention or convolution that one operator runs: its kind, its shape as text, its FLOPs and its format.

    ``model_flops`` leave out the scores that a fused attention's backward computes again. ``sizes`` are the shape as a
    ledger's entries have it: (batch, m, n, k) of a matmul, (sequences x heads, queries, keys, width of keys, width of
    values) of an attention; none of a convolution.
    """

    kind: str
    shape: str
    flops: int
    dtype: str
    model_flops: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class MatmulRate:
    """A matmul, attention or convolution of the step: shape, format, how often it ran, how long its kernels took.

    ``recomputed``: activation checkpointing ran it again, so its FLOPs are none of the model's.
    """

    kind: str
    shape: str
    dtype: str
    count: int
    flops: int
    nanoseconds: int
    recomputed: bool = False
    model_flops: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, bool]:
        return self.kind, self.shape, self.dtype, self.recomputed

    @property
    def flops_per_second(self) -> float | None:
        return self.flops * NANOSECONDS_PER_SECOND / self.nanoseconds if self.nanoseconds else None

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte where every operand is read and every result written once; None of unknown sizes."""
        nbytes = _NBYTES.get(self.dtype)
        if nbytes is None or not self.sizes or not self.count:
            return None
        if self.kind == "attention":
            heads, queries, keys, width, value_width = self.sizes
            elements = heads * (queries + keys) * (width + value_width)
        else:
            batch, m, n, k = self.sizes
            elements = batch * (m * k + k * n + m * n)
        return self.flops / self.count / (elements * nbytes)

    def at_peak_ns(self, peaks: Mapping[str, float]) -> float | None:
        """How long it takes at a device's peaks by format; None where that of its format is not known."""
        return at_peak_ns(self.flops, self.dtype, peaks)

    def model_at_peak_ns(self, peaks: Mapping[str, float]) -> float | None:
        """The same of its model FLOPs alone, which recomputed matmuls have none of."""
        return at_peak_ns(self.model_flops, self.dtype, peaks)


def at_peak_ns(flops: int, dtype: str, peaks: Mapping[str, float]) -> float | None:
    """How long FLOPs take at a device's peaks by format; None where that of their format is not known."""
    return flops * NANOSECONDS_PER_SECOND / peaks[dtype] if dtype in peaks else None


_DTYPES = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8", "signed char": "int8",
}  # fmt: skip


_NBYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp64": 8, "fp8": 1, "int8": 1}


def matmul_of(name: str, given: Shapes) -> Matmul | None:
    """The matmul that an operator of these arguments runs; None where it runs none or they do not say it.

    >>> matmul_of("aten::addmm", Shapes(((64,), (16, 4), (4, 64)), ("float", "float", "float")))
    Matmul(kind='matmul', shape='16 x 4 x 64', flops=8192, dtype='fp32', model_flops=8192, sizes=(1, 16, 64, 4))
    """
    find = _RULES.get(name)
    if find is None:
        return None
    try:
        found = find(given.sizes, given.values)
    except (IndexError, ValueError, TypeError):
        return None
    dtype = given.types[found.first] if found.first < len(given.types) else ""
    model_flops = found.flops if found.model_flops is None else found.model_flops
    return Matmul(kind_of_operator(name), found.shape, found.flops, _DTYPES.get(dtype, dtype), model_flops, found.sizes)


@dataclass(frozen=True)
class Multiplied:
    """The operators of a recording that run matmuls (by index), and what each piece of its work is part of.

    ``of_work`` has the index of such an operator for each piece of device work (without a device, for each operator),
    `NONE` where it is part of none.
    """

    matmuls: Mapping[int, Matmul]
    of_work: Column
    around: frozenset[int] = frozenset()  # those that run another one: a mode of PyTorch calls what it was called for


def multiplied(recording: Recording) -> Multiplied:
    """The matmuls of a recording."""
    found = {}
    operators = recording.operators
    known: dict[tuple[int, int], Matmul | None] = {}
    for index, (name, more) in enumerate(zip(one_by_one(operators.names), one_by_one(operators.more), strict=True)):
        if more == NONE:
            continue
        if (name, more) not in known:
            given = recording.arguments[more]
            known[name, more] = matmul_of(recording.names[name], given) if isinstance(given, Shapes) else None
        if (matmul := known[name, more]) is not None:
            found[index] = matmul
    part_of = np.full(len(operators) + 1, NONE)  # the last one is of work whose operator is not known
    around = set()
    if found:
        parts = one_by_one(part_of)
        for index, caller in enumerate(one_by_one(recording.callers)):
            outer = parts[caller] if caller != NONE else NONE
            parts[index] = index if index in found else outer
            if index in found and outer != NONE:
                around.add(outer)
    if not recording.on_device:
        of_operators = np.where(np.isin(np.arange(len(operators)), list(found)), part_of[:-1], NONE)
        return Multiplied(found, of_operators, frozenset(around))
    of_work = part_of[recording.operator_of_work]
    for index in np.unique(of_work[recording.has_name(recording.work, _TF32)]).tolist():
        if index != NONE and found[index].dtype == "fp32":
            found[index] = replace(found[index], dtype="tf32")
    return Multiplied(found, of_work, frozenset(around))


@dataclass(frozen=True)
class _Found:
    """What a rule says of an operator; ``first`` is the argument that has the format."""

    shape: str
    flops: int
    first: int
    sizes: tuple[int, ...] = ()
    model_flops: int | None = None  # None: all of them


Rule = Callable[[Sizes, tuple[str, ...]], _Found]


def _mm(first: int) -> Rule:
    def rule(sizes: Sizes, values: tuple[str, ...]) -> _Found:
        (m, k), (_, n) = sizes[first], sizes[first + 1]
        return _Found(f"{m} x {k} x {n}", rules.matmul_flops(m, n, k), first, (1, m, n, k))

    return rule


def _bmm(first: int) -> Rule:
    def rule(sizes: Sizes, values: tuple[str, ...]) -> _Found:
        (batch, m, k), (_, _, n) = sizes[first], sizes[first + 1]
        return _Found(f"{batch} of {m} x {k} x {n}", rules.matmul_flops(m, n, k, batch), first, (batch, m, n, k))

    return rule


def _attention(first: int, *, heads_first: bool, backward: bool = False) -> Rule:
    """Queries, keys and values are arguments from ``first`` on: [B, H, T, K], or [B, T, H, K]."""

    def rule(sizes: Sizes, values: tuple[str, ...]) -> _Found:
        q, k, v = sizes[first : first + 3]
        heads, tokens = (1, 2) if heads_first else (2, 1)
        asked = (q[0], q[heads], q[tokens], k[tokens], q[3], v[3])
        flops = (rules.attention_backward_flops if backward else rules.attention_flops)(*asked)
        model_flops = (rules.attention_backward_model_flops if backward else rules.attention_flops)(*asked)
        shape = f"{q[0]} x {q[heads]} heads, {q[tokens]} x {k[tokens]} x {q[3]}" + (", backward" if backward else "")
        return _Found(shape, flops, first, (q[0] * q[heads], *asked[2:]), model_flops)

    return rule


def _convolution(sizes: Sizes, values: tuple[str, ...]) -> _Found:
    """`aten::convolution`: input [B, C, ...], weight [O, C / groups, ...], bias, stride, padding, dilation."""
    x, weight = sizes[:2]
    stride, padding, dilation = (json.loads(values[each]) for each in (3, 4, 5))
    if values[6].lower() == "true":
        raise ValueError("transposed")
    out = [
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    flops = rules.matmul_flops(weight[0], prod(out), prod(weight[1:]), x[0])
    return _Found(f"{'x'.join(map(str, x))} by {'x'.join(map(str, weight))}", flops, 0)


def _convolution_backward(sizes: Sizes, values: tuple[str, ...]) -> _Found:
    """`aten::convolution_backward`: gradient of the output, input, weight; which gradients are asked for comes last."""
    out, x, weight = sizes[:3]
    asked = json.loads(values[-1].lower())[:2]
    flops = rules.matmul_flops(weight[0], prod(out[2:]), prod(weight[1:]), out[0]) * sum(map(bool, asked))
    return _Found(f"{'x'.join(map(str, x))} by {'x'.join(map(str, weight))}, backward", flops, 0)


_RULES: dict[str, Rule] = {
    "aten::mm": _mm(0), "aten::addmm": _mm(1), "aten::_addmm_activation": _mm(1), "aten::_scaled_mm": _mm(0),
    "aten::_int_mm": _mm(0), "aten::bmm": _bmm(0), "aten::baddbmm": _bmm(1),
    "aten::_flash_attention_forward": _attention(0, heads_first=False),
    "aten::_flash_attention_backward": _attention(1, heads_first=False, backward=True),
    "aten::_efficient_attention_forward": _attention(0, heads_first=False),
    "aten::_efficient_attention_backward": _attention(1, heads_first=False, backward=True),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, heads_first=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, heads_first=True, backward=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0, heads_first=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, heads_first=True, backward=True),
    "flash_attn::_flash_attn_forward": _attention(0, heads_first=False),
    "flash_attn::_flash_attn_backward": _attention(1, heads_first=False, backward=True),
    "aten::convolution": _convolution, "aten::convolution_backward": _convolution_backward,
}  # fmt: skip
