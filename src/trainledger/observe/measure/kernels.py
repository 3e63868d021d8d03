"""The kernels a calibration times: what each computes and moves, counted as a ledger entry counts it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F

from trainledger.spec.calibration import STRAIGHT
from trainledger.spec.units import MIB

Call = Callable[[], object]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# (m, n, k): cubes from cache-sized to large, and the skinny shapes of a training step: few columns, few rows,
# a vocabulary, a batch too small to fill the machine.
MATMULS = (
    (128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048),
    (2048, 256, 256), (2048, 8192, 256), (256, 1024, 2048), (16, 2048, 2048),
)  # fmt: skip
LARGE_MATMULS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 8192))
QUICK_MATMULS = ((512, 512, 512), (2048, 2048, 2048), (2048, 256, 256))
# Of backward, where either factor lies turned: gradients of inputs, then of weights (long inner dimension).
INPUT_GRADIENTS = ((1024, 512, 512), (2048, 256, 1024))
WEIGHT_GRADIENTS = ((256, 256, 2048), (1024, 512, 1024), (8192, 256, 1024))
LARGE_INPUT_GRADIENTS, LARGE_WEIGHT_GRADIENTS = ((8192, 1024, 4096),), ((1024, 4096, 8192),)
# (sequences x heads, seq_len, head_dim); a narrow head of a toy model runs at a fraction of the others' rate.
QUICK_ATTENTIONS = ((32, 256, 64), (32, 64, 8))
ATTENTIONS = (*QUICK_ATTENTIONS, (4, 1024, 64))
LARGE_ATTENTIONS = ((128, 1024, 64), (32, 4096, 128))
ELEMENTS, LARGE_ELEMENTS = (2**14, 2**18, 2**22), (2**26,)  # of the pointwise samples
# Of the kernels by name: the size they have in a small training step of a CPU, of an accelerator.
ROWS, LARGE_ROWS, WIDTH, VOCABULARY = 4096, 65536, 512, 8192
# More than any cache holds; on an accelerator room for four of the largest operands.
POOL_NBYTES, LARGE_POOL_NBYTES = 128 * MIB, 1024 * MIB
UPDATED = 2  # tensors of an update, whose states no cache holds either


@dataclass(frozen=True)
class Kernel:
    """One kind of operation at one size; ``build`` gives the call to time, with its tensors made.

    ``operation`` is the dispatched operator whose own rate it is; empty: it stands for all of its kind.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    flops: int
    nbytes: int
    build: Callable[[], Call]
    phase: str = ""
    operations: int = 1
    operation: str = ""

    @property
    def name(self) -> str:
        return f"{self.operation or self.kind} {'x'.join(map(str, self.shape))} {self.dtype}"


def kernels(device: torch.device, dtypes: list[str], *, quick: bool = False) -> list[Kernel]:
    """The kernels for a device; ``quick`` leaves out most shapes, an accelerator gets large ones too."""
    large = device.type != "cpu"
    forward = QUICK_MATMULS if quick else MATMULS + LARGE_MATMULS * large
    of_inputs = () if quick else INPUT_GRADIENTS + LARGE_INPUT_GRADIENTS * large
    of_weights = () if quick else WEIGHT_GRADIENTS + LARGE_WEIGHT_GRADIENTS * large
    attentions = QUICK_ATTENTIONS if quick else ATTENTIONS + LARGE_ATTENTIONS * large
    elements_of = ELEMENTS + LARGE_ELEMENTS * large
    most = elements_of[-1]
    pools = {dtype: cold_pool(device, dtype) for dtype in dtypes}
    results = {dtype: cold_pool(device, dtype, results=True) for dtype in dtypes}
    chosen: list[Kernel] = []
    for dtype, pool in pools.items():
        chosen += [matmul_kernel(pool, dtype, shape, SECOND_TURNED) for shape in forward]
        chosen += [matmul_kernel(pool, dtype, shape, STRAIGHT, "backward") for shape in of_inputs]
        chosen += [matmul_kernel(pool, dtype, shape, FIRST_TURNED, "backward") for shape in of_weights]
        for shape in attentions:
            chosen += [_attention(device, dtype, shape), _attention_backward(device, dtype, shape)]
    for elements in (most,) if quick else elements_of:
        chosen += [copy_kernel(pools["fp32"], elements), _elementwise(pools["fp32"], results["fp32"], "fp32", elements)]
    for dtype, pool in pools.items():
        if dtype != "fp32":
            chosen += [_elementwise(pool, results[dtype], dtype, most), *_casts(pools["fp32"], pool, dtype, most)]
        chosen += by_name(device, pool, dtype, quick=quick)
    return [*chosen, *_others(device, pools["fp32"])]


