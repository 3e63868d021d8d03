"""A small training loop in the manner that people write one, metered, with a fault that its argument names."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import trainledger as tl

FAULT, RUN_DIR, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
WIDTH = 1001 if FAULT == "odd sizes" else 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x_BTD):
        hidden = F.gelu(self.up(self.norm(x_BTD)))
        if FAULT == "hidden copy":
            hidden = hidden.transpose(1, 2).reshape(hidden.shape[0], -1).view(hidden.shape)
        return x_BTD + self.down(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(512, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(WIDTH, 512)

    def forward(self, tokens_BT):
        if FAULT == "slow rank" and dist.get_rank() == 1:
            time.sleep(0.03)
        return self.head(self.blocks(self.embed(tokens_BT)))


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        if FAULT == "slow data":
            time.sleep(0.05)
        yield torch.randint(0, 512, (4, 129), generator=generator)


def train():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    deep = 4 if FAULT in ("item", "hidden copy", "odd sizes", "deep") else None
    meter = tl.meter_loop(model, optimizer, RUN_DIR, deep=deep)
    losses = []
    for step, tokens_BT in enumerate(meter.data(batches()), 1):
        logits = model(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
        if FAULT == "item":
            total = sum(each.grad.norm().item() for each in model.parameters())
            assert total >= 0
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if FAULT == "leak":
            losses.append(loss + 0 * logits.square().mean())
        meter.log(loss=loss)
        if FAULT == "slow checkpoint" and step % 10 == 0:
            with meter.phase("checkpoint"), open(os.environ["DISK"], "wb") as disk:
                torch.save(model.state_dict(), disk)
        if step == STEPS:
            break
    meter.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
