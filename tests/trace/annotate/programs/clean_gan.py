"""Two models against each other, each with its optimizer; the loss of one leaves gradients in the other."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
judge = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
makers = torch.optim.Adam(maker.parameters(), lr=1e-3)
judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
for _ in range(8):
    real = torch.randn(16, 2)
    made = maker(torch.randn(16, 8))
    judges.zero_grad()
    of_judge = F.binary_cross_entropy_with_logits(judge(real), ones)
    of_judge = of_judge + F.binary_cross_entropy_with_logits(judge(made.detach()), zeros)
    of_judge.backward()
    judges.step()
    makers.zero_grad()
    of_maker = F.binary_cross_entropy_with_logits(judge(made), ones)
    of_maker.backward()
    makers.step()
