"""The table of an annotation: no wider than asked for, every number in its column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.answers.pages.annotate import page, short
from trainledger.report.html import parts, whole_page
from trainledger.report.terminal import text
from trainledger.trace.annotate.annotation import Annotation, File, Finding, Line, Mark, Work


def annotation(ended: str = "") -> Annotation:
    work = Work(flops=2 * 10**9, read=4 * 10**6, written=10**6, allocated=10**6, operations=3)
    lines = (
        Line(1, "import torch", runs=1),
        Line(2, f"{' ' * 60}y = model(x){' ' * 90}# far", runs=10, own=work, backward=work, recompute=work, alive=512,
             marks=(Mark("copy", "non-contiguous by reshape", 3, 3000), Mark("sync", ".item()", 1))),
    )  # fmt: skip
    finding = Finding("hidden copy", "a.py:2", "`y`" * 60, "of its strides", "something else")
    return Annotation(
        "a.py", (File("a.py", lines),), (finding,), total=work + work + work, elsewhere=Work(), peak_nbytes=10**6,
        live_nbytes=0, steps=1, backwards=1, seconds=0.5, ended=ended, uncounted=(("lib::op", 3, "a.py:2"),),
    )  # fmt: skip


@given(st.integers(0, 10**20) | st.floats(0.001, 1e19))
def test_a_number_takes_at_most_five_characters_and_is_right(value: float) -> None:
    printed = short(value)
    assert len(printed) <= 5
    if printed and printed[0] != "<":
        scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}.get(printed[-1], 1)
        assert float(printed.rstrip("kMGTPE")) * scale == pytest.approx(value, rel=0.06, abs=0.006)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_asked_for(width: int) -> None:
    printed = text(page(annotation("it broke")), width=width)
    assert max(map(len, printed.splitlines())) <= width
    words = " ".join(printed.split())
    assert "^ copy 3 kB (3 times): non-contiguous by reshape" in words
    assert "^ sync: .item()" in words
    assert "Not counted: 3 x lib::op at a.py:2." in words
    assert words.endswith("This is what ran so far: it broke.")


def test_lines_and_sums() -> None:
    rows = text(page(annotation()), width=200).splitlines()
    own = next(each for each in rows if each.startswith("   2"))
    assert own.split()[:8] == ["2", "10", "2.00G", "4.00M", "1.00M", "1.00M", "512", "400"]
    assert [each.split()[0] for each in rows if each.startswith(("back", "again"))] == ["back", "again"]
    per_run = next(each for each in text(page(annotation(), per_run=True)).splitlines() if each.startswith("   2"))
    assert per_run.split()[2:4] == ["200M", "400k"]
    assert "import torch" not in text(page(annotation(), busy=True))


def test_data_and_page() -> None:
    plain = annotation().document().data()
    assert plain["files"][0]["lines"][1]["own"]["flops"] == 2 * 10**9
    assert plain["files"][0]["lines"][1]["intensity"] == 400
    written = annotation("<it> broke").document()
    html = whole_page(written.title, parts(written), {})
    assert "&lt;it&gt; broke" in html
    assert "<script" not in html
    assert "rgba(230,159,0" in html
