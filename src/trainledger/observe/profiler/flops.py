"""FLOPs of the operators of a recording, from the shapes that were recorded with them, by the rules of the ledger.

Those of matmuls, attention and convolutions, which an MFU is of. An operator that calls another one of them is
not counted with it: `aten::linear` runs `aten::addmm`, which is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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


_DTYPES = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64", "signed char": "int8"}
_DTYPES |= {"c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8"}
_NBYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp64": 8, "fp8": 1, "int8": 1}


def matmul_of(name: str, given: Shapes) -> Matmul | None:
    """The matmul that an operator of these arguments runs; None where it runs none or they do not say it.

    >>> matmul_of("aten::addmm", Shapes(((64,), (16, 4), (4, 64)), ("float", "float", "float")))
    Matmul(kind='matmul', shape='16 x 4 x 64', flops=8192, dtype='fp32', model_flops=8192, sizes=(1, 16, 64, 4))
    """
    rule, first = _RULES.get(name, (None, 0))
    if rule is None:
        return None
    try:
        matmul = rule(given.sizes[first:], given.values)
    except (IndexError, ValueError, TypeError):
        return None
    dtype = given.types[first] if first < len(given.types) else ""
    return replace(matmul, kind=kind_of_operator(name), dtype=_DTYPES.get(dtype, dtype))


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
    operators, matmuls = recording.operators, dict[int, Matmul]()
    known: dict[tuple[int, int], Matmul | None] = {}
    for index, key in enumerate(zip(one_by_one(operators.names), one_by_one(operators.more), strict=True)):
        if key[1] == NONE:
            continue
        if key not in known:
            given = recording.arguments[key[1]]
            known[key] = matmul_of(recording.names[key[0]], given) if isinstance(given, Shapes) else None
        if (matmul := known[key]) is not None:
            matmuls[index] = matmul
    part_of, around = np.full(len(operators) + 1, NONE), set()  # the last is of work whose operator is not known
    parts = one_by_one(part_of)
    for index, caller in enumerate(one_by_one(recording.callers) if matmuls else ()):
        outer = parts[caller] if caller != NONE else NONE
        parts[index] = index if index in matmuls else outer
        if index in matmuls and outer != NONE:
            around.add(outer)
    if not recording.on_device:
        of_work = np.where(np.isin(np.arange(len(operators)), list(matmuls)), part_of[:-1], NONE)
    else:
        of_work = part_of[recording.operator_of_work]
        for index in np.unique(of_work[recording.has_name(recording.work, _TF32)]).tolist():
            if index != NONE and matmuls[index].dtype == "fp32":
                matmuls[index] = replace(matmuls[index], dtype="tf32")
    return Multiplied(matmuls, of_work, frozenset(around))


Rule = Callable[[Sizes, tuple[str, ...]], Matmul]  # of the sizes from the argument on that has the format


def _matmul(shape: str, flops: int, sizes: tuple[int, ...] = (), model_flops: int | None = None) -> Matmul:
    return Matmul("", shape, flops, "", flops if model_flops is None else model_flops, sizes)


def _mm(sizes: Sizes, values: tuple[str, ...]) -> Matmul:
    (m, k), (_, n) = sizes[:2]
    return _matmul(f"{m} x {k} x {n}", rules.matmul_flops(m, n, k), (1, m, n, k))


def _bmm(sizes: Sizes, values: tuple[str, ...]) -> Matmul:
    (batch, m, k), (_, _, n) = sizes[:2]
    return _matmul(f"{batch} of {m} x {k} x {n}", rules.matmul_flops(m, n, k, batch), (batch, m, n, k))


def _attention(sizes: Sizes, values: tuple[str, ...], *, heads_first: bool = False, backward: bool = False) -> Matmul:
    """Queries, keys and values come first: [B, T, H, K], or [B, H, T, K]."""
    q, k, v = sizes[:3]
    heads, tokens = (1, 2) if heads_first else (2, 1)
    asked = (q[0], q[heads], q[tokens], k[tokens], q[3], v[3])
    flops = (rules.attention_backward_flops if backward else rules.attention_flops)(*asked)
    model_flops = (rules.attention_backward_model_flops if backward else rules.attention_flops)(*asked)
    shape = f"{q[0]} x {q[heads]} heads, {q[tokens]} x {k[tokens]} x {q[3]}" + (", backward" if backward else "")
    return _matmul(shape, flops, (q[0] * q[heads], *asked[2:]), model_flops)


def _convolution(sizes: Sizes, values: tuple[str, ...]) -> Matmul:
    """`aten::convolution`: input [B, C, ...], weight [O, C / groups, ...], bias, stride, padding, dilation."""
    x, weight = sizes[:2]
    stride, padding, dilation = (json.loads(values[at]) for at in (3, 4, 5))
    if values[6].lower() == "true":
        raise ValueError("transposed")
    out = [
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    flops = rules.matmul_flops(weight[0], prod(out), prod(weight[1:]), x[0])
    return _matmul(f"{'x'.join(map(str, x))} by {'x'.join(map(str, weight))}", flops)


def _convolution_backward(sizes: Sizes, values: tuple[str, ...]) -> Matmul:
    """`aten::convolution_backward`: gradient of the output, input, weight; which gradients are asked for comes last."""
    out, x, weight = sizes[:3]
    asked = json.loads(values[-1].lower())[:2]
    flops = rules.matmul_flops(weight[0], prod(out[2:]), prod(weight[1:]), out[0]) * sum(map(bool, asked))
    return _matmul(f"{'x'.join(map(str, x))} by {'x'.join(map(str, weight))}, backward", flops)


# The rule of each operator, and the argument that it begins with.
_RULES: dict[str, tuple[Rule, int]] = {f"aten::{name}": (_mm, 0) for name in ("mm", "_scaled_mm", "_int_mm")}
_RULES |= {f"aten::{name}": (_mm, 1) for name in ("addmm", "_addmm_activation")}
_RULES |= {"aten::bmm": (_bmm, 0), "aten::baddbmm": (_bmm, 1)}
_RULES |= {"aten::convolution": (_convolution, 0), "aten::convolution_backward": (_convolution_backward, 0)}
_FORWARD, _BACKWARD = (partial(_attention, backward=backward) for backward in (False, True))
for _name in ("aten::_flash_attention_", "aten::_efficient_attention_"):
    _RULES |= {f"{_name}forward": (_FORWARD, 0), f"{_name}backward": (_BACKWARD, 1)}
_RULES |= {"flash_attn::_flash_attn_forward": (_FORWARD, 0), "flash_attn::_flash_attn_backward": (_BACKWARD, 1)}
for _name in ("cudnn_attention", "flash_attention_for_cpu"):
    _RULES[f"aten::_scaled_dot_product_{_name}"] = partial(_FORWARD, heads_first=True), 0
    _RULES[f"aten::_scaled_dot_product_{_name}_backward"] = partial(_BACKWARD, heads_first=True), 1
