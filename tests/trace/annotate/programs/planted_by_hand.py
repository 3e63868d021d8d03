"""A trainer without any optimizer of torch.optim; what is planted stands beside a comment with its name."""

import torch
import torch.nn.functional as F

STEPS, B, IN, OUT, LR = 8, 4, 16, 5, 0.1


def main():
    torch.manual_seed(0)
    w = torch.randn(IN, OUT, requires_grad=True)
    b = torch.zeros(OUT, requires_grad=True)
    losses = []
    total = 0.0
    for _ in range(STEPS):
        x, y = torch.randn(B, IN), torch.randint(0, OUT, (B,))
        loss = F.cross_entropy(x @ w + b, y)
        loss.backward()  # zero_grad
        with torch.no_grad():
            w -= LR * w.grad  # step
            b -= LR * b.grad
        losses.append(loss)  # graph
        total += loss.item()  # item
    print(f"mean loss {total / STEPS:.3f}")


main()
