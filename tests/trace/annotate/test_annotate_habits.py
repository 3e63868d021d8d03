"""Mistakes that cost no byte: each planted script is found at its line, and the corrected one is let alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainledger.trace.annotate.annotate import annotate

torch.set_num_threads(1)

HEAD = """
import time
from time import perf_counter
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
"""
ACCUMULATE = """
for step in range(3):
    optimizer.zero_grad()
    for a, b in zip(x.chunk(4), y.chunk(4)):
        loss = F.cross_entropy(model(a.to(device)), b.to(device))
        {backward}
    {after}
    optimizer.step()
"""
CLIP = """
for step in range(3):
    optimizer.zero_grad()
    F.cross_entropy(model(x.to(device)), y.to(device)).backward()
    {before}
    optimizer.step()
    {after}
"""
EVALUATE = """
def evaluate():
    {mode}
    with torch.no_grad():
        return F.cross_entropy(model(x.to(device)), y.to(device)){planted}
evaluate()
{again}
"""
TIME = """
w = torch.randn(64, 64, device=device)
for step in range(3):
    {clock}
    start = perf_counter()
    z = w @ w
    {wait}
    seconds = {end}
"""
PIN = """
for step in range(3):
    batch = x{pin}
    there = batch.to(device, non_blocking={how}
"""
CLIPPED = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
DIVIDE = "for p in model.parameters(): p.grad /= 4"
TRAIN = "model.train(); F.cross_entropy(model(x.to(device)), y.to(device)).backward()"
WAIT = "torch.cuda.synchronize()"
# Kind, whether a GPU is pretended, the script with the mistake (its line ends with # HERE), scripts without it.
CASES = {
    "loss not divided": (False, ACCUMULATE.format(backward="loss.backward()  # HERE", after=""), [
        ACCUMULATE.format(backward="(loss / 4).backward()", after=""),
        ACCUMULATE.format(backward="loss.backward()", after=DIVIDE),
        ACCUMULATE.format(backward="loss.backward(); optimizer.step(); optimizer.zero_grad()", after=""),
        ACCUMULATE.replace("device))\n", "device), reduction=\"sum\")\n").format(backward="loss.backward()", after=""),
    ]),
    "clipped after the step": (False, CLIP.format(before="", after=CLIPPED + "  # HERE"), [
        CLIP.format(before=CLIPPED, after=""), CLIP.format(before="", after="optimizer.zero_grad(); " + CLIPPED),
    ]),
    "evaluated in train mode": (False, EVALUATE.format(mode="pass", planted="  # HERE", again=""), [
        EVALUATE.format(mode="model.eval()", planted="", again=TRAIN),
        EVALUATE.format(mode="model[1].eval(); model[3].p = 0.0", planted="", again=""),
        "from torch.utils.checkpoint import checkpoint\na = x.to(device).requires_grad_()\n"
        "checkpoint(model, a, use_reentrant=True).sum().backward()",
    ]),
    "timed without synchronize": (True, TIME.format(clock="", wait="", end="perf_counter() - start  # HERE"), [
        TIME.format(clock="", wait=WAIT, end="perf_counter() - start"),
        TIME.format(clock="", wait="print(z.sum().item())", end="perf_counter() - start"),
        TIME.format(clock="w @ w; t0 = time.time(); waited = t0 - start if step else 0", wait=WAIT, end="t0"),
        TIME.format(clock="", wait="", end="start"),
    ]),
    "non_blocking without pinned memory": (True, PIN.format(pin="", how="True)  # HERE"), [
        PIN.format(pin=".pin_memory()", how="True)"), PIN.format(pin="", how="False)"),
        "\nloader = torch.utils.data.DataLoader(x, pin_memory=True)" + PIN.format(pin="", how="True)"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.long
def test_a_mistake_is_found_at_its_line_and_not_when_it_is_mended(kind: str, tmp_path: Path) -> None:
    pretended, planted, mended = CASES[kind]
    for fake in (False, True):
        for at, body in enumerate([planted, *mended]):
            file = tmp_path / f"script_{at}.py"
            file.write_text(HEAD + body)
            lines = [n for n, text in enumerate((HEAD + body).splitlines(), 1) if text.endswith("# HERE")]
            annotation = annotate(file, fake=fake, device="cuda" if pretended else None)
            assert annotation.ended == ""
            found = [each for each in annotation.findings if each.kind in CASES]
            assert [(each.kind, each.line) for each in found] == [
                (kind, f"{annotation.script}:{line}") for line in lines
            ], body
            assert len(lines) == (at == 0)


def test_asserts_that_fail_on_fake_tensors_may_be_assumed_to_hold(tmp_path: Path) -> None:
    """As in public lectures: asserts on values, types and addresses, which fake tensors do not have."""
    file = tmp_path / "asserts.py"
    body = "import torch\nx = torch.ones(3) * 2\nassert x.sum() == 6 and torch.equal(x, 2 * torch.ones(3))\n"
    body += "assert x.tolist() == [2, 2, 2], 'wrong'\nassert x.shape == (3,)\nassert type(x) is torch.Tensor\n"
    body += "def storage(x): return x.untyped_storage().data_ptr()\n"
    body += "assert storage(x) == storage(x[1:]) and storage(x) != storage(x.clone())\ny = x @ x\n"
    file.write_text(body)
    assert annotate(file).ended == ""
    assert ":3" in annotate(file, fake=True, on_error=lambda text: None).ended
    passed = annotate(file, fake=True, assume_asserts=True)
    assert passed.ended == ""
    said = f"the asserts at {passed.script}:3, 4, 6 fail on fake tensors and are assumed to hold"
    assert said in passed.notes
    assert passed.total.flops > 0
