"""The kernels a calibration times: what each computes and moves, counted as a ledger entry counts it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F

from trainledger.units import MIB

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# (m, n, k): cubes from cache-sized to large, and the skinny shapes of a training step: few columns, few rows,
# a vocabulary, a weight gradient (long inner dimension), a batch too small to fill the machine.
MATMULS = (
    (128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048),
    (2048, 256, 256), (2048, 8192, 256), (256, 1024, 2048), (16, 2048, 2048),
)  # fmt: skip
LARGE_MATMULS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 8192))
QUICK_MATMULS = ((512, 512, 512), (2048, 2048, 2048), (2048, 256, 256))
# (sequences x heads, seq_len, head_dim); a narrow head of a toy model runs at a fraction of the others' rate.
QUICK_ATTENTIONS = ((32, 256, 64), (32, 64, 8))
ATTENTIONS = (*QUICK_ATTENTIONS, (4, 1024, 64))
LARGE_ATTENTIONS = ((128, 1024, 64), (32, 4096, 128))
ELEMENTS = (2**14, 2**18, 2**22)  # of the pointwise samples


@dataclass(frozen=True)
class Kernel:
    """One kind of operation at one size; ``build`` gives the call to time, with its tensors made."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    flops: int
    nbytes: int
    build: Callable[[], Callable[[], object]]
    phase: str = ""
    operations: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))} {self.dtype}"


def kernels(device: torch.device, dtypes: list[str], *, quick: bool = False) -> list[Kernel]:
    """The kernels for a device; ``quick`` leaves out most shapes, an accelerator gets large ones too."""
    large = device.type != "cpu"
    shapes = QUICK_MATMULS if quick else MATMULS + (LARGE_MATMULS if large else ())
    attentions = QUICK_ATTENTIONS if quick else ATTENTIONS + (LARGE_ATTENTIONS if large else ())
    found = [_matmul(device, dtype, shape) for dtype in dtypes for shape in shapes]
    for dtype in dtypes:
        for shape in attentions:
            found += [_attention(device, dtype, shape), _attention_backward(device, dtype, shape)]
    pool = _ColdPool(device)
    for elements in ELEMENTS[-1:] if quick else ELEMENTS:
        found += [_copy(pool, elements), _elementwise(pool, elements)]
    return [*found, *_others(device, pool)]


