"""A regression with an average of the weights, evaluated under no_grad every five steps, the best loss kept."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
inputs, targets = torch.randn(256, 16), torch.randn(256, 1)
history, best = [], float("inf")


@torch.no_grad()
def evaluate(network):
    network.eval()
    total = torch.zeros(())
    for start in range(0, 256, 64):
        total += (network(inputs[start : start + 64]) - targets[start : start + 64]).square().sum()
    network.train()
    return total.item() / 256


for step in range(20):
    pick = torch.randint(0, 256, (32,))
    loss = (model(inputs[pick]) - targets[pick]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    history.append(loss.detach())
    if step % 5 == 4:
        now = evaluate(average)
        if now < best:
            best, kept = now, {name: each.clone() for name, each in model.state_dict().items()}
print(best, torch.stack(history).mean().item())
