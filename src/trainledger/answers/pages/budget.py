"""The documents of a lock that was checked or written, and of a step that is over its budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from trainledger.answers.budgets.check import Written
from trainledger.answers.budgets.compare import LESS, MORE, WITHIN, Difference, Limit, Move, Row, label, largest
from trainledger.answers.budgets.lockfile import Locked
from trainledger.answers.budgets.summary import QUANTITIES, Summary
from trainledger.answers.pages.plain_data import plain
from trainledger.report import terminal
from trainledger.report.document import Amount, Cell, Content, Document, Table, section, sections, shown, signed
from trainledger.report.table import WIDTH
from trainledger.spec.units import counted

_VERDICTS = {MORE: "MORE", LESS: "less", WITHIN: "allowed"}
COMMENT = "<!-- trainledger check -->"  # by which the next check finds the comment that it replaces
_MOST_MOVES = 3
_MOST_EDITED = 5


def checked(differences: Sequence[Difference], *, tight: bool = False) -> Document:
    """All targets against their lock, each in a line where it is as locked, else with what moved."""
    found: list[Content] = []
    as_locked: list[str] = []
    for difference in differences:
        if difference.settings or any(row.change for row in difference.judged):
            found += [as_locked, *_target(difference, tight)]
            as_locked = []
        else:
            as_locked.append(f"{difference.name}: as locked ({counted(len(difference.judged), 'figure')})")
    return Document(
        title="Targets against their lock",
        sections=sections(*found, as_locked),
        data=lambda: {
            "ok": not any(difference.fails(tight=tight) for difference in differences),
            "targets": [_target_data(difference, tight) for difference in differences],
        },
    )


def _target(difference: Difference, tight: bool) -> Iterator[Content]:
    """A target that moved, or is another now."""
    yield (
        f"{difference.name}: {_headline(difference, tight)}",
        *(f"{field} was locked as {before} and is now {after}" for field, before, after in difference.settings),
    )
    yield table_of(difference.rows) if any(row.change for row in difference.judged) else None
    yield moved_at(difference.moves)
    yield _edited(difference) if difference.moves else None
    yield (f"Note: {note}." for note in difference.notes)
    if _differ(*difference.versions):
        yield f"Locked with {difference.versions[0]}; now {difference.versions[1]}."
    if difference.fails(tight=tight):
        yield f"If this is intended, accept it with `trainledger lock {difference.name}`."
    elif difference.less:
        yield f"To lock the lower figures: `trainledger lock {difference.name}`."


def comment(differences: Sequence[Difference], *, tight: bool = False) -> str:
    """A check as Markdown, for a comment on a pull request: a line for each target, and below them where it moved."""
    worse = [difference for difference in differences if difference.fails(tight=tight)]
    targets = counted(len(differences), "target")
    verdict = f"{len(worse)} of {targets} not as locked" if worse else f"{targets} within the lock"
    lines = [COMMENT, f"**trainledger check**: {verdict}", ""]
    lines += [f"- `{difference.name}`: {', '.join(_said(difference))}" for difference in differences]
    if any(difference.judged and any(row.change for row in difference.judged) for difference in differences):
        where = terminal.text(checked(differences, tight=tight))
        lines += ["", "<details><summary>What moved, and where</summary>", "", "```text", where, "```", "</details>"]
    return "\n".join(lines) + "\n"


def _said(difference: Difference) -> Iterator[str]:
    """What a target's peak and FLOPs are more or less by, and whether it fits."""
    if difference.settings:
        yield "another target than was locked"
    moved = {row.quantity: row for row in difference.judged if row.change}
    for quantity, what in (("peak", "at the peak"), ("flops", "FLOPs of a step")):
        if (row := moved.pop(quantity, None)) is not None:
            change, share = signed(Fraction(row.change), row.unit), _share(row.locked, row.now)
            yield (
                f"{share or change} {what}" if quantity == "flops" else f"{change} {what}" + f" ({share})" * bool(share)
            )
    rest = [_word(QUANTITIES[quantity][0]) for quantity in moved if quantity != "model_flops"]
    if rest:
        yield f"{' and '.join(rest)} moved"
    if not difference.settings and not any(row.change for row in difference.judged):
        yield "as locked"
    if difference.outlook:
        yield f"still {difference.outlook}" if difference.outlook.startswith("fits") else difference.outlook


