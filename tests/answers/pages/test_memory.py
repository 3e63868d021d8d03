"""The memory figure and the peak's composition: what is drawn and printed sums to the ledger's live bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import trainledger as tl
from models import sizes
from trainledger.answers.pages.memory import lane_of, memory_chart, memory_charts, numbers_of, peak_chart, unrolled
from trainledger.answers.pages.peak import peak_data, peak_sections, tensors_at_peak
from trainledger.ledger.entry import CATEGORIES, Entry, TensorLife, amounts
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import timeline
from trainledger.observe.measure.meter import AllocatorPeak
from trainledger.report.chart import Area, Band, Chart, Line
from trainledger.report.document import Document
from trainledger.report.show import write_plot
from trainledger.report.terminal import text as written

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.down(nn.functional.gelu(self.up(self.norm(x_BTD))))


def mlp(width: int = 16, blocks: int = 3) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def traced(**options: Any) -> Ledger:
    model = mlp()
    return tl.trace(model, torch.zeros(4, 8, 16), loss=torch.sum, optimizer=torch.optim.AdamW(model.parameters()),
                    **options)  # fmt: skip


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return traced()


def live_of(ledger: Ledger) -> list[dict[str, int]]:
    """Live bytes by category while each entry runs, from the tensors alone."""
    live: list[dict[str, int]] = []
    for at, entry in enumerate(ledger):
        now: dict[str, int] = {}
        for each in ledger.tensors:
            if each.lives(at):
                now[each.category] = now.get(each.category, 0) + each.nbytes
        if entry.scratch:
            now["scratch"] = now.get("scratch", 0) + entry.scratch
        live.append(now)
    return live


# Ledgers as they may come


@st.composite
def looped(draw: st.DrawFn, depth: int = 0) -> Ledger:
    """Entries in loops in loops, each of which takes and gives back memory."""
    entries: list[Entry] = []

    def body(loop: tuple[tuple[str, int], ...]) -> None:
        for _ in range(draw(st.integers(1, 3))):
            inner = len(loop) < 2 and draw(st.booleans())
            if inner:
                body((*loop, (f"loop {len(entries)}", draw(st.integers(1, 4)))))
                continue
            taken = draw(st.integers(0, 50))
            entries.append(
                Entry(
                    f"op{len(entries)}", "layers.3.mlp", draw(st.sampled_from(["forward", "backward", "recompute"])),
                    "matmul", allocated=((draw(st.sampled_from(CATEGORIES)), taken),),
                    freed=(("activations", draw(st.integers(0, taken))),), scratch=draw(st.integers(0, 9)), loop=loop,
                )
            )  # fmt: skip

    body(())
    return Ledger(tuple(entries), resident=(("parameters", 100), ("activations", 10_000)))


@given(looped(), st.integers(0, 40))
def test_loops_written_out_have_the_same_memory_and_as_many_operations(ledger: Ledger, most: int) -> None:
    out = unrolled(ledger, most)
    assert out.peak().nbytes == ledger.peak().nbytes
    assert sum(each.times for each in out) == sum(each.times for each in ledger)
    numbers, _ = numbers_of(timeline(out))
    assert numbers[-1] == sum(each.times for each in ledger) - 1
    assert numbers == sorted(set(numbers))
    whole = timeline(unrolled(ledger))
    assert [each.nbytes for each in timeline(out)] == [whole[at].nbytes for at in numbers]


@given(looped(), st.integers(0, 40))
def test_the_figure_has_the_peak_and_sums_to_it(ledger: Ledger, most: int) -> None:
    area, whole = _marks(memory_chart(unrolled(ledger, most)))
    sums = list(area.sums())[-1]
    assert sums == pytest.approx(whole.ys)
    scale = 1000 if ledger.peak().nbytes >= 1000 else 1
    assert max(sums) * scale == pytest.approx(ledger.peak().nbytes)
    assert list(area.xs) == sorted(area.xs)


def _marks(chart: Chart) -> tuple[Area, Line]:
    """The layers of memory and the line over all of them."""
    (area,) = (each for each in chart.marks if isinstance(each, Area))
    return area, next(each for each in chart.marks if isinstance(each, Line))


def test_a_thinned_figure_keeps_the_peak_and_both_ends() -> None:
    spike = Entry("spike", "", "forward", "copy", allocated=(("scratch", 10**12),), freed=(("scratch", 10**12),))
    quiet = tuple(Entry(f"op{at}", "", "forward", "copy") for at in range(10_000))
    lane = lane_of(Ledger((*quiet[:3_337], spike, *quiet), resident=(("parameters", 7),)))
    assert lane.totals[lane.peak] == 10**12 + 7
    assert lane.x[lane.peak] == 3_337
    assert (lane.x[0], lane.x[-1]) == (0, len(quiet) + 3_338)
    assert len(lane.x) < 1_210
    assert "spike" in lane.peak_text


def test_rounds_that_are_not_drawn_are_marked_and_do_not_push_the_rest_aside() -> None:
    step = Entry("mm", "", "forward", "matmul", loop=(("micro-batches", 1_000_000),))
    chart = memory_chart(Ledger((step, replace(step, name="add"), Entry("adamw", "", "optimizer", "update"))))
    assert "999,998 more rounds of micro-batches" in [each.text for each in chart.marks if isinstance(each, Band)]
    assert chart.x.ends is not None
    assert chart.x.ends[1] < 10
    assert list((chart.x.ticks or {}).values())[-1] == "2,000,000"
    assert _marks(chart)[0].said[2].endswith("operation 1,999,998: mm in forward")


def test_hovers_tell_operation_module_and_line(ledger: Ledger) -> None:
    said = _marks(memory_chart(ledger))[0].said
    assert any("gelu of 1 in forward" in each and "test_memory.py:" in each for each in said)


def test_phases_are_shaded_and_named_recomputation_within_backward() -> None:
    phases = ["forward"] * 5 + ["recompute", "backward"] * 5 + ["optimizer"]
    chart = memory_chart(Ledger(tuple(Entry("op", "", each, "copy") for each in phases)))
    bands = [(each.start, each.end, each.text) for each in chart.marks if isinstance(each, Band)]
    assert bands == [(0, 5, "forward"), (5, 15, "backward"), (15, 16, "optimizer")]


def test_several_ledgers_have_one_scale(ledger: Ledger) -> None:
    small = Ledger((Entry("op", "", "forward", "copy"),), resident=(("parameters", 7),), partial="it <broke>")
    first, second = memory_charts([("predicted", ledger), ("measured", small)])
    assert first.y == second.y
    assert second.x.title.endswith("PARTIAL: it <broke>")


def peak_text(ledger: Ledger, top: int = 15) -> str:
    return written(Document("", peak_sections(ledger, top)))


def test_nothing_recorded_is_a_sentence() -> None:
    for function in (memory_chart, peak_text, peak_data, peak_chart):
        with pytest.raises(ValueError, match="nothing was recorded"):
            function(Ledger(()))


# The peak's composition


def test_tensors_sum_to_the_timeline_at_every_entry() -> None:
    for ledger in (traced(), traced(grad_accum=3), traced(first_step=True), traced(backward=False)):
        assert not ledger.partial
        for found, moment in zip(live_of(ledger), timeline(ledger), strict=True):
            assert found == {name: nbytes for name, nbytes in moment.live.items() if nbytes}


def allocated_by_a_real_step(step: Callable[[], None]) -> list[int]:
    """Bytes on top of those before, after each allocation of the CPU's own allocator, in order."""
    with AllocatorPeak(torch.device("cpu")) as real:
        step()
    return [live for nbytes, live in zip(real.changes, accumulate(real.changes), strict=True) if nbytes > 0]


