"""A recurrent net over pieces of one long sequence, its state cut off from the graph between them."""

import torch
from torch import nn

torch.manual_seed(0)
cell, head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 8)
optimizer = torch.optim.RMSprop([*cell.parameters(), *head.parameters()], lr=1e-3)
state = None
for _ in range(8):
    piece = torch.randn(4, 12, 8)
    out, state = cell(piece[:, :-1], state)
    loss = (head(out) - piece[:, 1:]).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = state.detach()