def _headline(difference: Difference, tight: bool) -> str:
    more, less = len(difference.more), len(difference.less)
    if difference.settings:
        return "is no longer the target that was locked"
    if more:
        return f"{counted(more, 'figure')} {'is' if more == 1 else 'are'} more than locked"
    if less:
        fewer = f"{counted(less, 'figure')} {'is' if less == 1 else 'are'} less than locked"
        return f"{fewer}, which --tight does not allow" if tight else fewer
    return "moved within what is allowed"


def _share(locked: int, now: int) -> str:
    """The change as a share of what is locked, or how many times it where that is easier to read; "" for very little.

    >>> _share(1000, 1005), _share(1000, 10_000), _share(1000, 1_000_000), _share(100_000, 100_001), _share(0, 1)
    ('+0.5 %', '+900.0 %', '1,000 times', '', '')
    """
    if locked <= 0 or 2000 * abs(now - locked) < locked:
        return ""
    return f"{now // locked:,} times" if now > 10 * locked else f"{100 * (now - locked) / locked:+.1f} %"


def table_of(rows: Sequence[Row]) -> Table:
    """The quantities that moved, parts below what they are part of."""
    moved = {each.quantity for each in rows if each.change and not each.part}
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        if not row.change or row.quantity not in moved:
            continue
        before, now, allowed = (Amount(each, row.unit) for each in (row.locked, row.now, row.allowed))
        change = signed(Fraction(row.change), row.unit)
        title = f"- {row.title}" if row.part else _word(row.title)
        ends = (None, "") if row.part else (allowed, _VERDICTS[row.verdict])
        cells.append((title, before, now, change, _share(row.locked, row.now), *ends))
    columns = ("", "locked", "now", "change", "", "allowed", "")
    return Table("moved", columns, tuple(cells), align="lrrrrrl")


def moved_at(moves: Sequence[Move]) -> Iterator[str]:
    """The places where most moved, quantity by quantity, each with the text of the line."""
    for quantity in dict.fromkeys(move.quantity for move in moves):
        unit = QUANTITIES[quantity][1]
        found = [move for move in moves if move.quantity == quantity]
        if quantity == "peak" and _changes(found) == _changes([move for move in moves if move.quantity == "kept"]):
            yield "peak by the same bytes at the same lines"
            continue
        listed = _MOST_MOVES if len(found) > _MOST_MOVES + 1 else len(found)  # one more takes no more room than a count
        for move in found[:listed]:
            gone = ", a line that is gone" if move.gone and move.text else ", which is gone" if move.gone else ""
            change = signed(Fraction(move.change), unit)
            yield f"{_word(quantity)} {change} at {move.place}{_operations(move.operations, move.text)}{gone}"
            yield from _source(move.text)
        if rest := found[listed:]:
            change = signed(Fraction(sum(move.change for move in rest)), unit)
            yield f"{_word(quantity)} {change} at {counted(len(rest), 'other place')} together"


def _changes(moves: Sequence[Move]) -> list[tuple[str, int]]:
    return [(move.place, move.change) for move in moves]


def _word(quantity: str) -> str:
    """A quantity's short name."""
    return {"flops": "FLOPs", QUANTITIES["kept"][0]: "kept"}.get(quantity, quantity)


def _operations(names: Iterable[str], line: str) -> str:
    """Operations in brackets; those of a ``line`` of code that are PyTorch's own with its library."""
    listed = ", ".join(f"aten::{name}" if line and "::" not in name else name for name in names)
    return f" ({listed})" if listed else ""


def _source(text: str) -> Iterator[str]:
    """A line of code in one line, where there is one."""
    line = f"    {text}"
    if text:
        yield line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _edited(difference: Difference) -> Iterator[str]:
    if not difference.edited:
        return
    listed = {move.place for move in difference.moves}
    yield "Edited since the lock, in the functions that were traced:"
    for line, says in difference.edited[:_MOST_EDITED]:
        yield f"{line} (above)" if line in listed else line
        yield from () if line in listed else _source(says)
    if len(difference.edited) > _MOST_EDITED:
        yield f"and {counted(len(difference.edited) - _MOST_EDITED, 'further line')}"


