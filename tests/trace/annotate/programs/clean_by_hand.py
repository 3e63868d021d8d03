"""An optimizer written by hand: two micro-batches, gradients cleared in place, clipped weights, an average of them."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
STEPS, MICRO, LR, BETA, DECAY = 8, 2, 1e-2, 0.9, 0.99


class Momentum:
    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.velocities = [torch.zeros_like(each) for each in self.parameters]

    def step(self):
        for p, velocity in zip(self.parameters, self.velocities, strict=True):
            velocity.mul_(BETA).add_(p.grad)
            p.data.mul_(1 - LR * 0.1)
            p.data.add_(velocity, alpha=-LR)
            p.grad.zero_()
            p.data.clamp_(-1, 1)


def main():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    average = copy.deepcopy(model)
    optimizer = Momentum(model.parameters())
    losses = []
    for _ in range(STEPS):
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True))
        for _ in range(MICRO):
            x = torch.randn(4, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / MICRO
            loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 1 - DECAY)
        losses.append(loss.detach())
    print(f"loss {torch.stack(losses).mean():.3f}")


main()