def _straight(pool: ColdPool, m: int, n: int, k: int) -> Call:
    a_MK, b_KN = pool.take(m, k), pool.take(k, n)
    return lambda: a_MK() @ b_KN()


def _second_turned(pool: ColdPool, m: int, n: int, k: int) -> Call:
    a_MK, b_NK = pool.take(m, k), pool.take(n, k)
    return lambda: F.linear(a_MK(), b_NK())


def _first_turned(pool: ColdPool, m: int, n: int, k: int) -> Call:
    a_KM, b_KN = pool.take(k, m), pool.take(k, n)
    return lambda: a_KM().t() @ b_KN()


def _apart(pool: ColdPool, m: int, n: int, k: int) -> Call:
    """Every second element of a row: no matmul takes such a stride, and torch copies the factor first."""
    a_MK, b_KN = pool.take(m, 2 * k), pool.take(k, n)
    return lambda: a_MK()[:, ::2] @ b_KN()


# How the factors lie in memory: both by rows (gradients of inputs), one transposed (a linear layer; gradients of
# weights), one with gaps.
SECOND_TURNED, FIRST_TURNED, APART = "a @ b.T", "a.T @ b", "a[:,::2] @ b"
FACTORS: dict[str, Callable[[ColdPool, int, int, int], Call]] = {
    STRAIGHT: _straight,
    SECOND_TURNED: _second_turned,
    FIRST_TURNED: _first_turned,
    APART: _apart,
}


def matmul_kernel(
    pool: ColdPool, dtype: str, shape: tuple[int, int, int], factors: str, phase: str = "", operation: str = ""
) -> Kernel:
    """A matmul of a shape (m, n, k) whose factors lie in one of the ways of `FACTORS`."""
    m, n, k = shape
    nbytes = (m * k + n * k + m * n) * DTYPES[dtype].itemsize
    build = partial(FACTORS[factors], pool, m, n, k)
    return Kernel("matmul", dtype, shape, 2 * m * n * k, nbytes, build, phase, operation=operation)


