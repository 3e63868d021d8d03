"""Programs as others write them: files, copies, masks, loaders, printed losses, a signal, a process group of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from trainledger.trace.annotate.annotate import annotate
from trainledger.trace.annotate.annotation import Annotation

torch.set_num_threads(1)

BEGIN = """
import copy, os, sys
import torch
import torch.nn.functional as F
from torch import nn
folder = os.path.dirname(os.path.abspath(__file__))
"""


def script(folder: Path, source: str) -> Path:
    file = folder / "script.py"
    file.write_text(BEGIN + textwrap.dedent(source))
    return file


def fake(folder: Path, source: str, *, ends: bool = True, **options: object) -> Annotation:
    found = annotate(script(folder, source), fake=True, **options)  # type: ignore[arg-type]
    assert (found.ended == "") == ends, found.ended
    return found


def at(found: Annotation, text: str) -> int:
    return next(each.number for each in found.files[0].lines if text in each.text)


# Files

LOADED = """
torch.save({"a": torch.ones(1000), "b": torch.zeros(())}, folder + "/weights.pt")
state = torch.load(folder + "/weights.pt")
twice = state["a"] * 2
del state
large = torch.ones(3000)
"""


def test_what_a_file_holds_is_live_from_where_it_is_loaded(tmp_path: Path) -> None:
    found = annotate(script(tmp_path, LOADED))
    assert found.ended == ""
    assert found.peak_nbytes == 4000 + 12000  # not with the file, which is gone by then
    assert found.line(at(found, "torch.load")).own.allocated == 4004


@pytest.mark.long
def test_a_fake_program_loads_what_it_has_saved_and_shapes_of_files(tmp_path: Path) -> None:
    source = """
    model, again = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    name = sys.argv[1] if len(sys.argv) > 1 else folder + "/weights.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, folder + "/weights.pt")
    state = torch.load(name, map_location="cpu")
    again.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert state["step"] == 2 and state["optimizer"]["state"][0]["step"].item() == 2
    """
    found = fake(tmp_path, source)
    assert not (tmp_path / "weights.pt").exists()
    assert any("torch.save wrote nothing" in each for each in found.notes)
    assert not any("torch.load" in each for each in found.notes)
    subprocess.run([sys.executable, str(tmp_path / "script.py")], check=True)
    read = annotate(tmp_path / "script.py", [str(tmp_path / "weights.pt")], fake=True)
    assert read.ended == ""
    (tmp_path / "weights.pt").rename(tmp_path / "other.pt")
    read = annotate(tmp_path / "script.py", [str(tmp_path / "other.pt")], fake=True)
    assert read.ended == ""
    assert any("torch.load read shapes alone" in each for each in read.notes)


def test_copies_and_printed_numbers(tmp_path: Path) -> None:
    found = fake(
        tmp_path,
        """
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        average = copy.deepcopy(model)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        kept = copy.deepcopy([loss.detach(), model[1].running_mean])
        assert f"{loss:.3f} {loss.detach()}" == "0.000 0.0", f"{loss:.3f} {loss.detach()}"
        assert str(loss.detach()) == "tensor(0.)" and float(loss.detach().cpu().numpy()) == 0.0
        """,
        device="cuda",
    )
    assert found.line(at(found, "average =")).alive == 4 * (8 * 8 + 8 + 4 * 8) + 8


# Masks

MASKED = """
x = torch.randn(64, 8)
chosen = x[:, 0] > 0
row = torch.where(chosen)[0]
y = x[row] @ torch.ones(8, 8)
z = x[chosen] @ torch.ones(8, 8)
values, places, counts = torch.unique(row, return_inverse=True, return_counts=True)
"""


@pytest.mark.parametrize(("assume", "rows"), [((), 64), (("nonzero=1/4",), 16)])
def test_masks_find_all_or_a_share(assume: tuple[str, ...], rows: int, tmp_path: Path) -> None:
    found = fake(tmp_path, MASKED, assume=assume)
    for text in ("y =", "z ="):
        assert found.line(at(found, text)).own.flops == 2 * rows * 8 * 8
    said = [each for each in found.notes if "found" in each]
    assert len(said) == 3
    assert all(("upper bound" in each) == (not assume) for each in said)


def test_a_model_on_the_meta_device_costs_nothing(tmp_path: Path) -> None:
    found = fake(
        tmp_path,
        """
        with torch.device("meta"):
            reference, model = nn.Linear(30000, 30000), nn.Linear(8, 8)
        model.to_empty(device="cpu")
        nn.init.ones_(model.weight)
        model(torch.ones(2, 8)).sum().backward()
        """,
    )
    assert found.peak_nbytes < 10_000
    assert found.total.moved < 10_000


def test_an_empty_batch_is_refused_with_its_line(tmp_path: Path) -> None:
    found = fake(
        tmp_path,
        """
        model = nn.Embedding(10, 4)
        data = torch.arange(100) % 10
        first, last = torch.randint(0, 100, (2,)).sort().values.tolist()
        model(data[first:last]).sum().backward()
        """,
        ends=False,
    )
    assert f"the batch is empty: the slice at {found.script}:{at(found, 'data[first')}" in found.ended


def test_flex_attention_is_counted_dense(tmp_path: Path) -> None:
    found = fake(
        tmp_path,
        """
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        q = torch.randn(2, 4, 128, 16, device="cuda", requires_grad=True)
        y = flex_attention(q, q, q)
        y.sum().backward()
        """,
        device="cuda",
    )
    line = found.line(at(found, "y = flex"))
    forward = 2 * 2 * 2 * 4 * 128 * 128 * 16
    assert forward <= line.own.flops < forward + 100  # with those of the empty mask
    assert line.backward.flops >= 2.5 * forward


# Waits

WAITS = """
class Lengths(torch.utils.data.Dataset):
    def __init__(self):
        self.lengths = torch.randint(1, 8, (32,))
    def __len__(self):
        return 32
    def __getitem__(self, at):
        return torch.ones(8) * self.lengths[at].item()
