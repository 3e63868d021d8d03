"""What of DDP is not traced: a sentence with a way that is, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainledger.cli import main

pytestmark = pytest.mark.torch

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

def build(sparse=False, **options):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 4)), **options)
    return model, torch.optim.SGD(model.parameters()), torch.zeros(2, dtype=torch.int64), lambda out: out.sum()

def mixed():
    return build(mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))

def sparse():
    return build(sparse=True)
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mixed", "mixed_precision: DDP casts its parameters on another stream of the device during the forward, "
         "which is not traced; nearest that works: torch.autocast in the forward, or FSDP2 with a "
         "MixedPrecisionPolicy\n"),
        ("sparse", "sparse = true: DDP gathers the rows of sparse gradients, whose number is another in each step: "
         "they are not traced; nearest that works: sparse=False of the embedding\n"),
    ],
)  # fmt: skip
def test_what_ddp_does_in_c_is_refused(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "refused_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["trace", f"refused_program:{name}", "--world-size", "4"]) == 2
    assert capsys.readouterr().err.endswith(sentence)
