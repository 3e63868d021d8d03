"""What annotating costs: processor time of a step without and with it, at sizes where operations are short and long.

    OMP_NUM_THREADS=1 python bench/annotate.py

A small GPT, fp32, AdamW, one thread; the least of the steps' own process times, three runs of each taken in turn.
Also a loop of plain Python, whose lines are counted and do nothing to tensors.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = {"short steps": (64, 2, 4, 64, 4, 512, 20), "long steps": (256, 4, 8, 256, 8, 8192, 4)}
PROGRAM = """
import sys, time
import torch, torch.nn.functional as F
from torch import nn
torch.set_num_threads(1)
D, L, H, T, B, V, STEPS = map(int, sys.argv[1:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = (each.view(B, T, H, -1).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, D))
        return x + self.down(F.gelu(self.up(self.between(x))))


model = nn.Sequential(nn.Embedding(V, D), *(Block() for _ in range(L)), nn.LayerNorm(D), nn.Linear(D, V, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
least = 1e9
for _ in range(STEPS):
    ids = torch.randint(0, V, (B, T))
    began = time.process_time()
    optimizer.zero_grad()
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    least = min(least, time.process_time() - began)
print("seconds", least)
"""
LOOP = """
import time
began, total = time.process_time(), 0
for at in range(300_000):
    total += at
print("seconds", (time.process_time() - began) / 600_000)
"""


def least(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = next(each for each in (done.stdout + done.stderr).splitlines() if each.startswith("seconds"))
    return float(told.split()[1])


def both(program: str, arguments: tuple[int, ...]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program)
        words = [str(file), *map(str, arguments)]
        plain = [sys.executable, *words]
        annotated = [sys.executable, "-m", "trainledger", "annotate", "--busy", *words]
        times = [(least(plain), least(annotated)) for _ in range(3)]
    return min(each for each, _ in times), min(each for _, each in times)


def main() -> None:
    for name, sizes in SIZES.items():
        plain, annotated = both(PROGRAM, sizes)
        print(f"{name}: {1e3 * plain:.1f} ms plain, {1e3 * annotated:.1f} ms annotated, {annotated / plain:.2f} times")
    plain, annotated = both(LOOP, ())
    print(f"a line of Python: {1e9 * plain:.0f} ns plain, {1e9 * annotated:.0f} ns annotated")


if __name__ == "__main__":
    main()
