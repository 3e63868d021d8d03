"""The kernels a calibration times: what each computes and moves, counted as a ledger entry counts it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F

from trainledger.spec.units import MIB

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
    build: Callable[[], Callable[[], object]]
    phase: str = ""
    operations: int = 1
    operation: str = ""

    @property
    def name(self) -> str:
        return f"{self.operation or self.kind} {'x'.join(map(str, self.shape))} {self.dtype}"


def kernels(device: torch.device, dtypes: list[str], *, quick: bool = False) -> list[Kernel]:
    """The kernels for a device; ``quick`` leaves out most shapes, an accelerator gets large ones too."""
    large = device.type != "cpu"
    shapes = QUICK_MATMULS if quick else MATMULS + (LARGE_MATMULS if large else ())
    of_inputs = INPUT_GRADIENTS + (LARGE_INPUT_GRADIENTS if large else ())
    of_weights = WEIGHT_GRADIENTS + (LARGE_WEIGHT_GRADIENTS if large else ())
    attentions = QUICK_ATTENTIONS if quick else ATTENTIONS + (LARGE_ATTENTIONS if large else ())
    elements_of = ELEMENTS + (LARGE_ELEMENTS if large else ())
    pool_nbytes = LARGE_POOL_NBYTES if large else POOL_NBYTES
    pools = {dtype: ColdPool(device, DTYPES[dtype], pool_nbytes) for dtype in dtypes}
    results = {dtype: ColdPool(device, DTYPES[dtype], pool_nbytes, results=True) for dtype in dtypes}
    found: list[Kernel] = []
    for dtype, pool in pools.items():
        found += [_forward_matmul(pool, dtype, shape) for shape in shapes]
        if not quick:
            found += [_input_gradient(pool, dtype, shape) for shape in of_inputs]
            found += [_weight_gradient(pool, dtype, shape) for shape in of_weights]
        for shape in attentions:
            found += [_attention(device, dtype, shape), _attention_backward(device, dtype, shape)]
    most = elements_of[-1]
    for elements in (most,) if quick else elements_of:
        found += [copy_kernel(pools["fp32"], elements), _elementwise(pools["fp32"], results["fp32"], "fp32", elements)]
    for dtype, pool in pools.items():
        if dtype != "fp32":
            found += [_elementwise(pool, results[dtype], dtype, most), *_casts(pools["fp32"], pool, dtype, most)]
        found += by_name(device, pool, dtype, quick=quick)
    return [*found, *_others(device, pools["fp32"])]


def matmul_kernel(
    dtype: str, shape: tuple[int, int, int], build: Callable[[], Callable[[], object]], phase: str
) -> Kernel:
    m, n, k = shape
    nbytes = (m * k + n * k + m * n) * DTYPES[dtype].itemsize
    return Kernel("matmul", dtype, shape, 2 * m * n * k, nbytes, build, phase)


def _forward_matmul(pool: ColdPool, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    """As a linear layer multiplies: by a weight that lies turned."""
    m, n, k = shape

    def build() -> Callable[[], object]:
        take_a_MK, take_b_NK = pool.take(m, k), pool.take(n, k)
        return lambda: F.linear(take_a_MK(), take_b_NK())

    return matmul_kernel(dtype, shape, build, "")


def _input_gradient(pool: ColdPool, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    m, n, k = shape

    def build() -> Callable[[], object]:
        take_a_MK, take_b_KN = pool.take(m, k), pool.take(k, n)
        return lambda: take_a_MK() @ take_b_KN()

    return matmul_kernel(dtype, shape, build, "backward")


def _weight_gradient(pool: ColdPool, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    m, n, k = shape

    def build() -> Callable[[], object]:
        take_a_KM, take_b_KN = pool.take(k, m), pool.take(k, n)
        return lambda: take_a_KM().t() @ take_b_KN()

    return matmul_kernel(dtype, shape, build, "backward")


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


def copy_kernel(pool: ColdPool, elements: int) -> Kernel:
    def build() -> Callable[[], object]:
        take = pool.take(elements)
        return lambda: take().copy_(take())

    return Kernel("copy", "fp32", (elements,), 0, 8 * elements, build)


def _casts(wide: ColdPool, narrow: ColdPool, dtype: str, elements: int) -> Iterator[Kernel]:
    """Between fp32 and a narrower format, which autocast does to every operand."""
    nbytes = (4 + DTYPES[dtype].itemsize) * elements
    for source, target, name in ((wide, narrow, "fp32"), (narrow, wide, dtype)):

        def build(source: ColdPool = source, target: ColdPool = target) -> Callable[[], object]:
            take, put = source.take(elements), target.take(elements)
            return lambda: put().copy_(take())

        yield Kernel("copy", name, (elements,), 0, nbytes, build, operation="_to_copy")


def _elementwise(pool: ColdPool, results: ColdPool, dtype: str, elements: int) -> Kernel:
    """Results go to a pool of their own: multiplied again and again, values fade to subnormals, which are slow."""

    def build() -> Callable[[], object]:
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
    rows = pool.take(n_rows, WIDTH)
    vector = _random(device, DTYPES[dtype], WIDTH)

    def kernel(kind: str, operation: str, call: Callable[[], object], nbytes: int, *, phase: str = "") -> Kernel:
        return Kernel(kind, dtype, (n_rows, WIDTH), n, nbytes, lambda: call, phase, operation=operation)

    yield kernel("elementwise", "gelu", lambda: aten.gelu(rows(), approximate="tanh"), 2 * itemsize * n)
    yield kernel("elementwise", "silu", lambda: aten.silu(rows()), 2 * itemsize * n)
    if quick:
        return
    yield kernel(
        "elementwise", "gelu_backward", lambda: aten.gelu_backward(rows(), rows(), approximate="tanh"),
        3 * itemsize * n, phase="backward",
    )  # fmt: skip
    yield kernel(
        "elementwise", "silu_backward", lambda: aten.silu_backward(rows(), rows()), 3 * itemsize * n, phase="backward"
    )
    yield kernel("elementwise", "mul", lambda: rows() * vector, 2 * itemsize * n)
    yield kernel("reduction", "sum", lambda: rows().sum(0), itemsize * n)
    yield kernel("elementwise", "add", lambda: rows() + rows(), 3 * itemsize * n)
    if dtype != "fp32":
        return
    one_N1 = _random(device, torch.float32, n_rows, 1)
    yield kernel("reduction", "mean", lambda: rows().mean(-1, keepdim=True), itemsize * n)
    yield kernel("elementwise", "div", lambda: one_N1.expand(n_rows, WIDTH).div(WIDTH), itemsize * n, phase="backward")
    yield kernel("reduction", "linalg_vector_norm", lambda: torch.linalg.vector_norm(rows()), itemsize * n)
    mean_N1, scale_N1 = one_N1, one_N1 + 1
    yield kernel(
        "norm", "native_layer_norm_backward",
        lambda: aten.native_layer_norm_backward(
            rows(), rows(), [WIDTH], mean_N1, scale_N1, vector, vector, [True, True, True]
        ),
        3 * itemsize * n, phase="backward",
    )  # fmt: skip
    logits = pool.take(n // VOCABULARY, VOCABULARY)
    yield kernel(
        "softmax", "_log_softmax_backward_data",
        lambda: aten._log_softmax_backward_data(logits(), logits(), -1, torch.float32),
        3 * itemsize * n, phase="backward",
    )  # fmt: skip
    ids_N = torch.randint(VOCABULARY, (n_rows,), device=device)
    yield kernel(
        "embedding", "embedding_dense_backward",
        lambda: aten.embedding_dense_backward(rows(), ids_N, VOCABULARY, -1, False),
        itemsize * (n + VOCABULARY * WIDTH), phase="backward",
    )  # fmt: skip


def _others(device: torch.device, pool: ColdPool) -> Iterator[Kernel]:
    """One kernel for each of the other kinds, at the size it has in a small training step."""
    n_rows = rows_on(device)
    n, logits = n_rows * WIDTH, n_rows // 4 * VOCABULARY

    def norm() -> Callable[[], object]:
        take_ND, weight_D = pool.take(n_rows, WIDTH), torch.ones(WIDTH, device=device)
        return lambda: F.layer_norm(take_ND(), (WIDTH,), weight_D)

    def softmax() -> Callable[[], object]:
        take_NV = pool.take(n_rows // 4, VOCABULARY)
        return lambda: F.log_softmax(take_NV(), -1)

    def embedding() -> Callable[[], object]:
        table_VD = _random(device, torch.float32, VOCABULARY, WIDTH)
        ids_N = torch.randint(VOCABULARY, (n_rows,), device=device)
        return lambda: F.embedding(ids_N, table_VD)

    def reduction() -> Callable[[], object]:
        take_ND = pool.take(n_rows, WIDTH)
        return lambda: take_ND().sum()

    def random() -> Callable[[], object]:
        take_ND = pool.take(n_rows, WIDTH)
        return lambda: F.dropout(take_ND(), 0.1)

    def update() -> Callable[[], object]:
        weights = [torch.nn.Parameter(_random(device, torch.float32, n_rows, WIDTH)) for _ in range(UPDATED)]
        for each in weights:
            each.grad = torch.ones_like(each)
        return torch.optim.AdamW(weights, lr=1e-6, fused=device.type in ("cpu", "cuda")).step

    yield Kernel("norm", "fp32", (n,), n, 8 * n, norm)
    yield Kernel("softmax", "fp32", (logits,), logits, 8 * logits, softmax)
    yield Kernel("embedding", "fp32", (n,), 0, 8 * n, embedding)
    yield Kernel("reduction", "fp32", (n,), n, 4 * n, reduction)
    yield Kernel("random", "fp32", (n,), n, 9 * n, random)
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