model = nn.Linear(8, 8).to(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
limits = torch.ones(8)
for at, x in enumerate(torch.utils.data.DataLoader(Lengths(), batch_size=8)):
    limit = limits[at].item()
    loss = model(x.to(sys.argv[1])).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_read_of_the_host_is_no_wait_for_the_accelerator(tmp_path: Path) -> None:
    file = script(tmp_path, WAITS)
    there = annotate(file, ["cuda"], device="cuda")
    assert (there.ended, there.findings) == ("", ())
    here = annotate(file, ["cpu"])
    assert [each.line for each in here.findings] == [f"{here.script}:{at(here, 'limit = ')}"]


# A process group of one, a GPU that is asked

WORLD = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = DistributedDataParallel(nn.Linear(8, 8).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
assert dist.get_world_size() == 1 and torch.accelerator.current_accelerator().type == "cuda"
assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] >= torch.cuda.memory_allocated() > 0
with torch.cuda.nvtx.range("end"), torch.cuda.stream(torch.cuda.Stream()):
    print(torch.cuda.get_device_properties(0).multi_processor_count, torch.cuda.memory_summary())
dist.destroy_process_group()
"""


def test_the_only_rank_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake(tmp_path, WORLD, device="cuda")
    assert found.steps == 2
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused = fake(tmp_path, WORLD, device="cuda", ends=False)
    assert "trace --world-size 4 accounts for a rank" in refused.ended


@pytest.mark.process
def test_on_sigterm_what_ran_is_printed(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        """
        x = torch.ones(8, 8) @ torch.ones(8, 8)
        print("begun", file=sys.stderr, flush=True)
        while True:
            x = x * 1.0
        """,
    )
    command = [sys.executable, "-m", "trainledger", "annotate", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr is not None
    while "begun" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "terminated at" in out
    assert "x = torch.ones(8, 8) @" in out
