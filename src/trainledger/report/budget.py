"""What moved against a lock, as a table and lines for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from trainledger.document import shown, signed
from trainledger.regression.check import Written
from trainledger.regression.compare import LESS, MORE, WITHIN, Difference, Move, Row, label
from trainledger.regression.lockfile import Locked
from trainledger.regression.summary import QUANTITIES, Summary
from trainledger.regression.tolerance import Limit, largest
from trainledger.report.table import WIDTH, table, wrapped
from trainledger.units import counted

_VERDICTS = {MORE: "MORE", LESS: "less", WITHIN: "allowed"}
_MOST_MOVES = 3
_MOST_EDITED = 5


def text(differences: Sequence[Difference], *, tight: bool = False) -> str:
    """All targets, each in a line where it is as locked, else with what moved."""
    lines: list[str] = []
    for each in differences:
        told = _target(each, tight).splitlines()
        lines += ["", *told] if lines and len(told) > 1 else told
    return "\n".join(lines)


def _target(difference: Difference, tight: bool) -> str:
    moved = [each for each in difference.judged if each.change]
    if not moved and not difference.settings:
        return f"{difference.name}: as locked ({counted(len(difference.judged), 'figure')})"
    lines = [f"{difference.name}: {_headline(difference, tight)}"]
    for field, before, after in difference.settings:
        lines.append(wrapped(f"{field} was locked as {before} and is now {after}"))
    if moved:
        lines += ["", table_of(difference.rows)]
    if difference.moves:
        lines += ["", *moved_at(difference.moves)]
    if difference.edited and difference.moves:
        lines += _edited(difference)
    if difference.notes:
        lines += ["", *(wrapped(f"Note: {each}.") for each in difference.notes)]
    if _differ(*difference.versions):
        lines += ["", wrapped(f"Locked with {difference.versions[0]}; now {difference.versions[1]}.")]
    if difference.fails(tight=tight):
        lines += ["", wrapped(f"Where that is wanted, `trainledger lock {difference.name}` agrees to it.")]
    elif difference.less:
        lines += ["", wrapped(f"`trainledger lock {difference.name}` holds the code to what it is now.")]
    return "\n".join(lines)


def _headline(difference: Difference, tight: bool) -> str:
    more, less = len(difference.more), len(difference.less)
    if difference.settings:
        return "is no longer the target that was locked"
    if more:
        return f"{counted(more, 'figure')} {'is' if more == 1 else 'are'} more than locked"
    if less:
        told = f"{counted(less, 'figure')} {'is' if less == 1 else 'are'} less than locked"
        return f"{told}, which --tight does not allow" if tight else told
    return "moved within what is allowed"


def _share(locked: int, now: int) -> str:
    """The change as a share of what is locked, or how many times it where that is easier read; "" for very little.

    >>> _share(1000, 1005), _share(1000, 10_000), _share(1000, 1_000_000), _share(100_000, 100_001), _share(0, 1)
    ('+0.5 %', '+900.0 %', '1,000 times', '', '')
    """
    if locked <= 0 or 2000 * abs(now - locked) < locked:
        return ""
    return f"{now // locked:,} times" if now > 10 * locked else f"{100 * (now - locked) / locked:+.1f} %"


def table_of(rows: Sequence[Row]) -> str:
    """The quantities that moved, parts below what they are part of."""
    moved = {each.quantity for each in rows if each.change and not each.part}
    cells = []
    for row in rows:
        if not row.change or row.quantity not in moved:
            continue
        change = signed(Fraction(row.change), row.unit)
        share = _share(row.locked, row.now)
        ends = ["", ""] if row.part else [shown(row.allowed, row.unit), _VERDICTS[row.verdict]]
        title = f"- {row.title}" if row.part else _word(row.title)
        cells.append([title, shown(row.locked, row.unit), shown(row.now, row.unit), change, share, *ends])
    return table(["", "locked", "now", "change", "", "allowed", ""], cells, align="lrrrrrl")


def moved_at(moves: Sequence[Move], most: int = _MOST_MOVES) -> list[str]:
    """The places where most moved, quantity by quantity, each with what the line says."""
    lines = []
    for quantity in dict.fromkeys(each.quantity for each in moves):
        found = [each for each in moves if each.quantity == quantity]
        if quantity == "peak" and _changes(found) == _changes([each for each in moves if each.quantity == "kept"]):
            lines.append("peak by the same bytes at the same lines")
            continue
        told = most if len(found) > most + 1 else len(found)  # one more takes no more room than the word of it
        for each in found[:told]:
            operations = ", ".join(_operation(name, each) for name in each.operations)
            gone = ", a line that is gone" if each.gone and each.text else ", which is gone" if each.gone else ""
            change = signed(Fraction(each.change), QUANTITIES[quantity][1])
            told_here = f"{_word(quantity)} {change} at {each.place}{f' ({operations})' if operations else ''}{gone}"
            lines.append(wrapped(told_here))
            if each.text:
                lines.append(_source(each.text))
        if len(found) > told:
            rest = sum(each.change for each in found[told:])
            change = signed(Fraction(rest), QUANTITIES[quantity][1])
            lines.append(f"{_word(quantity)} {change} at {counted(len(found) - told, 'other place')} together")
    return lines


def _changes(moves: Sequence[Move]) -> list[tuple[str, int]]:
    return [(each.place, each.change) for each in moves]


def _word(quantity: str) -> str:
    """How a quantity is called where there is little room."""
    return {"flops": "FLOPs", QUANTITIES["kept"][0]: "kept"}.get(quantity, quantity)


def _operation(name: str, move: Move) -> str:
    return f"aten::{name}" if move.text and "::" not in name else name


def _source(text: str) -> str:
    line = f"    {text}"
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _edited(difference: Difference) -> list[str]:
    told = {each.place for each in difference.moves}
    lines = ["", "Edited since the lock, in the functions that were traced:"]
    for line, says in difference.edited[:_MOST_EDITED]:
        lines += [wrapped(f"{line} (above)")] if line in told else [line, _source(says)]
    if len(difference.edited) > _MOST_EDITED:
        lines.append(f"and {counted(len(difference.edited) - _MOST_EDITED, 'further line')}")
    return lines


def written(made: Written) -> str:
    """What a lock now holds, and what it held."""
    cells = []
    for name, locked in sorted(made.locked.items()):
        totals = locked.summary.totals
        cells.append([
            name, *(shown(totals[each], QUANTITIES[each][1]) for each in ("parameters", "flops", "kept", "peak")),
            state(made.before.get(name), locked),
        ])  # fmt: skip
    lines = [table(["", "parameters", "FLOPs done", "kept", "peak", ""], cells, align="lrrrrl")]
    lines += [wrapped(f"{name} is no target any more and was taken out") for name in made.gone]
    lines += [wrapped(f"Note: {each}.") for each in made.notes]
    return "\n".join([*lines, "", wrapped(f"Written to {made.path}: commit it with the code.")])


def state(before: Locked | None, now: Locked) -> str:
    """Whether a target is new in a lock, moved, or as it was."""
    if before is None:
        return "new"
    return "as before" if before.summary.totals == now.summary.totals else "moved"


def to_json(differences: Sequence[Difference], *, tight: bool = False) -> dict[str, Any]:
    """The differences for programs."""
    return {
        "ok": not any(each.fails(tight=tight) for each in differences),
        "targets": [
            {
                "name": each.name,
                "ok": not each.fails(tight=tight),
                "rows": [{**vars(row), "change": row.change, "verdict": row.verdict} for row in each.rows],
                "moves": [vars(move) for move in each.moves],
                "edited": [{"line": line, "text": says} for line, says in each.edited],
                "settings": [{"field": name, "locked": old, "now": new} for name, old, new in each.settings],
                "notes": list(each.notes),
                "versions": {"locked": each.versions[0], "now": each.versions[1]},
            }
            for each in differences
        ],
    }


def over_budget(limits: Sequence[Limit], found: Summary) -> str:
    """The amounts of a budget and what a step costs, and where most of what is over arises."""
    over = [each for each in limits if not each.is_met]
    cells = [_limit_cells(each) for each in limits]
    lines = [
        f"the step is over its budget in {', '.join(QUANTITIES[each.quantity][0] for each in over)}", "",
        table(["", "budget", "costs", "over by"], cells, align="lrrr"),
    ]  # fmt: skip
    for each in over:
        if each.quantity == "peak":
            parts = sorted(found.peak.items(), key=lambda part: -part[1])
            composed = ", ".join(f"{category} {shown(nbytes, 'nbytes')}" for category, nbytes in parts)
            lines += ["", wrapped(f"At the peak: {composed}")]
        if each.quantity == "uncounted":
            operations = ", ".join(f"{count} x {name}" for name, count in found.uncounted.items())
            lines += ["", wrapped(f"Without a rule: {operations}")]
        places = largest(found, each.quantity)
        if places:
            unit = QUANTITIES[each.quantity][1]
            lines.append("")
            for amount, place in places[:_MOST_MOVES]:
                operations = ", ".join(
                    f"aten::{name}" if "::" not in name else name
                    for name, _ in sorted(place.kept, key=lambda kept: (-kept[1], kept[0]))
                )
                named = f" ({operations})" if operations and each.quantity == "kept" else ""
                lines.append(wrapped(f"{_word(each.quantity)} {shown(amount, unit)} at {label(place)}{named}"))
                if place.text:
                    lines.append(_source(place.text))
    return "\n".join(lines)


def _limit_cells(limit: Limit) -> list[str]:
    title, unit = QUANTITIES[limit.quantity]
    most, now = shown(limit.most, unit), shown(limit.now, unit)
    if most == now and not limit.is_met:
        most, now = f"{limit.most:,}", f"{limit.now:,}"
    return [title, most, now, "" if limit.is_met else shown(limit.now - limit.most, unit)]


def _differ(locked: str, now: str) -> bool:
    """Whether a package that both name has another version: what else a process has loaded decides nothing.

    >>> _differ("torch 2.13.0, transformers 5.23.0", "torch 2.13.0"), _differ("torch 2.12.0", "torch 2.13.0")
    (False, True)
    """
    before, after = ({each.partition(" ")[0]: each for each in told.split(", ")} for told in (locked, now))
    return any(before[name] != after[name] for name in before.keys() & after.keys())
