"""A small transformer under autocast: gradient accumulation, clipping, gradients zeroed in place, a running mean."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
B, T, V, D, HEADS, ACCUMULATE = 2, 16, 64, 32, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (each.view(B, T, HEADS, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, D))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.places(torch.arange(T))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    running = torch.zeros(())
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(ACCUMULATE):
            ids = torch.randint(0, V, (B, T))
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()) / ACCUMULATE
            loss.backward()
            running += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 5:
            print(running.item())


main()
