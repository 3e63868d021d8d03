from hypothesis import given
from hypothesis import strategies as st

from drawn import marks
from trainledger.answers.pages.plan_figures import waterfall as figure
from trainledger.answers.plan import bars as bars_of
from trainledger.forecast.predict.forecast import (
    BEYOND,
    IDEAL,
    NAPKIN,
    RUN_CAUSES,
    UNEXPLAINED,
    Bar,
    nanoseconds,
    waterfall,
)
from trainledger.forecast.predict.step import CAUSES
from trainledger.report.chart import Bars
from trainledger.report.document import Document, Section
from trainledger.report.terminal import text as written


def text(bars):
    return written(Document("", (Section("", (bars_of(bars),)),)))


AMOUNTS = st.floats(0.0, 1e9, allow_nan=False)


@given(
    napkin=AMOUNTS,
    causes=st.lists(AMOUNTS, min_size=len(CAUSES), max_size=len(CAUSES)),
    parts=st.lists(AMOUNTS, min_size=len(RUN_CAUSES), max_size=len(RUN_CAUSES)),
    steps=st.integers(1, 10**6),
)
def test_bars_sum_to_the_total_and_each_is_its_cause(napkin, causes, parts, steps):
    step, whole = dict(zip(CAUSES, causes, strict=True)), dict(zip(RUN_CAUSES, parts, strict=True))
    of_steps = sum(causes) * steps
    total = of_steps + sum(parts)
    bars = waterfall(napkin, of_steps, step, whole, total)
    assert sum(each.nanoseconds for each in bars) == nanoseconds(total)
    found = {each.cause: each.seconds for each in bars}
    assert UNEXPLAINED not in found
    near = 1e-9 * (total + napkin) + 2e-8
    for name, seconds in step.items():
        if name != "ideal":
            assert abs(found[name] - seconds * steps) <= near
    for name, seconds in whole.items():
        assert abs(found[name] - seconds) <= near
    ideal = found[IDEAL] if IDEAL in found else found[NAPKIN] + found[BEYOND]
    assert abs(ideal - step["ideal"] * steps) <= near
    assert abs(napkin - step["ideal"] * steps) <= near or (IDEAL in found) == (napkin > step["ideal"] * steps)


def test_what_the_causes_leave_is_said():
    bars = waterfall(1.0, 4.0, {"ideal": 2.0, "kernel efficiency": 2.0}, {"data": 1.0}, 6.0)
    assert {each.cause: each.seconds for each in bars if each.nanoseconds} == {
        NAPKIN: 1.0, BEYOND: 1.0, "kernel efficiency": 2.0, "data": 1.0, UNEXPLAINED: 1.0,
    }  # fmt: skip


def test_where_6nd_is_more_than_the_model_flops_one_bar_has_them():
    bars = waterfall(3.0, 2.0, {"ideal": 2.0}, {}, 2.0)
    assert [(each.cause, each.seconds) for each in bars if each.nanoseconds] == [(IDEAL, 2.0)]


def test_a_bar_that_takes_away_ends_where_the_one_before_it_does():
    lines = text([Bar(NAPKIN, 3 * 10**9), Bar("kernel efficiency", -(10**9))]).splitlines()
    assert lines[1].split() == ["kernel", "efficiency", "-1", "s", "-50.0", "%", "-" * 11]
    assert lines[1].index("-" * 11) == lines[0].rindex("#") - 10


@given(
    napkin=st.integers(1, 10**25), less=st.floats(0, 1),
    others=st.lists(st.integers(0, 10**25), min_size=1, max_size=14),
)  # fmt: skip
def test_a_line_fits_80_columns(napkin, less, others):
    bars = [Bar("x" * 26, each) for each in (napkin, -int(0.999 * less * napkin), *others)]
    assert max(len(line) for line in text(bars).splitlines()) <= 80


def test_the_figure_has_the_bars_and_their_sum():
    drawn = figure([Bar(NAPKIN, 2 * 86400 * 10**9), Bar("data", 0), Bar("failures", 86400 * 10**9)], "a run")
    assert drawn.y.names == (NAPKIN, "failures", "in all")
    ends = [each for bars in marks(drawn, Bars) for each in zip(bars.rows, bars.starts, bars.ends, strict=True)]
    assert ends == [(0, 0, 2), (1, 2, 3), (2, 0, 3)]
    assert drawn.x.title == "days"
