"""Two plans compared: what they say differently, what they cost, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Unpack

from trainledger.answers.cost import predict
from trainledger.answers.load import Source, resolve
from trainledger.answers.pages.heading import of_run
from trainledger.answers.pages.interval import chance, ends, fits
from trainledger.answers.pages.plain_data import named, plain, run_data
from trainledger.answers.question import Progress, question, silent, text, word
from trainledger.answers.source import OfCluster, also, listed, with_cluster
from trainledger.answers.sweep import Sweep, sweep
from trainledger.forecast.plan.compare import ROUNDING, Comparison, Part, Ratio, Row, reasons
from trainledger.forecast.plan.compare import compare as compared
from trainledger.report.chart import Band, Chart, bar_chart, beside, significant, usable_memory
from trainledger.report.document import (
    Amount,
    Cell,
    Content,
    Document,
    Section,
    Table,
    details,
    section,
    sections,
    shown,
    signed,
)
from trainledger.report.table import sentence
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.units import GIGA, counted, format_nbytes, format_percent

_NANO = 1e-9


def _changes(whose: str) -> Any:
    help = f"change one field of {whose}; may be repeated"
    return text(help, several=True, flag=f"--set-{whose.lower()}", metavar="SECTION.FIELD=VALUE")


@question()
def compare(
    a: Annotated[Source, word("the first plan")] = "run.toml",
    b: Annotated[Source | None, word("the second; absent = A again", metavar="B")] = None,
    overrides: Overrides = (),
    *,
    changes_a: Annotated[Sequence[str], _changes("A")] = (),
    changes_b: Annotated[Sequence[str], _changes("B")] = (),
    over: Annotated[str | None, text("A once for each value of a field", metavar="SECTION.FIELD[=VALUE,...]")] = None,
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> Comparison | Sweep:
    """Two plans side by side: which fields differ, what each costs, and which causes make up the difference.

    A and B are run files, models of the catalog or Hugging Face config.json files. Without B it is A again, changed by
    --set-b: trainledger compare run.toml --set-b recipe.activation_checkpointing=full
    Or one table of A with every value of a field: trainledger compare run.toml --over recipe.activation_checkpointing

    ``overrides`` change both. Raises `InvalidInput`.
    """
    overrides = with_cluster(overrides, **cluster)
    if over is not None:
        if b is not None or changes_b:
            raise InvalidInput([Problem("over", over, "is of one run: leave out B and --set-b")])
        return sweep(resolve(a, _with(overrides, changes_a), progress=progress), over, progress)
    if b is None and not changes_a and not changes_b:
        rule = "is missing: name a second plan, change this one with --set-b, or name a field with --over"
        raise InvalidInput([Problem("B", None, rule)])
    sides = {"a": (a, changes_a), "b": (a if b is None else b, changes_b)}
    one, other = (resolve(run, _with(overrides, changes), progress=progress) for run, changes in sides.values())
    names = (" ".join([run if isinstance(run, str) else side, *changes]) for side, (run, changes) in sides.items())
    return replace(compared(one, predict(one), other, predict(other)), names=tuple(names))


def _with(overrides: Overrides, changes: Sequence[str]) -> Overrides:
    given = also((), overrides) if changes and isinstance(overrides, Mapping) else listed(overrides)
    return [*given, *changes] if changes else given


def page(comparison: Comparison) -> Document:
    """Both runs under the names by which they were asked for."""
    names = comparison.names
    body: list[Content] = []
    why = tuple(map(sentence, _sentences(comparison))) if comparison.fields else ()
    if comparison.fields:
        fields = tuple((field.field, _value(field.a), _value(field.b)) for field in comparison.fields)
        body = [
            Table("fields", ("field", "a", "b"), fields),
            Table("costs", ("", "a", "b", "b - a", ""), tuple(map(_row, comparison.rows)), align="lrrrr"),
            why[1:],
            *details(
                "time and memory by cause",
                _split(f"Time of {comparison.of}", comparison.times, "nanoseconds") if comparison.times else None,
                _split("Memory of the peak rank", comparison.memory, "nbytes") if comparison.memory else None,
            ),
        ]
    return Document(
        title="Two runs compared",
        verdict="".join(why[:1]) or "The two runs have the same value in every field.",
        sections=sections([f"{letter}: {name}" for letter, name in zip("ab", names, strict=True)], *body),
        about=tuple(about(comparison)),
        data=lambda: {"a": names[0], "b": names[1], **_data(comparison)},
        figures=lambda: figures(comparison),
    )


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def _amount(value: float | None, unit: str) -> Cell:
    """A number of a row; a count that is small enough in all its digits."""
    if value is None:
        return None
    return Amount(value, "integer" if unit == "count" and abs(value) < 10**9 else unit)


def _row(each: Row) -> tuple[Cell, ...]:
    difference, relative, more = each.difference, "", ""
    if difference is not None:
        cell = _amount(difference, each.unit)
        assert isinstance(cell, Amount)
        more = signed(cell.value, cell.unit)
        if each.unit == "share":
            more = more.replace("%", "points")  # of shares; a percentage would be of one of them
        elif each.a:
            relative = format_percent(difference / each.a, signed=True)
    return each.name, _amount(each.a, each.unit), _amount(each.b, each.unit), more, relative


def _split(title: str, parts: tuple[Part, ...], unit: str) -> Section:
    rows = tuple(
        (each.name, signed(each.a, unit).lstrip("+"), signed(each.b, unit).lstrip("+"), signed(each.difference, unit))
        for each in (*(part for part in parts if part.a or part.b), _whole(parts))
    )
    return section(title, Table(title, ("", "a", "b", "b - a"), rows, align="lrrr"))


def _sentences(comparison: Comparison) -> Iterator[str]:
    """Why: the largest differences that make up the whole one, and what qualifies the comparison."""
    a, b = comparison.forecast_a, comparison.forecast_b
    if comparison.times:
        yield _why(comparison.of, "takes", ("less", "longer", "long"), comparison.times, "nanoseconds")
    if comparison.times and comparison.ratio is not None and abs(comparison.ratio.predicted - 1) > ROUNDING:
        yield _sure(comparison.ratio)
    if a.money and b.money is not None and a.money != b.money:
        more = "more" if b.money > a.money else "less"
        share = format_percent(b.money / a.money - 1, signed=True)
        yield f"{comparison.of}: b costs {shown(abs(b.money - a.money), 'amount')} {more} than a ({share})"
    if comparison.memory:
        yield _why("the peak rank", "needs", ("less", "more", "much"), comparison.memory, "nbytes")
    if comparison.a.layout != comparison.b.layout and comparison.a.origin.searched and comparison.b.origin.searched:
        yield "the layouts were searched for separately, and they differ too (--set layout.AXIS=N keeps one)"
    for letter, forecast in zip("ab", (a, b), strict=True):
        if forecast.impossible:
            why = f"{letter} is impossible without a [layout]: {'; '.join(forecast.impossible)}"
            yield f"{why}; its step and its tokens/s are of one device alone"
        if forecast.fits is False:
            sure = "" if forecast.chance_of_fitting is None else f" (chance: {chance(forecast.chance_of_fitting)})"
            yield f"{letter} does NOT fit in the memory of its device{sure}"
        if forecast.step_seconds is None and forecast.notes:
            yield f"{letter}: {forecast.notes[0]}"
    without = [forecast.interruptions is None for forecast in (a, b)]
    if comparison.times and without[0] != without[1] and None not in (a.goodput, b.goodput):
        letter = "a" if without[0] else "b"
        yield (
            f"{letter} has no interruptions in it, as its device's rate of failures is not known "
            "(cluster.mtbf_device_hours sets it): its goodput, days and cost look better than they are"
        )
    bases = {forecast.basis.get("step_seconds", "") for forecast in (a, b)} - {""}
    if bases:
        yield f"basis of the times: {' and '.join(sorted(bases))}"
    if len(bases) > 1 and "bound" in bases:
        letter, other = ("a", "b") if a.basis["step_seconds"] == "bound" else ("b", "a")
        yield (
            f"{letter}'s time is only a lower bound, what its device allows at best, and {other}'s is what programs "
            "reach: their difference does not compare the two"
        )


def _sure(ratio: Ratio) -> str:
    """Whether a difference of times is larger than what two published runs were off by together."""
    pairs = f"pairs of published runs on {'one device' if ratio.one_device else 'two devices'}"
    said = "more" if ratio.decided else "no more"
    between = ends(ratio.interval, lambda value: f"{value:.3g}")
    times = f"b takes {ratio.predicted:.3g} times as long as a"
    return f"{times} ({between}; from {pairs}): {said} than the error of such predictions"


def _why(of: str, verb: str, words: tuple[str, str, str], parts: tuple[Part, ...], unit: str) -> str:
    less, more, same = words
    change, before = sum(part.difference for part in parts), sum(part.a for part in parts)
    within = ROUNDING * before if unit == "nanoseconds" else 0  # bytes are exact
    causes = [reason for reason in reasons(parts) if abs(reason.difference) > within]
    listed = ", ".join(f"{cause.name} {signed(cause.difference, unit)}" for cause in causes[:4])
    if rest := causes[4:]:
        listed += f", {counted(len(rest), 'other')} {signed(sum(part.difference for part in rest), unit)}"
    if abs(change) <= within:
        text = f"{of}: b {verb} as {same} as a"
    else:
        share = f" ({format_percent(change / before, signed=True)})" if before else ""
        text = f"{of}: b {verb} {shown(abs(change), unit)} {less if change < 0 else more} than a{share}"
    return text + (f": {listed}" if listed else "")


def _data(comparison: Comparison) -> dict[str, Any]:
    a, b = comparison.forecast_a, comparison.forecast_b
    return {
        "run": {"a": run_data(comparison.a), "b": run_data(comparison.b)},
        "fields": plain(comparison.fields),
        "rows": plain(comparison.rows, more={Row: ("difference",)}),
        "fits": {"a": a.fits, "b": b.fits},
        "time_of": comparison.of,
        "nanoseconds": _parts_data(comparison.times),
        "memory_nbytes": _parts_data(comparison.memory),
        "basis": {"a": a.basis, "b": b.basis},
        "ratio": None if comparison.ratio is None else plain(comparison.ratio, more={Ratio: ("decided",)}),
        "intervals": {"a": plain(a.intervals), "b": plain(b.intervals)},
        "notes": {"a": list(a.notes), "b": list(b.notes)},
    }


def _parts_data(parts: tuple[Part, ...]) -> dict[str, Any]:
    return {"parts": plain(parts, more={Part: ("difference",)}), **named(_whole(parts), "a b difference")}


def _whole(parts: tuple[Part, ...]) -> Part:
    return Part("in all", sum(part.a for part in parts), sum(part.b for part in parts))


def figures(comparison: Comparison) -> list[Chart]:
    """The causes of the time and the categories of memory, a and b."""
    charts = []
    if comparison.times:
        largest = max(sum(time.a for time in comparison.times), sum(time.b for time in comparison.times)) * _NANO
        scale, unit = next(
            (each for each in ((86400.0, "days"), (3600.0, "hours"), (1.0, "seconds")) if largest >= each[0]),
            (1e-3, "milliseconds"),
        )
        charts.append(_bars(f"Time of {comparison.of}", unit, comparison.times, comparison.names, _NANO / scale))
    if comparison.memory:
        usable = (
            list(_usable(comparison))
            if any(forecast.fits is False for forecast in (comparison.forecast_a, comparison.forecast_b))
            else []
        )
        charts.append(_bars("Memory of the peak rank", "GB", comparison.memory, comparison.names, 1 / GIGA, usable))
    return charts


def _usable(comparison: Comparison) -> Iterator[Band]:
    """The usable memory of the devices, once where both have the same."""
    a, b = comparison.forecast_a.usable_nbytes, comparison.forecast_b.usable_nbytes
    if a == b:
        yield from usable_memory(a)
        return
    for letter, nbytes in (("a", a), ("b", b)):
        yield from (replace(band, text=f"{letter}: {band.text}") for band in usable_memory(nbytes))


def about(comparison: Comparison) -> list[str]:
    """What the page of the figures says above them: both runs, and whether each fits its device."""
    lines = []
    for letter, name, run, forecast in zip(
        "ab",
        comparison.names,
        (comparison.a, comparison.b),
        (comparison.forecast_a, comparison.forecast_b),
        strict=True,
    ):
        lines += [f"{letter}: {name}", "; ".join(of_run(run))]
        if forecast.device_nbytes is not None and forecast.usable_nbytes is not None:
            needs, usable = format_nbytes(forecast.device_nbytes), format_nbytes(forecast.usable_nbytes)
            likely = fits(forecast.fits, forecast.chance_of_fitting)
            lines.append(f"{letter} {likely}: {needs} on its peak rank, of {usable} usable")
    return lines


def _bars(
    title: str, unit: str, parts: tuple[Part, ...], names: Sequence[str], scale: float, more: Sequence[Band] = ()
) -> Chart:
    shown = [*(each for each in parts if each.a or each.b), _whole(parts)]
    sides = {f"a: {names[0]}": [each.a * scale for each in shown], f"b: {names[1]}": [each.b * scale for each in shown]}

    def said(side: str, row: int) -> str:
        part = shown[row]
        difference = significant(abs(part.difference) * scale)
        sign = "-" if part.difference < 0 else "+"
        return f"{side}\n{part.name}: {significant(sides[side][row])} {unit}\nb - a: {sign}{difference} {unit}"

    return bar_chart(title, unit, [each.name for each in shown], [*beside(sides, said), *more])
