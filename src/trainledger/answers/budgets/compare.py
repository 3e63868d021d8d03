"""What moved between a lock and now, by how much more than is allowed, and at which lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from fractions import Fraction
from typing import Any, TypeVar

from trainledger.answers.budgets.summary import PLACED, QUANTITIES, Collectives, Place, Sources, Summary
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.units import NotAQuantity, parse_count, parse_nbytes, parse_number


@frozen
class Tolerance:
    """A tolerance: ``share`` of what is locked, or an ``amount`` of the quantity's own unit."""

    share: Fraction = Fraction(0)
    amount: int = 0

    def of(self, locked: int) -> int:
        """The most that a quantity may be above what is locked.

        >>> Tolerance(share=Fraction("0.01")).of(1050), Tolerance(amount=64).of(1050), Tolerance().of(1050)
        (10, 64, 0)
        """
        return int(self.share * abs(locked)) + self.amount


Tolerances = Mapping[str, Tolerance]
Amount = int | float | str


def read_tolerances(data: object, field: str) -> dict[str, Tolerance]:
    """Tolerances from plain data such as ``{"peak": "1%", "kept": "64MB", "flops": 1000}``; raises `InvalidInput`."""
    if not isinstance(data, Mapping):
        rule = 'must be a table such as { peak = "1%", kept = "64MB" }'
        raise InvalidInput([Problem(field, data, rule)])
    problems: list[Problem] = []
    allowed = {}
    for name, value in data.items():
        if name not in QUANTITIES:
            rule = f"is not a quantity; there are {', '.join(QUANTITIES)}"
            problems.append(Problem(f"{field}.{name}", value, rule, nearest_text(str(name), QUANTITIES)))
            continue
        try:
            allowed[name] = _read(value, QUANTITIES[name][1])
        except (NotAQuantity, ValueError) as error:
            rule = error.rule if isinstance(error, NotAQuantity) else str(error)
            problems.append(Problem(f"{field}.{name}", value, rule))
    if problems:
        raise InvalidInput(problems)
    return allowed


def read_flags(texts: Iterable[str]) -> dict[str, Tolerance]:
    """Tolerances from texts such as ``peak=1%``; raises `InvalidInput`."""
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput([Problem("--allow", text, "is written QUANTITY=TOLERANCE", "peak=1%")])
        given[name.strip()] = value.strip()
    return read_tolerances(given, "--allow")


