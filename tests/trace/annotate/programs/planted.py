"""A trainer with five things planted that cost without need; each stands beside a comment with its name."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, B, T, V, D, HEADS = 8, 4, 32, 512, 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(2, 3), dim=-1)
        y = weights @ v
        y = y.transpose(1, 2).reshape(B, T, D)  # hidden copy
        return x + self.out(y)


def main():
    torch.manual_seed(0)
    embed, attention, head = nn.Embedding(V, D), Attention(), nn.Linear(D, V).to(torch.bfloat16)
    parameters = [*embed.parameters(), *attention.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    total = 0.0
    for _ in range(STEPS):
        ids = torch.randint(0, V, (B, T))
        logits = head(attention(embed(ids)).to(torch.bfloat16))
        logits = logits.float()  # upcast
        loss = F.cross_entropy(logits.view(-1, V), ids.view(-1))
        loss.backward()  # zero_grad
        optimizer.step()
        losses.append(loss)  # graph
        total += loss.item()  # item
    print(f"mean loss {total / STEPS:.3f}")


main()