def test_every_allocation_of_a_real_step_finds_as_many_bytes_live_as_the_tensors_say() -> None:
    layers = [each for _ in range(3) for each in (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))]
    model = nn.Sequential(*layers)
    x_BD = torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)

    def loss(y_BD: Tensor) -> Tensor:
        return (y_BD * y_BD).sum()

    def step() -> None:
        loss(model(x_BD)).backward()
        optimizer.step()

    for _ in range(2):
        step()
        optimizer.zero_grad(set_to_none=True)
    ledger = tl.trace(model, x_BD, loss=loss, optimizer=optimizer)
    resident = sum(nbytes for _, nbytes in ledger.resident)
    live, found = 0, []
    for at in range(len(ledger)):
        for each in ledger.tensors:
            if each.born == at:
                live += each.nbytes
                found.append(live)
        assert live + resident == timeline(ledger)[at].nbytes
        live -= sum(each.nbytes for each in ledger.tensors if each.died == at)
    assert allocated_by_a_real_step(step) == found


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_groups_of_tensors_and_what_is_uncounted_sum_to_the_peak(data: st.DataObject) -> None:
    entries, tensors = [], []
    n = data.draw(st.integers(1, 8))
    names = st.sampled_from(["layers.0.w", "layers.1.w", "head"])
    for at in range(-1, n):
        for _ in range(data.draw(st.integers(0, 4))):
            died = data.draw(st.one_of(st.none(), st.integers(max(at, 0), n - 1)))
            nbytes = data.draw(st.integers(1, 4))
            category = data.draw(st.sampled_from([*CATEGORIES, "host"]))
            tensors.append(
                TensorLife(nbytes, category, data.draw(names), (nbytes,), "uint8", data.draw(names), "", "", at, died)
            )
    for at in range(n):
        entries.append(
            Entry(
                "op", data.draw(names), "forward", "copy", scratch=data.draw(st.integers(0, 3)),
                allocated=tuple((each.category, each.nbytes) for each in tensors if each.born == at),
                freed=tuple((each.category, each.nbytes) for each in tensors if each.died == at),
            )
        )  # fmt: skip
    resident = amounts((each, 1) for each in tensors if each.born < 0)
    ledger = Ledger(tuple(entries), resident=resident, tensors=tuple(tensors))
    drawn = peak_data(ledger)
    peak = ledger.peak()
    assert drawn["nbytes"] == peak.nbytes == sum(drawn["by_category"].values())
    assert sum(each["nbytes"] for each in drawn["tensors"]) + sum(drawn["uncounted"].values()) == peak.nbytes
    for category, nbytes in drawn["by_category"].items():
        of_tensors = sum(each["nbytes"] for each in drawn["tensors"] if each["category"] == category)
        assert of_tensors + drawn["uncounted"].get(category, 0) == nbytes
    assert set(drawn["uncounted"]) <= {"scratch"}
    assert sum(each["count"] for each in drawn["tensors"]) == sum(
        each.lives(peak.index) and each.category != "host" for each in tensors
    )
    shown = tensors_at_peak(ledger).live
    assert list(shown) == sorted(shown, key=lambda each: -each.nbytes)


