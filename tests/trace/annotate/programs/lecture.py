"""A lecture that runs: small experiments on what tensors cost, each a function with its text.

What is said is asserted, so that the lecture cannot be wrong.
"""

import torch
import torch.nn.functional as F

BOOK: list[str] = []


def text(words: str) -> None:
    BOOK.append(words)


def nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def main() -> None:
    memory_of_tensors()
    strides()
    views_are_free()
    some_calls_copy()
    pointwise_work()
    products()
    named_dims()
    gradients()
    one_step()


def memory_of_tensors() -> None:
    text("A tensor takes its number of elements times the bytes of one.")
    x = torch.zeros(64, 128)
    assert nbytes(x) == 64 * 128 * 4
    y = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert nbytes(y) == nbytes(x) // 2
    text("Not initialized memory costs its bytes and no work.")
    z = torch.empty(256, 256)
    assert nbytes(z) == 262144


def strides() -> None:
    text("Element [i, j] lies at i times the first stride plus j times the second.")
    x = torch.arange(24.0).view(4, 6)
    assert x.stride() == (6, 1)
    assert x[2, 3] == x.flatten()[2 * 6 + 3 * 1]


def views_are_free() -> None:
    x = torch.ones(64, 32)
    row = x[0]
    assert same_storage(x, row)
    turned = x.transpose(0, 1)
    assert same_storage(x, turned)
    assert not turned.is_contiguous()
    wide = x[:, None, :].expand(64, 16, 32)
    text("An expanded dim has stride 0: no element is written.")
    assert wide.stride() == (32, 0, 1)
    x[0, 0] = 7
    assert row[0] == 7
    assert turned[0, 0] == 7


def some_calls_copy() -> None:
    x = torch.randn(64, 32)
    turned = x.t()
    flat = turned.reshape(-1)
    text("reshape is a view where it can be, and here it cannot.")
    assert not same_storage(x, flat)
    packed = turned.contiguous()
    assert packed.is_contiguous()
    half = x.to(torch.bfloat16)
    assert nbytes(half) == nbytes(x) // 2
    picked = x[[0, 2, 4]]
    assert not same_storage(x, picked)


def pointwise_work() -> None:
    x = torch.rand(128, 64)
    y = torch.relu(x)
    z = x + y
    text("One operation for twelve bytes: such work waits for memory.")
    z.mul_(2)
    upper = x.triu()
    assert upper.shape == z.shape


def products() -> None:
    B, D, K = 64, 128, 32
    x = torch.ones(B, D)
    w = torch.randn(D, K)
    y = x @ w
    text("Two operations for each of B x D x K.")
    assert y.shape == (B, K)
    stack = torch.ones(4, 8, B, D) @ w
    assert stack.shape == (4, 8, B, K)


def named_dims() -> None:
    q = torch.randn(2, 16, 4, 8)
    k = torch.randn(2, 16, 4, 8)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    mean = torch.einsum("bhqk->bh", scores)
    assert mean.shape == (2, 4)


def gradients() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    w = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
    loss = 0.5 * ((x @ w) - 5).pow(2)
    loss.backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.tensor([1.0, 2.0, 3.0]))


def one_step() -> None:
    layers = [torch.nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3)]
    optimizer = torch.optim.SGD(layers, lr=0.01)
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    for layer in layers:
        x = torch.relu(x @ layer)
    loss = F.mse_loss(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    text(f"The loss is {loss.item():.2f}.")


if __name__ == "__main__":
    main()
