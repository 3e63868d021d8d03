"""A module of somebody's, and changes to it that move what its step costs."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import torch

from trainledger.answers.budgets.summary import Summary, summarize
from trainledger.trace import trace

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x):
        h = self.up(x)
        h = F.relu(h)
        y = self.down(h)
        return x + y


def build():
    return nn.Sequential(Block(), Block())


def loss(output):
    return output.sum()
"""
ROWS = 1000
KEPT_OF_H, KEPT_OF_Y = 2 * ROWS * 128 * 4, 2 * ROWS * 64 * 4  # of both blocks, fp32


def line_of(source: str, text: str) -> int:
    """The number of the first line that says this."""
    return next(at for at, line in enumerate(source.splitlines(), 1) if line.strip() == text)


_NUMBERS = itertools.count()


def traced(source: str, folder: Path) -> Summary:
    """The figures of the step of a source, written to ``model.py`` of a folder and imported anew from there."""
    (folder / "model.py").write_text(source)
    spec = importlib.util.spec_from_file_location(f"planted_{next(_NUMBERS)}", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    code = compile(source, str(folder / "model.py"), "exec")
    sys.modules[spec.name] = module
    exec(code, module.__dict__)
    model = module.build()
    ledger = trace(model, torch.zeros(ROWS, 64), loss=module.loss, optimizer=torch.optim.AdamW(model.parameters()))
    assert not ledger.partial
    return summarize(ledger, root=folder)
