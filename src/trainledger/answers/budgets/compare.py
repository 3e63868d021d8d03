"""What moved between a lock and now, by how much more than is allowed, and at which lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher

from trainledger.answers.budgets.summary import QUANTITIES, Collectives, Place, Sources, Summary
from trainledger.answers.budgets.tolerance import Tolerance, Tolerances
from trainledger.spec.frozen import frozen

SAME, WITHIN, MORE, LESS = "same", "within", "more", "less"
_EXACT = Tolerance()
_NONE = Collectives(0, 0)


@frozen
class Row:
    """One quantity, locked and now. ``part`` names what it is a part of; parts are shown and not judged."""

    quantity: str
    title: str
    locked: int
    now: int
    allowed: int = 0
    part: str = ""

    @property
    def unit(self) -> str:
        return QUANTITIES[self.quantity][1]

    @property
    def change(self) -> int:
        return self.now - self.locked

    @property
    def verdict(self) -> str:
        """``more`` or ``less`` than locked by more than is allowed, ``within`` what is allowed, or the ``same``."""
        if abs(self.change) <= self.allowed:
            return WITHIN if self.change else SAME
        return MORE if self.change > 0 else LESS


@frozen
class Move:
    """How much of a quantity moved at one place: a present line, a module, or a line that is gone.

    ``operations`` are those whose kept bytes moved that way, the most first.
    """

    quantity: str
    place: str
    text: str
    change: int
    operations: tuple[str, ...] = ()
    gone: bool = False


@frozen
class Difference:
    """A target against its lock. ``settings`` are fields of the target that are no longer those it was locked with.

    ``edited`` are lines ("file:line", text) of the traced functions that the lock does not know; ``notes`` qualify the
    figures now.
    """

    name: str
    rows: tuple[Row, ...]
    moves: tuple[Move, ...] = ()
    edited: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    versions: tuple[str, str] = ("", "")
    notes: tuple[str, ...] = ()

    @property
    def judged(self) -> tuple[Row, ...]:
        return tuple(each for each in self.rows if not each.part)

    @property
    def more(self) -> tuple[Row, ...]:
        return tuple(each for each in self.judged if each.verdict == MORE)

    @property
    def less(self) -> tuple[Row, ...]:
        return tuple(each for each in self.judged if each.verdict == LESS)

    def fails(self, *, tight: bool = False) -> bool:
        """Whether something is more than allowed or is another target now; with ``tight`` also less."""
        return bool(self.more or self.settings or (tight and self.less))


def rows_of(locked: Summary, now: Summary, allowed: Tolerances) -> tuple[Row, ...]:
    """Every quantity of two summaries, the peak with its categories, collectives and uncounted operations by kind."""

    def row(quantity: str, title: str, before: int, after: int) -> Row:
        return Row(quantity, title, before, after, allowed.get(quantity, _EXACT).of(before))

    rows = []
    for name, (title, _) in QUANTITIES.items():
        if name in now.totals:
            rows.append(row(name, title, locked.totals[name], now.totals[name]))
        if name == "peak":
            for category in _either(locked.peak, now.peak):
                before, after = locked.peak.get(category, 0), now.peak.get(category, 0)
                rows.append(Row(name, category, before, after, part="peak"))
    for kind in _either(locked.collectives, now.collectives):
        before_, after_ = locked.collectives.get(kind, _NONE), now.collectives.get(kind, _NONE)
        rows.append(row("collectives", kind, before_.count, after_.count))
        rows.append(row("payload", f"{kind}, bytes", before_.payload, after_.payload))
    for operation in _either(locked.uncounted, now.uncounted):
        before, after = locked.uncounted.get(operation, 0), now.uncounted.get(operation, 0)
        rows.append(row("uncounted", f"without a rule: {operation}", before, after))
    return tuple(rows)


def moves_of(locked: Summary, now: Summary, quantities: Iterable[str]) -> tuple[Move, ...]:
    """Where each of these quantities of `PLACED` moved: the way it went before the other way, and the largest first."""
    pairs = list(paired(locked.places, now.places))
    moves: list[Move] = []
    for quantity in quantities:
        found = [each for before, after in pairs if (each := _move(quantity, before, after)) is not None]
        whole = sum(each.change for each in found)
        moves += sorted(found, key=lambda each: (each.change * whole <= 0, -abs(each.change), each.place))
    return tuple(moves)


def _move(quantity: str, before: Place | None, after: Place | None) -> Move | None:
    was, is_now = (0 if each is None else each.amount(quantity) for each in (before, after))
    place = after or before
    if was == is_now or place is None:
        return None
    operations = _operations(before, after, is_now > was) if quantity == "kept" else ()
    return Move(quantity, label(place), place.text, is_now - was, operations, gone=after is None)


def _operations(before: Place | None, after: Place | None, grew: bool) -> tuple[str, ...]:
    was, is_now = (dict(() if each is None else each.kept) for each in (before, after))
    changes = {name: is_now.get(name, 0) - was.get(name, 0) for name in {**was, **is_now}}
    moved = [name for name, change in changes.items() if change and (change > 0) == grew]
    return tuple(sorted(moved, key=lambda name: (-abs(changes[name]), name)))


def label(place: Place) -> str:
    """A place as a reader finds it: ``model.py:41``, or its function or module where it has no line now."""
    if not place.lines:
        return f"module {place.where}" if place.where.isdigit() else place.where
    numbers = ",".join(str(each) for each in place.lines)
    return f"{place.where.partition(' ')[0]}:{numbers}"


def paired(locked: Iterable[Place], now: Iterable[Place]) -> Iterator[tuple[Place | None, Place | None]]:
    """Each place of a lock with what it is now: the same line of the same function, or the one that took its place."""
    before, after = _by_where(locked), _by_where(now)
    left: list[Place] = []
    right: list[Place] = []
    for where in _either(before, after):
        old, new = before.get(where, []), after.get(where, [])
        matcher = SequenceMatcher(None, [each.text for each in old], [each.text for each in new], autojunk=False)
        for _, i, i_end, j, j_end in matcher.get_opcodes():
            count = min(i_end - i, j_end - j)
            yield from zip(old[i : i + count], new[j : j + count], strict=True)
            left += old[i + count : i_end]
            right += new[j + count : j_end]
    # A function was renamed or a line went to another: it is known by what it says.
    elsewhere = {each.text: each for each in left if each.text}
    for each in right:
        yield elsewhere.pop(each.text, None), each
    found = {id(each) for each in elsewhere.values()}
    yield from ((each, None) for each in left if not each.text or id(each) in found)


def _by_where(places: Iterable[Place]) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for each in places:
        found.setdefault(each.where, []).append(each)
    return found


def edited_lines(locked: Summary, now: Summary, sources: Sources, first: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Lines of the traced functions that the lock does not know, those of the functions ``first`` before the others."""
    before_others = set(first)
    edited = []
    for where in sorted(
        locked.functions.keys() & now.functions.keys(), key=lambda each: (each not in before_others, each)
    ):
        name, _, function = where.partition(" ")
        marks = sources.file(name).marks(function)
        matcher = SequenceMatcher(None, locked.functions[where].split(), [mark for mark, _ in marks], autojunk=False)
        for tag, _, _, j, j_end in matcher.get_opcodes():
            if tag != "equal":
                edited += [(f"{name}:{number}", sources.file(name).text(number)) for _, number in marks[j:j_end]]
    return tuple(edited)


def _either(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))
