"""A model that returns its loss with something else, as nanoGPT's does: which part of the output is the loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.trace import trace
from trainledger.trace.target import inputs_of, load_target, trace_target

pytestmark = pytest.mark.torch

CODE = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

class GPT(nn.Module):
    '''As nanoGPT: logits and loss with targets; of the last position, and no loss, without.'''

    def __init__(self):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, 50), targets.view(-1), ignore_index=-1)

class AsDict(GPT):
    def forward(self, idx, targets):
        logits, loss = super().forward(idx, targets)
        return {"logits": logits, "nll": loss}

@dataclass
class Output:
    logits: torch.Tensor
    nll: torch.Tensor

class AsFields(AsDict):
    def forward(self, idx, targets):
        return Output(**super().forward(idx, targets))

def second(output):
    logits, loss = output
    return loss
"""
BOTH = ["--input", "idx=int64[2,8]", "--input", "targets=int64[2,8]"]
TOKENS = inputs_of(["idx=int64[2,8]", "targets=int64[2,8]"])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "nano_gpt", raising=False)
    (tmp_path / "nano_gpt.py").write_text(CODE)


@pytest.mark.parametrize(
    ("model", "loss"),
    [("GPT", ".1"), ("GPT", ".-1"), ("GPT", "nano_gpt:second"), ("AsDict", ".nll"), ("AsFields", ".nll")],
)
def test_a_part_of_the_output_is_the_loss(model: str, loss: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", f"nano_gpt:{model}", *BOTH, "--loss", loss, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    expected = trace(load_target("nano_gpt:GPT")(), (torch.zeros(2, 8, dtype=torch.int64),) * 2,
                     loss=lambda output: output[1], optimizer=None)  # fmt: skip
    assert told["partial"] == ""
    matmuls = sum(each.flops for each in expected if each.kind == "matmul")
    assert matmuls == 3 * 2 * 16 * 50 * 16
    assert told["model_flops"] == expected.model_flops


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("GPT", r"not a tuple of \(\.0\) fp32\[2,8,50\], \(\.1\) fp32\[\]; nearest that works: --loss \.1"),
        ("AsDict", r"not a dict of \(\.logits\) fp32\[2,8,50\], \(\.nll\) fp32\[\]; nearest that works: --loss \.nll"),
        ("AsFields", r"not a Output of .*; nearest that works: --loss \.nll"),
    ],
)
def test_without_one_the_output_is_described_and_its_scalar_proposed(model: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=rf"--loss: the loss must be a scalar tensor, {said}"):
        trace_target(load_target(f"nano_gpt:{model}"), inputs=TOKENS)


def test_parts_that_are_none() -> None:
    target = load_target("nano_gpt:GPT")
    for loss in (".2", ".loss", ".0"):
        with pytest.raises(InvalidInput, match=r"is no scalar of what the model returned, a tuple .*--loss \.1"):
            trace_target(target, inputs=TOKENS, loss=loss)
    alone = inputs_of(["idx=int64[2,8]"])
    with pytest.raises(InvalidInput, match=r"a tuple of \(\.0\) fp32\[2,1,50\], \(\.1\) None; nearest .*targets=int64"):
        trace_target(target, inputs=alone, loss=".1")
    with pytest.raises(InvalidInput, match=r"--label: \.1 is a part of what the model returned and takes no label"):
        trace_target(target, inputs=TOKENS, loss=".1", label=torch.zeros(2, 8))


def test_python_names_the_part_in_python() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"give one with loss=lambda output: output\[1\]$"):
        trace(load_target("nano_gpt:GPT")(), (tokens, tokens))
    with pytest.raises(ValueError, match=r"give one with loss=lambda output: output\[.nll.\]$"):
        trace(load_target("nano_gpt:AsDict")(), (tokens, tokens))