def _matmul(device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    m, n, k = shape
    kind = DTYPES[dtype]

    def build() -> Callable[[], object]:
        a_MK, b_NK = _random(device, kind, m, k), _random(device, kind, n, k)
        return lambda: F.linear(a_MK, b_NK)

    return Kernel("matmul", dtype, shape, 2 * m * n * k, (m * k + n * k + m * n) * kind.itemsize, build)


def _attention(device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    """Causal attention counted in full: 4 T^2 E FLOPs per head, as a fused kernel's ledger entry has it."""
    heads, length, width = shape

    def build() -> Callable[[], object]:
        q, k, v = (_random(device, DTYPES[dtype], 1, heads, length, width) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    nbytes = 4 * heads * length * width * DTYPES[dtype].itemsize
    return Kernel("attention", dtype, shape, 4 * heads * length**2 * width, nbytes, build)


def _attention_backward(device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    """Five matmuls against the two of the forward: scores again, then dV, dP, dQ, dK."""
    heads, length, width = shape

    def build() -> Callable[[], object]:
        q, k, v = (_random(device, DTYPES[dtype], 1, heads, length, width).requires_grad_() for _ in range(3))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.ones_like(output)
        return lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)

    nbytes = 8 * heads * length * width * DTYPES[dtype].itemsize
    return Kernel("attention", dtype, shape, 10 * heads * length**2 * width, nbytes, build, "backward", operations=2)


class _ColdPool:
    """Operands that no cache holds: views of a buffer larger than any, taken in turn.

    In a training step most operands were last touched many megabytes ago; the same tensor over and over would
    show the speed of a cache.
    """

    def __init__(self, device: torch.device, nbytes: int = 256 * MIB) -> None:
        self._buffer = torch.ones(nbytes // 4, device=device)

    def take(self, *shape: int) -> Callable[[], torch.Tensor]:
        """A function that gives the next fp32 view of this shape."""
        size = math.prod(shape)
        whole = len(self._buffer) // size * size
        views = cycle(self._buffer[:whole].view(-1, *shape).unbind())
        return lambda: next(views)


def _copy(pool: _ColdPool, elements: int) -> Kernel:
    def build() -> Callable[[], object]:
        take = pool.take(elements)
        return lambda: take().copy_(take())

    return Kernel("copy", "fp32", (elements,), 0, 8 * elements, build)


def _elementwise(pool: _ColdPool, elements: int) -> Kernel:
    def build() -> Callable[[], object]:
        take = pool.take(elements)
        return lambda: torch.mul(take(), take(), out=take())

    return Kernel("elementwise", "fp32", (elements,), elements, 12 * elements, build)


def _others(device: torch.device, pool: _ColdPool) -> Iterator[Kernel]:
    """One kernel for each of the other kinds, at the size it has in a small training step."""
    rows, width, vocabulary = 4096, 512, 8192
    n, logits = rows * width, rows // 4 * vocabulary

    def norm() -> Callable[[], object]:
        take_ND, weight_D = pool.take(rows, width), torch.ones(width, device=device)
        return lambda: F.layer_norm(take_ND(), (width,), weight_D)

    def softmax() -> Callable[[], object]:
        take_NV = pool.take(rows // 4, vocabulary)
        return lambda: F.log_softmax(take_NV(), -1)

    def embedding() -> Callable[[], object]:
        table_VD = _random(device, torch.float32, vocabulary, width)
        ids_N = torch.randint(vocabulary, (rows,), device=device)
        return lambda: F.embedding(ids_N, table_VD)

    def reduction() -> Callable[[], object]:
        take_ND = pool.take(rows, width)
        return lambda: take_ND().sum()

    def random() -> Callable[[], object]:
        take_ND = pool.take(rows, width)
        return lambda: F.dropout(take_ND(), 0.1)

    def update() -> Callable[[], object]:
        weight = torch.nn.Parameter(_random(device, torch.float32, rows, width))
        weight.grad = torch.ones_like(weight)
        return torch.optim.AdamW([weight], lr=1e-6, fused=device.type in ("cpu", "cuda")).step

    yield Kernel("norm", "fp32", (n,), n, 8 * n, norm)
    yield Kernel("softmax", "fp32", (logits,), logits, 8 * logits, softmax)
    yield Kernel("embedding", "fp32", (n,), 0, 8 * n, embedding)
    yield Kernel("reduction", "fp32", (n,), n, 4 * n, reduction)
    yield Kernel("random", "fp32", (n,), n, 9 * n, random)
    yield Kernel("update", "fp32", (n,), n, 28 * n, update)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.rand(shape, device=device, dtype=dtype)


def operation_seconds(device: torch.device, operations: int = 400) -> float:
    """What a bare call of an operation costs however small: half of a chain runs forward, half of it backward."""
    x, y = torch.ones(8, device=device), torch.ones(8, device=device, requires_grad=True)
    start = time.perf_counter()
    for _ in range(4):
        out = y
        for _ in range(operations // 2):
            out = out.mul(x)
        torch.autograd.grad(out, y, x)
    return (time.perf_counter() - start) / (4 * operations)


def fresh_bytes_per_second(device: torch.device, nbytes: int = 64 * MIB) -> float | None:
    """How fast memory that the system has just given is written for the first time; None on an accelerator.

    The C library gives large blocks back to the system when they are freed, unless it is told to keep them;
    each new block then pays a page fault per page.
    """
    if device.type != "cpu":
        return None
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        torch.empty(nbytes // 4).fill_(1.0)
        best = min(best, time.perf_counter() - start)
    return nbytes / best