def _target_data(difference: Difference, tight: bool) -> dict[str, Any]:
    data: dict[str, Any] = plain(difference, more={Row: ("change", "verdict")})
    for name, keys in (("edited", ("line", "text")), ("settings", ("field", "locked", "now"))):
        data[name] = [dict(zip(keys, each, strict=True)) for each in data[name]]
    data["versions"] = dict(zip(("locked", "now"), difference.versions, strict=True))
    return {**data, "ok": not difference.fails(tight=tight)}


def written(made: Written) -> Document:
    """What a lock now holds, and what it held."""
    quantities = ("parameters", "flops", "kept", "peak")
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(locked.summary.totals[quantity] for quantity in quantities), _state(made.before.get(name), locked))
        for name, locked in sorted(made.locked.items())
    )
    units = ("", *(QUANTITIES[quantity][1] for quantity in quantities))
    table = Table("locked", ("", "parameters", "FLOPs done", "kept", "peak", ""), rows, units=units, align="lrrrrl")
    gone = [f"{name} is no longer a target and was removed" for name in made.gone]
    return Document(
        title="Locked targets",
        sections=sections(
            section("", table, gone, (f"Note: {note}." for note in made.notes)),
            f"Written to {made.path}: commit it with the code.",
        ),
        data=lambda: {
            "path": made.path,
            "targets": {
                name: {"totals": locked.summary.totals, "state": _state(made.before.get(name), locked)}
                for name, locked in made.locked.items()
            },
            "gone": list(made.gone),
            "notes": list(made.notes),
        },
    )


def _state(before: Locked | None, now: Locked) -> str:
    """Whether a target is new in a lock, moved, or as it was."""
    if before is None:
        return "new"
    return "as before" if before.summary.totals == now.summary.totals else "moved"


def over_budget(limits: Sequence[Limit], summary: Summary) -> Document:
    """The amounts of a budget and what a step costs, and where most of what is over arises."""
    over = [limit for limit in limits if not limit.is_met]
    table = Table("budget", ("", "budget", "costs", "over by"), tuple(map(_limit_cells, limits)), align="lrrr")
    return Document(
        title="A step over its budget",
        sections=sections(
            f"the step is over its budget in {', '.join(QUANTITIES[limit.quantity][0] for limit in over)}",
            table,
            *(part for limit in over for part in _over(limit.quantity, summary)),
        ),
    )


def _over(quantity: str, summary: Summary) -> Iterator[Content]:
    """What a quantity that is over its budget is made of, and at which places most of it arises."""
    unit = QUANTITIES[quantity][1]
    if quantity == "peak":
        parts = sorted(summary.peak.items(), key=lambda part: -part[1])
        yield f"At the peak: {', '.join(f'{category} {shown(nbytes, unit)}' for category, nbytes in parts)}"
    if quantity == "uncounted":
        yield f"Without a rule: {', '.join(f'{count} x {name}' for name, count in summary.uncounted.items())}"
    lines: list[str] = []
    for amount, place in largest(summary, quantity)[:_MOST_MOVES]:
        kept = sorted(place.kept if quantity == "kept" else (), key=lambda each: (-each[1], each[0]))
        operations = _operations((name for name, _ in kept), "a line")
        lines += [f"{_word(quantity)} {shown(amount, unit)} at {label(place)}{operations}", *_source(place.text)]
    yield lines


def _limit_cells(limit: Limit) -> tuple[Cell, ...]:
    title, unit = QUANTITIES[limit.quantity]
    most, now = shown(limit.most, unit), shown(limit.now, unit)
    if most == now and not limit.is_met:
        most, now = f"{limit.most:,}", f"{limit.now:,}"
    return title, most, now, "" if limit.is_met else Amount(limit.now - limit.most, unit)


def _differ(locked: str, now: str) -> bool:
    """Whether a package that both name has another version; packages that only one names do not count.

    >>> _differ("torch 2.13.0, transformers 5.23.0", "torch 2.13.0"), _differ("torch 2.12.0", "torch 2.13.0")
    (False, True)
    """
    before, after = ({part.partition(" ")[0]: part for part in versions.split(", ")} for versions in (locked, now))
    return any(before[name] != after[name] for name in before.keys() & after.keys())