def read_amount(value: object, unit: str) -> int:
    """An amount of a quantity: a whole number, or a text such as ``"1.2GB"`` or ``"3T"``; raises ValueError."""
    if isinstance(value, str):
        return (
            parse_nbytes(value) if unit == "nbytes" else parse_count(_without_unit(value) if unit == "flops" else value)
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300 or value != int(value):
        example = '"1.2GB"' if unit == "nbytes" else '"3T"'
        raise ValueError(f"must be a whole number from 0, or a text such as {example}")
    return int(value)


def _read(value: object, unit: str) -> Tolerance:
    if isinstance(value, str) and value.rstrip().endswith("%"):
        parse_number(value)
        share = Fraction(value.rstrip().removesuffix("%").strip().replace("_", "").replace(",", "")) / 100
        if share < 0:
            raise ValueError("must not be negative")
        return Tolerance(share=share)
    amount = read_amount(value, unit)
    if amount < 0:
        raise ValueError("must not be negative")
    return Tolerance(amount=amount)


def _without_unit(text: str) -> str:
    """FLOPs may be written with their unit: ``3 TFLOP``."""
    lower = text.rstrip().lower()
    return text.rstrip()[: -len("flop")] if lower.endswith("flop") else text


@frozen
class Limit:
    """A quantity with the most that it may be."""

    quantity: str
    most: int
    now: int

    @property
    def is_met(self) -> bool:
        return self.now <= self.most


def read_limits(amounts: Mapping[str, Amount | None]) -> dict[str, int]:
    """The amounts of a budget as numbers, those left out that are None; raises `InvalidInput`.

    >>> read_limits({"peak": "1.2GB", "flops": "3T", "kept": None})
    {'peak': 1200000000, 'flops': 3000000000000}
    """
    limits = {}
    for quantity, amount in amounts.items():
        if amount is None:
            continue
        try:
            limits[quantity] = read_amount(amount, QUANTITIES[quantity][1])
        except ValueError as error:
            raise InvalidInput([Problem(quantity, amount, getattr(error, "rule", str(error)))]) from None
    return limits


def limits_of(summary: Summary, limits: Mapping[str, int]) -> list[Limit]:
    """A step's figures with their limits; of what is split by kind, the sum."""
    return [Limit(quantity, most, _total(summary, quantity)) for quantity, most in limits.items()]


def _total(summary: Summary, quantity: str) -> int:
    if quantity in summary.totals:
        return summary.totals[quantity]
    if quantity == "uncounted":
        return sum(summary.uncounted.values())
    kinds = summary.collectives.values()
    return sum(kind.count if quantity == "collectives" else kind.payload for kind in kinds)


def largest(summary: Summary, quantity: str) -> list[tuple[int, Place]]:
    """The places at which most of a quantity arises, the largest first; [] where no place is known of it."""
    if quantity not in PLACED:
        return []
    amounts = [(place.amount(quantity), place) for place in summary.places if place.amount(quantity)]
    return sorted(amounts, key=lambda amount: (-amount[0], amount[1].key))


SAME, WITHIN, MORE, LESS = "same", "within", "more", "less"
_EXACT = Tolerance()
_NONE = Collectives(0, 0)
_T = TypeVar("_T")


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
    figures now; ``outlook`` is whether a run fits its devices now, and its step.
    """

    name: str
    rows: tuple[Row, ...]
    moves: tuple[Move, ...] = ()
    edited: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    versions: tuple[str, str] = ("", "")
    notes: tuple[str, ...] = ()
    outlook: str = ""

    @property
    def judged(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.part)

    @property
    def more(self) -> tuple[Row, ...]:
        return tuple(row for row in self.judged if row.verdict == MORE)

    @property
    def less(self) -> tuple[Row, ...]:
        return tuple(row for row in self.judged if row.verdict == LESS)

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
            for category, before, after in _pairs(locked.peak, now.peak, 0):
                rows.append(Row(name, category, before, after, part="peak"))
    for kind, sent_before, sent in _pairs(locked.collectives, now.collectives, _NONE):
        rows.append(row("collectives", kind, sent_before.count, sent.count))
        rows.append(row("payload", f"{kind}, bytes", sent_before.payload, sent.payload))
    for operation, before, after in _pairs(locked.uncounted, now.uncounted, 0):
        rows.append(row("uncounted", f"without a rule: {operation}", before, after))
    return tuple(rows)


def moves_of(locked: Summary, now: Summary, quantities: Iterable[str]) -> tuple[Move, ...]:
    """Where each of these quantities of `PLACED` moved: the way it went before the other way, and the largest first."""
    pairs = list(paired(locked.places, now.places))
    moves: list[Move] = []
    for quantity in quantities:
        found = [each for before, after in pairs if (each := _move(quantity, before, after)) is not None]
        whole = sum(move.change for move in found)
        moves += sorted(found, key=lambda move: (move.change * whole <= 0, -abs(move.change), move.place))
    return tuple(moves)


def _move(quantity: str, before: Place | None, after: Place | None) -> Move | None:
    was, is_now = (0 if each is None else each.amount(quantity) for each in (before, after))
    place = after or before
    if was == is_now or place is None:
        return None
    operations = _operations(before, after, is_now > was) if quantity == "kept" else ()
    return Move(quantity, label(place), place.text, is_now - was, operations, gone=after is None)


def _operations(before: Place | None, after: Place | None, grew: bool) -> tuple[str, ...]:
    was, is_now = (dict(() if place is None else place.kept) for place in (before, after))
    changes = {name: now - earlier for name, earlier, now in _pairs(was, is_now, 0)}
    moved = [name for name, change in changes.items() if change and (change > 0) == grew]
    return tuple(sorted(moved, key=lambda name: (-abs(changes[name]), name)))


def label(place: Place) -> str:
    """A place as a reader finds it: ``model.py:41``, or its function or module where it has no line now."""
    if not place.lines:
        return f"module {place.where}" if place.where.isdigit() else place.where
    numbers = ",".join(str(line) for line in place.lines)
    return f"{place.where.partition(' ')[0]}:{numbers}"


def paired(locked: Iterable[Place], now: Iterable[Place]) -> Iterator[tuple[Place | None, Place | None]]:
    """Each place of a lock with what it is now: the same line of the same function, or the one that took its place."""
    before, after = _by_where(locked), _by_where(now)
    left: list[Place] = []
    right: list[Place] = []
    none: list[Place] = []
    for _, old, new in _pairs(before, after, none):
        matcher = SequenceMatcher(None, [place.text for place in old], [place.text for place in new], autojunk=False)
        for _, i, i_end, j, j_end in matcher.get_opcodes():
            count = min(i_end - i, j_end - j)
            yield from zip(old[i : i + count], new[j : j + count], strict=True)
            left += old[i + count : i_end]
            right += new[j + count : j_end]
    # A function was renamed or a line went to another: it is known by what it says.
    elsewhere = {place.text: place for place in left if place.text}
    for place in right:
        yield elsewhere.pop(place.text, None), place
    found = {id(place) for place in elsewhere.values()}
    yield from ((place, None) for place in left if not place.text or id(place) in found)


def _by_where(places: Iterable[Place]) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for place in places:
        found.setdefault(place.where, []).append(place)
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


def _pairs(one: Mapping[str, _T], other: Mapping[str, _T], none: _T) -> list[tuple[str, _T, _T]]:
    return [(name, one.get(name, none), other.get(name, none)) for name in dict.fromkeys([*one, *other])]
