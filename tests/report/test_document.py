"""A document and its writers: text, HTML, rows, colour only where a terminal has it."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest

import trainledger as tl
from trainledger.report.document import (
    Bars,
    Code,
    Document,
    Facts,
    Item,
    Items,
    Section,
    Table,
    Term,
    Terms,
    Text,
    records,
)
from trainledger.report.html import fragment, whole_page
from trainledger.report.show import show
from trainledger.report.terminal import has_colour, text

MEMORY = Table("memory", ("", "bytes", "share"), (("parameters", 2_000_000, 0.5),), units=("", "nbytes", "share"))
WHOLE = Document(
    "a run",
    (
        Section("Cost", (Facts((("memory", "does NOT fit: 2 GB"), ("", "and 50.0 % more"))),)),
        Section("Memory", (MEMORY, Text(("A <note>.",), note=True))),
        Section("Time", (Bars((("compute", 3), ("overlap", -1), ("nothing", 0))),)),
        Section("", (Items((Item("compile", "--set recipe.compile=true"),)), Code("[layout]\nshard = 2"))),
        Section("", (Terms("flops", 12, (Term("mm", 12, "exact", "2 m n k", "rules.py"),), "flops"),)),
    ),
    data=lambda: {"share": float("nan"), "bytes": 2},
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_part_is_written_in_80_columns_without_colour() -> None:
    written = text(WHOLE)
    assert "\x1b" not in written
    assert max(map(len, written.split("\n"))) <= 80
    assert "memory      does NOT fit: 2 GB\n            and 50.0 % more" in written
    assert "parameters   2 MB  50.0 %" in written
    assert " 1. compile\n--set recipe.compile=true\n[layout]\nshard = 2" in written
    assert "nothing" not in written  # parts of nothing have no bar
    assert "mm" in written


def test_colour_changes_no_word() -> None:
    coloured = text(WHOLE, colour=True)
    assert "\x1b[31mdoes NOT fit\x1b[0m" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == text(WHOLE)


def test_colour_needs_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour(_Terminal())
    assert not has_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(_Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(_Terminal())


def test_html_has_every_part_and_no_markup_of_the_text() -> None:
    written = fragment(WHOLE)
    assert "<h2>Memory</h2>" in written
    assert "<td>parameters</td>" in written
    assert "A &lt;note&gt;." in written
    assert "--set recipe.compile=true" in written
    assert "<script" not in written
    assert "2 m n k" in written


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    show(WHOLE, as_json=True)
    assert capsys.readouterr().out == '{\n  "share": null,\n  "bytes": 2\n}\n'


def test_rows_are_numbers_and_an_unknown_table_names_those_there_are() -> None:
    assert records(WHOLE, "memory") == [{"name": "parameters", "bytes": 2_000_000, "share": 0.5}]
    with pytest.raises(KeyError, match="there are: memory"):
        records(WHOLE, "times")


@pytest.fixture(scope="module")
def run() -> tl.Run:
    table: dict[str, Any] = {
        "model": {"preset": "gpt2"}, "cluster": {"device": "h100-sxm"},
        "recipe": {"seq_len": 128, "global_batch": 2, "micro_batch": 1, "steps": 10, "precision": "bf16-mixed"},
    }  # fmt: skip
    return tl.load(table)


def test_an_answer_prints_as_its_document(run: tl.Run) -> None:
    for answer in (tl.plan(run), tl.compare(run, run), tl.fit(run, of="micro-batch", changes=False)):
        assert str(answer) == text(answer.document())
        assert str(answer) != repr(answer)
        assert answer._repr_html_().startswith('<div class="trainledger">')


def test_rows_of_a_plan_sum_to_its_peak(run: tl.Run) -> None:
    plan = tl.plan(run)
    *parts, peak = plan.records("memory")
    assert sum(each["bytes"] for each in parts) == peak["bytes"] == plan.forecast.peak_nbytes


def test_a_page_draws_each_figure_for_a_screen_and_for_a_telephone_and_has_no_scripts(run: tl.Run) -> None:
    other = replace(run, recipe=replace(run.recipe, micro_batch=2))
    found = tl.compare(run, other).document()
    written = whole_page("two runs", [], found.figures())
    assert written.count("<svg") == 2 * len(found.figures())
    assert "<script" not in written
    assert len(written) < 30_000
