"""The document of two profiles compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from trainledger.answers.pages.plain_data import Shape, plain
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.answers.pages.profile import document as of_profile
from trainledger.answers.pages.profile import short_name
from trainledger.forecast.predict.forecast import Bar
from trainledger.observe.profiler.against import Against, Changed, Changes
from trainledger.report.chart import Chart
from trainledger.report.document import Document, Facts, Section, Table, notes, section, sections, shown
from trainledger.spec.units import format_percent

MOST_ROWS, _SENTENCES = 12, 3
_LEAST = 0.005  # of the step: less is no sentence


def document(found: Against, *, most: int = MOST_ROWS) -> Document:
    """Both steps, what changed most in a sentence each, then parts, kernels, matmuls, collectives (``most`` rows)."""
    steps = found.before.step.nanoseconds, found.after.step.nanoseconds
    return Document(
        title=f"{found.after.path} against {found.before.path}",
        sections=sections(
            section("", Facts(tuple(_facts(found))), *_sentences(found)),
            section("Parts of the step", parts_table(found.changes, steps, "in all")),
            *changed_sections(found.changes, most),
            notes(found.notes),
        ),
        data=lambda: _data(found),
        figures=lambda: _figures(found),
    )


def _facts(found: Against) -> Iterator[tuple[str, str]]:
    for name, each in (("before", found.before), ("after", found.after)):
        speed = "" if each.mfu is None else f", MFU {format_percent(each.mfu)}"
        step = shown(each.step.nanoseconds, "nanoseconds")
        yield name, f"{each.path}: {step} (step {each.step.step.name}, the median of {len(each.steps)}){speed}"


def _sentences(found: Against) -> Iterator[str]:
    before, difference = found.before.step.nanoseconds, found.difference_ns
    if not before:
        return
    how = "longer" if difference > 0 else "shorter"
    yield f"The step is {format_percent(abs(difference) / before)} {how}."
    yield from largest_changes(found.changes.parts, before)
    for which, some in (("gone", [e for e in found.changes.kernels if not e.after_count]),
                        ("new", [e for e in found.changes.kernels if not e.before_count])):  # fmt: skip
        if some:
            time = shown(sum(each.before_ns + each.after_ns for each in some), "nanoseconds")
            count = "1 kernel is" if len(some) == 1 else f"{len(some)} kernels are"
            yield f"{count} {which} ({time}); the longest: {short_name(some[0].name)}"


def largest_changes(parts: Sequence[Changed], before_ns: int) -> Iterator[str]:
    """A sentence on each of the parts that changed most; ``before_ns`` is the step that they are compared with."""
    for each in parts[:_SENTENCES]:
        if abs(each.difference_ns) > _LEAST * before_ns:
            more = "more" if each.difference_ns > 0 else "less"
            share = format_percent(abs(each.difference_ns) / before_ns)
            yield f"{each.name}: {shown(abs(each.difference_ns), 'nanoseconds')} {more} ({share} of the step before)."


def parts_table(found: Changes, steps_ns: tuple[int, int], whole: str) -> Table:
    """The parts of two steps, and under the name ``whole`` the steps."""
    rows = [(each.name, each.before_ns, each.after_ns, each.difference_ns) for each in found.parts]
    columns = ("of the time of a step", "before", "after", "after - before")
    before, after = steps_ns
    return Table("parts", columns, (*rows, (whole, before, after, after - before)), ("", *("nanoseconds",) * 3))


def changed_sections(found: Changes, most: int, over: str = "") -> Iterator[Section | None]:
    """Tables of the kernels, matmuls and collectives that changed, ``most`` rows each; ``over`` ends their titles."""
    for name in ("kernels", "matmuls", "collectives"):
        rows = tuple(
            (short_name(each.name), each.before_count, each.after_count, each.before_ns, each.after_ns,
             each.difference_ns)
            for each in getattr(found, name)[:most]
        )  # fmt: skip
        columns = (name, "runs before", "after", "time before", "after", "after - before")
        table = Table(name, columns, rows, ("", "count", "count", *("nanoseconds",) * 3))
        yield section(name.capitalize() + over, table) if rows else None


def changes_data(found: Changes) -> dict[str, Any]:
    """All changes, as JSON has them."""
    more: Shape = {Changed: ("difference_ns",)}
    return {each.name: plain(list(getattr(found, each.name)), more=more) for each in fields(found)}


def _figures(found: Against) -> list[Chart]:
    return [
        waterfall(
            [Bar(bar.title, bar.nanoseconds) for bar in each.waterfall], f"Where a step goes, {name}: {each.path}"
        )
        for name, each in (("before", found.before), ("after", found.after))
    ]


def _data(found: Against) -> dict[str, Any]:
    return {
        "before": of_profile(found.before).data(), "after": of_profile(found.after).data(),
        "difference_ns": found.difference_ns, **changes_data(found.changes), "notes": list(found.notes),
    }  # fmt: skip