def test_tensors_alike_are_one_line_with_where_and_until_when(ledger: Ledger) -> None:
    data = peak_data(ledger)
    gelu = next(each for each in data["tensors"] if each["name"] == "gelu")
    assert (gelu["count"], gelu["shape"], gelu["dtype"], gelu["path"]) == (3, [4, 8, 64], "fp32", "*")
    assert gelu["nbytes"] == 3 * 4 * 8 * 64 * 4
    assert gelu["line"].partition(":")[0].endswith("test_memory.py")
    assert gelu["until"].endswith("in backward")
    first, last = gelu["born"]
    assert ledger.entries[first].name == ledger.entries[last].name == "gelu"
    text = peak_text(ledger)
    assert "3 x fp32[4, 8, 64] activations: gelu of *" in " ".join(text.split())


def test_one_tensor_alone_has_its_whole_name_and_several_have_stars_for_what_differs() -> None:
    lives = [TensorLife(8, "parameters", f"layers.{at}.w", (4,), "bf16") for at in range(3)]
    lives.append(TensorLife(6, "parameters", "layers.1.b", (3,), "bf16"))
    ledger = Ledger((Entry("op", "", "forward", "copy"),), resident=(("parameters", 30),), tensors=tuple(lives))
    assert [(each.count, each.label) for each in tensors_at_peak(ledger).live] == [
        (3, "3 x bf16[4] layers.*.w"), (1, "bf16[3] layers.1.b"),
    ]  # fmt: skip


@pytest.mark.parametrize("top", [0, 1, 5, 1000])
def test_the_text_fits_80_columns_and_says_the_exact_peak(ledger: Ledger, top: int) -> None:
    text = peak_text(ledger, top)
    assert max(map(len, text.splitlines())) <= 80
    assert f"{ledger.peak().nbytes:,} bytes" in text
    assert ("other tensors of" in text) == (top < len(tensors_at_peak(ledger).live))


def test_a_closed_form_says_why_it_has_no_tensors() -> None:
    run = tl.load(
        {
            "model": sizes(V=64, D=16, L=4, H=2, F=32, T=8),
            "recipe": {"seq_len": 8, "global_batch": 4, "micro_batch": 2, "steps": 1},
        }
    )
    ledger = tl.account(run)
    text = peak_text(ledger)
    assert "not single tensors" in " ".join(text.split())
    assert f"{ledger.peak().nbytes:,}" in text
    assert peak_chart(ledger) is None
    data = peak_data(ledger)
    assert data["uncounted"] == data["by_category"]
    lane = lane_of(ledger)
    assert lane.totals[lane.peak] == ledger.peak().nbytes
    assert not lane.gaps


class _Stops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x_BTD: Tensor) -> Tensor:
        kept = self.body(x_BTD)
        raise RuntimeError("no more")
        return kept


def test_a_partial_ledger_has_a_peak_and_says_that_it_is_partial() -> None:
    with pytest.warns(RuntimeWarning, match="partial"):
        ledger = tl.trace(_Stops(), torch.zeros(4, 8, 16), loss=torch.sum)
    text = " ".join(peak_text(ledger).split())
    assert "PARTIAL: the highest moment of what ran before forward ended at" in text
    assert "until the end" in text  # what was live when it broke off: nobody knows until when
    assert "PARTIAL" in memory_chart(ledger).x.title
    for found, moment in zip(live_of(ledger), timeline(ledger), strict=True):
        assert sum(found.values()) == moment.nbytes


def test_the_page_draws_the_step_and_its_peak(ledger: Ledger, tmp_path: Path) -> None:
    where = tmp_path / "out.html"
    bars = peak_chart(ledger)
    assert bars is not None
    write_plot([memory_chart(ledger), bars], where, title="a step")
    first, second = where.read_text().split("<figure>")[1:]
    for expected in ("optimizer state", "peak ", "backward"):
        assert expected in first
    assert "gelu of *" in second
