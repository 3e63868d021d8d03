from drawn import marks
from trainledger.answers.pages.rates import document
from trainledger.observe.measure.rates import CopyTimes
from trainledger.report.chart import Line
from trainledger.report.terminal import text
from trainledger.spec.calibration import CopyTime

FOUND = CopyTimes(
    title="a machine", backend="cuda", date="2026-01-02", torch_version="2.13.0", threads=1,
    memory=(
        CopyTime(what="view (x.t())", nbytes=0, seconds=2e-6, note="64x64"),
        CopyTime(what="copy, contiguous", nbytes=10**6, seconds=1e-4),
        CopyTime(what="copy of x.t()", nbytes=10**6, seconds=4e-4),
        CopyTime(what="copy, contiguous", nbytes=10**3, seconds=1e-7),
    ),
    device=(
        CopyTime(what="to device, pageable", nbytes=10**9, seconds=0.2),
        CopyTime(what="to device, pinned", nbytes=10**9, seconds=0.05),
        CopyTime(what="to host, pageable", nbytes=10**9, note="not measured"),
    ),
    disk=(CopyTime(what="write and sync", nbytes=10**9, seconds=1.0),),
)  # fmt: skip


def test_strided_against_contiguous_and_pinned_against_pageable_are_said():
    said = text(document(FOUND))
    assert "copy of x.t() takes 4.00 times as long as a contiguous copy of 1 MB." in said
    assert "A view moves nothing: 2 us, whatever its size." in said
    assert "From pinned memory to device is 4.00 times as fast as from pageable memory." in said
    assert "to host is" not in said
    assert max(map(len, said.splitlines())) <= 80


def test_json_has_the_rates_and_the_figure_the_points():
    assert document(FOUND).data()["device"][1]["bytes_per_second"] == 2e10
    lines = {each.name: each.ys for each in marks(document(FOUND).figures()[0], Line)}
    assert lines["copy, contiguous"] == [10.0, 10.0]
    assert lines.keys() == {"copy, contiguous", "copy of x.t()"}