def _attention(device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    """Causal attention counted in full: 4 T^2 E FLOPs per head, as a fused kernel's ledger entry has it."""
    heads, length, width = shape

    def build() -> Call:
        q, k, v = (_random(device, DTYPES[dtype], 1, heads, length, width) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    nbytes = 4 * heads * length * width * DTYPES[dtype].itemsize
    return Kernel("attention", dtype, shape, 4 * heads * length**2 * width, nbytes, build)


def _attention_backward(device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    """Five matmuls against the two of the forward: scores again, then dV, dP, dQ, dK."""
    heads, length, width = shape

    def build() -> Call:
        q, k, v = (_random(device, DTYPES[dtype], 1, heads, length, width).requires_grad_() for _ in range(3))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.ones_like(output)
        return lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)

    nbytes = 8 * heads * length * width * DTYPES[dtype].itemsize
    return Kernel("attention", dtype, shape, 10 * heads * length**2 * width, nbytes, build, "backward", operations=2)


class ColdPool:
    """Operands that no cache holds: views of a buffer larger than any, taken in turn.

    In a training step most operands were last touched many megabytes ago; the same tensor over and over would
    show the speed of a cache.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, nbytes: int, *, results: bool = False) -> None:
        size = nbytes // dtype.itemsize
        if results:  # written before it is read; filled so that the system has given every page
            self._buffer = torch.empty(size, device=device, dtype=dtype).fill_(0.5)
        else:
            self._buffer = _random(device, dtype, size)

    def take(self, *shape: int) -> Callable[[], torch.Tensor]:
        """A function that gives the next view of this shape."""
        size = math.prod(shape)
        whole = len(self._buffer) // size * size
        views = cycle(self._buffer[:whole].view(-1, *shape).unbind())
        return lambda: next(views)


def cold_pool(device: torch.device, dtype: str, nbytes: int = 0, *, results: bool = False) -> ColdPool:
    """A pool of a device's size, or of ``nbytes`` where that is more."""
    floor = POOL_NBYTES if device.type == "cpu" else LARGE_POOL_NBYTES
    return ColdPool(device, DTYPES[dtype], max(floor, nbytes), results=results)


def large_copy(device: torch.device) -> Kernel:
    """A copy of more than any cache holds."""
    return copy_kernel(cold_pool(device, "fp32"), ELEMENTS[-1] if device.type == "cpu" else LARGE_ELEMENTS[-1])


def copy_kernel(pool: ColdPool, elements: int) -> Kernel:
    take = pool.take(elements)
    return Kernel("copy", "fp32", (elements,), 0, 8 * elements, lambda: lambda: take().copy_(take()))


def _casts(wide: ColdPool, narrow: ColdPool, dtype: str, elements: int) -> Iterator[Kernel]:
    """Between fp32 and a narrower format, which autocast does to every operand."""
    nbytes = (4 + DTYPES[dtype].itemsize) * elements
    for source, target, name in ((wide, narrow, "fp32"), (narrow, wide, dtype)):
        build = partial(_copied, source, target, elements)
        yield Kernel("copy", name, (elements,), 0, nbytes, build, operation="_to_copy")


def _copied(source: ColdPool, target: ColdPool, elements: int) -> Call:
    take, put = source.take(elements), target.take(elements)
    return lambda: put().copy_(take())


def _elementwise(pool: ColdPool, results: ColdPool, dtype: str, elements: int) -> Kernel:
    """Results go to a pool of their own: multiplied again and again, values fade to subnormals, which are slow."""

    def build() -> Call:
        take, put = pool.take(elements), results.take(elements)
        return lambda: torch.mul(take(), take(), out=put())

    return Kernel("elementwise", dtype, (elements,), elements, 3 * DTYPES[dtype].itemsize * elements, build)


def rows_on(device: torch.device) -> int:
    """The rows of the kernels by name on a device."""
    return ROWS if device.type == "cpu" else LARGE_ROWS


def by_name(device: torch.device, pool: ColdPool, dtype: str, *, quick: bool = False) -> Iterator[Kernel]:
    """Operators whose rate is their own: activations, norms, sums over rows and over columns, softmax, embedding.

    Bytes are those that a ledger counts: of a broadcast operand its own elements.
    """
    aten, itemsize, n_rows = torch.ops.aten, DTYPES[dtype].itemsize, rows_on(device)
    n = n_rows * WIDTH
    rows, vector_D = pool.take(n_rows, WIDTH), _random(device, DTYPES[dtype], WIDTH)
    # Kind, operator, its call, elements that it reads and writes.
    calls: list[tuple[str, str, Call, int]] = [
        ("elementwise", "gelu", lambda: aten.gelu(rows(), approximate="tanh"), 2 * n),
        ("elementwise", "silu", lambda: aten.silu(rows()), 2 * n),
    ]
    if not quick:
        calls += [
            ("elementwise", "gelu_backward", lambda: aten.gelu_backward(rows(), rows(), approximate="tanh"), 3 * n),
            ("elementwise", "silu_backward", lambda: aten.silu_backward(rows(), rows()), 3 * n),
            ("elementwise", "mul", lambda: rows() * vector_D, 2 * n),
            ("reduction", "sum", lambda: rows().sum(0), n),
            ("elementwise", "add", lambda: rows() + rows(), 3 * n),
        ]
    if not quick and dtype == "fp32":
        mean_N1, logits = _random(device, torch.float32, n_rows, 1), pool.take(n // VOCABULARY, VOCABULARY)
        norm = ([WIDTH], mean_N1, mean_N1 + 1, vector_D, vector_D, [True, True, True])
        ids_N = torch.randint(VOCABULARY, (n_rows,), device=device)
        layer_norm, log_softmax = aten.native_layer_norm_backward, aten._log_softmax_backward_data
        embedding, table = aten.embedding_dense_backward, (VOCABULARY, -1, False)
        calls += [
            ("reduction", "mean", lambda: rows().mean(-1, keepdim=True), n),
            ("elementwise", "div", lambda: mean_N1.expand(n_rows, WIDTH).div(WIDTH), n),
            ("reduction", "linalg_vector_norm", lambda: torch.linalg.vector_norm(rows()), n),
            ("norm", "native_layer_norm_backward", lambda: layer_norm(rows(), rows(), *norm), 3 * n),
            ("softmax", log_softmax.__name__, lambda: log_softmax(logits(), logits(), -1, torch.float32), 3 * n),
            ("embedding", embedding.__name__, lambda: embedding(rows(), ids_N, *table), n + VOCABULARY * WIDTH),
        ]
    for kind, name, call, elements in calls:
        phase = "backward" if "backward" in name or name == "div" else ""  # the backward of a mean divides
        yield Kernel(kind, dtype, (n_rows, WIDTH), n, itemsize * elements, partial(_made, call), phase, operation=name)


def _made(call: Call) -> Call:
    return call


def _others(device: torch.device, pool: ColdPool) -> Iterator[Kernel]:
    """One kernel for each of the other kinds, at the size it has in a small training step."""
    n_rows = rows_on(device)
    n, logits = n_rows * WIDTH, n_rows // 4 * VOCABULARY

    def on_rows(operation: Callable[[torch.Tensor], object], *shape: int) -> Callable[[], Call]:
        def build() -> Call:
            take = pool.take(*shape)
            return lambda: operation(take())

        return build

    def embedding() -> Call:
        table_VD = _random(device, torch.float32, VOCABULARY, WIDTH)
        ids_N = torch.randint(VOCABULARY, (n_rows,), device=device)
        return lambda: F.embedding(ids_N, table_VD)

    def update() -> Call:
        weights = [torch.nn.Parameter(_random(device, torch.float32, n_rows, WIDTH)) for _ in range(UPDATED)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        return torch.optim.AdamW(weights, lr=1e-6, fused=device.type in ("cpu", "cuda")).step

    ones_D = torch.ones(WIDTH, device=device)
    norm = on_rows(lambda x_ND: F.layer_norm(x_ND, (WIDTH,), ones_D), n_rows, WIDTH)
    softmax = on_rows(lambda x_NV: F.log_softmax(x_NV, -1), n_rows // 4, VOCABULARY)
    yield Kernel("norm", "fp32", (n,), n, 8 * n, norm)
    yield Kernel("softmax", "fp32", (logits,), logits, 8 * logits, softmax)
    yield Kernel("embedding", "fp32", (n,), 0, 8 * n, embedding)
    yield Kernel("reduction", "fp32", (n,), n, 4 * n, on_rows(torch.Tensor.sum, n_rows, WIDTH))
    yield Kernel("random", "fp32", (n,), n, 9 * n, on_rows(lambda x_ND: F.dropout(x_ND, 0.1), n_rows, WIDTH))
    yield Kernel("update", "fp32", (UPDATED * n,), UPDATED * n, UPDATED * 28 * n, update)


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
