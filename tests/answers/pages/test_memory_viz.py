"""Files for PyTorch's memory viewer, read back by PyTorch's own readers of snapshots (in tests alone)."""

from __future__ import annotations

import copy
import importlib
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import trainledger as tl
from trainledger.answers.pages.memory_viz import snapshot, write_memory_viz
from trainledger.ledger.entry import Entry, TensorLife, amounts
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import timeline
from trainledger.spec.problem import InvalidInput

torch.set_num_threads(1)
torch_viz = importlib.import_module("torch.cuda._memory_viz")

# What the viewer's own unpickler knows (torch/utils/viz/MemoryViz.js); it throws at any other.
READ_BY_THE_VIEWER = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = torch.tanh(layer(x_BD))
        return x_BD


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    model = Net()
    return tl.trace(model, torch.zeros(300, 32), loss=torch.sum, optimizer=torch.optim.AdamW(model.parameters()))


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Tensors of any lives and sizes, some of them beside the device."""
    n = draw(st.integers(1, 12))
    tensors = [TensorLife(1, "parameters", "w", (1,), "uint8")]
    for at in range(-1, n):
        for _ in range(draw(st.integers(0, 5))):
            died = draw(st.one_of(st.none(), st.integers(max(at, 0), n - 1)))
            nbytes = draw(st.sampled_from([1, 511, 512, 513, 4096, 10**7]))
            category = draw(st.sampled_from(["parameters", "activations", "host"]))
            tensors.append(TensorLife(nbytes, category, f"t{len(tensors)}", (nbytes,), "uint8", "a.0.b", "forward",
                                      draw(st.sampled_from(["", "model.py:41"])), at, died))  # fmt: skip
    entries = tuple(
        Entry(
            "op", "", "forward", "copy", scratch=draw(st.sampled_from([0, 0, 77])),
            allocated=tuple((each.category, each.nbytes) for each in tensors if each.born == at),
            freed=tuple((each.category, each.nbytes) for each in tensors if each.died == at),
        )
        for at in range(n)
    )  # fmt: skip
    resident = amounts((each, 1) for each in tensors if each.born < 0)
    return Ledger(entries, resident=resident, tensors=tuple(tensors))


def replayed(found: dict[str, Any], device: int) -> list[int]:
    """Live bytes after each event of a device; fails where the allocator could not have done so."""
    segments = [each for each in found["segments"] if each["device"] == device]
    live: dict[int, int] = {}
    mapped: list[tuple[int, int]] = []
    sizes = []
    for event in found["device_traces"][device]:
        start, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "segment_alloc":
            mapped.append((start, end))
        elif event["action"] == "alloc":
            assert any(low <= start and end <= high for low, high in mapped)
            assert all(end <= other or other + size <= start for other, size in live.items())
            live[start] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(start) == event["size"]
        sizes.append(sum(live.values()))
    left = {
        block["address"]: block["requested_size"]
        for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"
    }  # fmt: skip
    assert left == live
    return sizes


@settings(deadline=None, max_examples=60)
@given(ledgers())
def test_events_replay_to_the_segments_and_their_highest_sum_is_the_peak(ledger: Ledger) -> None:
    stored = snapshot(ledger)
    assert max(replayed(stored, 0)) == ledger.peak().nbytes
    if len(stored["device_traces"]) > 1:
        assert max(replayed(stored, 1)) == max(each.live.get("host", 0) for each in timeline(ledger))
    for segment in stored["segments"]:
        assert segment["total_size"] % (2 << 20) == 0
        place = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == place
            assert block["requested_size"] <= block["size"]
            place += block["size"]
        assert place == segment["address"] + segment["total_size"]


def test_a_gap_is_used_again() -> None:
    lives = [TensorLife(512, "activations", f"t{at}", (512,), "uint8", born=at, died=at) for at in range(100)]
    ledger = Ledger(tuple(Entry("op", "", "forward", "copy") for _ in range(100)), tensors=tuple(lives))
    (segment,) = snapshot(ledger)["segments"]
    assert segment["total_size"] == 2 << 20
    assert len({each["addr"] for each in snapshot(ledger)["device_traces"][0] if each["action"] == "alloc"}) == 1


def test_a_file_has_only_what_the_viewer_can_read(ledger: Ledger, tmp_path: Path) -> None:
    where = tmp_path / "out.pickle"
    write_memory_viz(ledger, where)
    content = where.read_bytes()
    codes = {code.name for code, _, _ in pickletools.genops(content)}
    assert codes <= READ_BY_THE_VIEWER
    assert content[:2] == b"\x80\x04"
    assert pickle.loads(content) == snapshot(ledger)  # a file that this test has just written


def test_torch_s_own_readers_take_it_and_sum_to_what_the_step_leaves(ledger: Ledger) -> None:
    stored = snapshot(ledger)
    *_, last = timeline(ledger)
    left = last.nbytes - last.entry.scratch - sum(nbytes for _, nbytes in last.entry.freed)
    summary = torch_viz.segsum(stored)  # asserts that blocks, gaps and rounding fill each segment
    assert f"total_allocated: {torch_viz.Bytes(left)}" in summary
    lines = torch_viz.memory(stored, format_flamegraph=lambda lines: lines).splitlines()
    active = [each for each in lines if ";active_allocated;" in each and "<gaps>" not in each]
    assert sum(int(each.rpartition(" ")[2]) for each in active) == left
    assert any("layers.0.weight fp32[32, 32]" in each for each in active)
    listing = torch_viz.trace(stored)
    assert listing.startswith("Device 0")
    assert "oom" not in listing
    kept = torch_viz.filter_alloc_free_pairs(copy.deepcopy(stored))["device_traces"][0]
    assert sum(each["size"] for each in kept if each["action"] == "alloc") == left
    assert not [each for each in kept if each["action"].startswith("free")]
    for page in (torch_viz.trace_plot(stored), torch_viz.segment_plot(stored)):
        assert "snapshot.pickle" in page


def test_each_event_tells_where_its_tensor_comes_from(ledger: Ledger) -> None:
    (trace,) = snapshot(ledger)["device_traces"]
    made = next(each for each in trace if each["action"] == "alloc" and each["frames"][0]["name"].startswith("addmm"))
    line, module, entry = made["frames"]
    assert line["name"] == "addmm fp32[300, 32]"
    assert line["filename"].endswith("test_memory_viz.py")
    assert line["line"] > 0
    assert entry == {"filename": "entry", "line": made["time_us"] - 1, "name": "forward"}
    assert ledger.entries[entry["line"]].name == "addmm"
    assert module["name"] == "layers.0" == ledger.entries[entry["line"]].path
    first = next(each for each in trace if each["action"] == "alloc")
    assert first["frames"][0]["filename"] == "before the step"
    # Where events have categories the viewer wants this one among them, and fails without.
    assert "unknown" in {each.get("category") for each in trace}
    assert set(trace[0]) >= {"action", "addr", "size", "stream", "time_us", "frames"}


def test_a_ledger_without_tensors_is_refused_with_a_sentence(tmp_path: Path) -> None:
    ledger = Ledger((Entry("op", "", "forward", "copy"),))
    with pytest.raises(InvalidInput, match="--memory-viz: this ledger has bytes by category and not single tensors"):
        write_memory_viz(ledger, tmp_path / "out.pickle")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused_with_a_sentence(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--memory-viz = .*there is no directory"):
        write_memory_viz(ledger, tmp_path / "nowhere" / "out.pickle")
