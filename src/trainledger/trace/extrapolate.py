"""Ledgers of short models extrapolated into the ledger of a long one: what each more block adds becomes a loop.

A step of a model with one more block is the same step with entries put in at some places (the block's forward, its
backward, its update) and with some amounts grown (one call that updates all parameters). Both are read off two
ledgers; a third one, of a model that is longer still, verifies them: `Extrapolation.unrolled` must give it
entry by entry. How the short models came about does not matter here: any ledgers will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from trainledger.ledger.entry import Amounts, Entry
from trainledger.ledger.ledger import Ledger
from trainledger.trace.patches import Kwargs

Counts = tuple[int, ...]  # how often each repeated part runs
Stars = Callable[[str], str]  # a module's path, with a star for the number of its block

_GROWING = ("flops", "model_flops", "read", "written", "kept", "scratch", "payload")
_AMOUNTS = ("allocated", "freed")
_SAME = tuple(
    field.name for field in fields(Entry) if field.name not in (*_GROWING, *_AMOUNTS, "shape", "loop", "path")
)
BASES = (1, 3)  # rounds of the shortest model
MORE = 3  # rounds that the model has more which must come out as the rule says
REPEATING = (
    "amounts",
    "kind",
    "nothing",
)  # what inserted entries must have in common with those before, the strictest first
# Enough to see how all but the first ones go
MICRO_BATCHES = 4
_AHEAD = 256  # entries after a difference that are compared to find its cause


@dataclass(frozen=True)
class Insertion:
    """Entries that one more round of a part puts in before an entry of the base."""

    at: int
    part: int
    body: tuple[Entry, ...]


@dataclass(frozen=True)
class Extrapolation:
    """A step as a function of how often each of its repeated parts runs, exact where `proves` has said so.

    ``base`` is the ledger at ``counts``; ``grown`` has, for entries of it whose amounts change, the same entry of the
    ledgers with one more round of each part.
    """

    base: Ledger
    counts: Counts
    more: tuple[Ledger, ...]
    insertions: tuple[Insertion, ...]
    grown: Mapping[int, tuple[Entry, ...]]
    stars: Stars

    def proves(self, ledger: Ledger, counts: Counts) -> bool:
        """Whether this is the ledger at ``counts``, entry by entry as integers, with the same totals and notes."""
        made = self._head(counts)
        if _head_of(made) != _head_of(ledger) or len(ledger) != self._length(counts):
            return False
        mine = (_key(entry, entry.path) for entry in self.unrolled(counts))
        return all(one == other for one, other in zip(mine, _keys(ledger.entries, self.stars), strict=True))

    def unrolled(self, counts: Counts) -> Iterator[Entry]:
        """The entries in order, without loops; paths have stars."""
        for at, inserted in self._in_order():
            if inserted is not None:
                for _ in range(counts[inserted.part] - self.counts[inserted.part]):
                    yield from (replace(each, path=self.stars(each.path)) for each in inserted.body)
            elif at < len(self.base):
                entry = self._entry(at, counts)
                yield replace(entry, path=self.stars(entry.path))

    def at(self, counts: Counts, *, placed: Callable[[str], str] | None = None) -> Ledger:
        """The ledger at ``counts``, each repeated run of entries once and in a loop of its own.

        ``placed`` says what a path of the base is called there.
        """
        entries: list[Entry] = []
        bounds = 0  # entries before are in a loop already, or grow
        for number, (at, inserted) in enumerate(self._in_order()):
            if inserted is None:
                if at < len(self.base):
                    entry = self._entry(at, counts)
                    path = placed(entry.path) if placed is not None else entry.path
                    entries.append(replace(entry, path=path) if path != entry.path else entry)
                    bounds = len(entries) if at in self.grown else bounds
                continue
            times = counts[inserted.part] - self.counts[inserted.part]
            size = len(inserted.body)
            keys = list(_keys(inserted.body, self.stars))
            while len(entries) - size >= bounds and list(_keys(entries[-size:], self.stars)) == keys:
                del entries[-size:]
                times += 1
            loop = ((f"layers {number}", times),)
            if times:
                entries += (replace(each, path=self.stars(each.path), loop=loop) for each in inserted.body)
            bounds = len(entries)
        return replace(self._head(counts), entries=tuple(entries))

    def _in_order(self) -> list[tuple[int, Insertion | None]]:
        """Entries of the base and insertions between them."""
        places: list[tuple[int, Insertion | None]] = []
        first = 0
        for each in sorted(self.insertions, key=lambda insertion: insertion.at):
            places += [(at, None) for at in range(first, each.at)]
            places.append((each.at, each))
            first = each.at
        return places + [(at, None) for at in range(first, len(self.base))]

    def _length(self, counts: Counts) -> int:
        inserted = sum(
            len(insertion.body) * (counts[insertion.part] - self.counts[insertion.part])
            for insertion in self.insertions
        )
        return len(self.base) + inserted

    def _entry(self, at: int, counts: Counts) -> Entry:
        entry = self.base.entries[at]
        others = self.grown.get(at)
        if others is None:
            return entry
        facts: Kwargs = {name: self._number(name, entry, others, counts) for name in _GROWING}
        facts |= {name: self._amounts(name, entry, others, counts) for name in _AMOUNTS}
        sizes = zip(entry.shape, *(other.shape for other in others), strict=True)
        return replace(entry, **facts, shape=tuple(self._grown(size, more, counts) for size, *more in sizes))

    def _grown(self, base: int, others: Sequence[int], counts: Counts) -> int:
        pairs = zip(others, counts, self.counts, strict=True)
        return base + sum((other - base) * (count - before) for other, count, before in pairs)

    def _number(self, name: str, base: object, others: Sequence[object], counts: Counts) -> int:
        return self._grown(getattr(base, name), [getattr(other, name) for other in others], counts)

    def _amounts(self, name: str, base: object, others: Sequence[object], counts: Counts) -> Amounts:
        mine, *theirs = [dict(getattr(other, name)) for other in (base, *others)]
        names = dict.fromkeys(name for each in (mine, *theirs) for name in each)
        grown = {
            name: self._grown(mine.get(name, 0), [their.get(name, 0) for their in theirs], counts) for name in names
        }
        return tuple((name, nbytes) for name, nbytes in grown.items() if nbytes)

    def _head(self, counts: Counts) -> Ledger:
        base, more = self.base, self.more
        facts: Kwargs = {name: self._number(name, base, more, counts) for name in ("parameters", "tokens")}
        facts |= {name: self._amounts(name, base, more, counts) for name in ("resident", "uncounted")}
        return replace(base, entries=(), tensors=(), **facts)


def extrapolate(
    base: Ledger, more: Sequence[Ledger], counts: Counts, stars: Stars, *, repeating: str = "amounts"
) -> Extrapolation | None:
    """What one more round of each part changes: ``more`` are the ledgers with that, ``base`` the one at ``counts``.

    ``repeating`` says what is asked of entries that are put in: that those before them are the same in kind and
    ``amounts``, the same in ``kind``, or ``nothing``, as where the first round is unlike the others. None where a
    difference is none that more rounds make.
    """
    x = _Sequence(base, stars)
    insertions: list[Insertion] = []
    changed: dict[int, dict[int, Entry]] = {}
    for part, ledger in enumerate(more):
        y = _Sequence(ledger, stars)
        aligned = _aligned(x, y, repeating)
        if aligned is None:
            return None
        for at, first, size in aligned:
            if size:
                insertions.append(Insertion(at, part, ledger.entries[first : first + size]))
            else:
                changed.setdefault(at, {})[part] = ledger.entries[first]
    if not _in_any_order(insertions):
        return None
    parts = range(len(more))
    grown = {at: tuple(others.get(part, base.entries[at]) for part in parts) for at, others in changed.items()}
    return Extrapolation(base, counts, tuple(more), tuple(insertions), grown, stars)


def proved(at: Callable[[Counts], Ledger], whole: Counts, stars: Stars) -> Extrapolation | None:
    """What follows for ``whole`` from the ledgers that ``at`` gives of shorter models, proved by a longer one of them.

    Begun from the shortest; where ends are so unlike the middle that this does not show the rule, from longer ones.
    """
    for rounds in BASES:
        if rounds + MORE > min(whole):
            break
        base = tuple(rounds for _ in whole)
        grown = [tuple(each + (number == part) for number, each in enumerate(base)) for part in range(len(base))]
        longer = tuple(each + MORE for each in base)
        # What a wrong guess gives does not come out for the longer model
        for repeating in REPEATING:
            extrapolated = extrapolate(at(base), [at(each) for each in grown], base, stars, repeating=repeating)
            if extrapolated is not None and extrapolated.proves(at(longer), longer):
                return extrapolated
    return None


def _in_any_order(insertions: Sequence[Insertion]) -> bool:
    """Whether of several parts that grow at one place it does not matter which comes first."""
    at_one_place: dict[int, list[Entry]] = {}
    for insertion in insertions:
        others = at_one_place.setdefault(insertion.at, [])
        mine, theirs = list(_keys(insertion.body)), list(_keys(others))
        if mine + theirs != theirs + mine:
            return False
        others += insertion.body
    return True


class _Sequence:
    """The entries of a ledger as numbers that are equal where entries are: in all, or in all but their amounts."""

    def __init__(self, ledger: Ledger, stars: Stars) -> None:
        keys = list(_keys(ledger.entries, stars))
        self.whole = [hash(key) for key in keys]
        self.kind = [hash(key[0]) for key in keys]

    def __len__(self) -> int:
        return len(self.kind)


def _aligned(x: _Sequence, y: _Sequence, repeating: str) -> list[tuple[int, int, int]] | None:
    """How the longer of two sequences comes from the shorter one.

    For each difference the place in the shorter one, that in the longer one, and how many entries are put in there: 0
    where one has other amounts.
    """
    found: list[tuple[int, int, int]] = []
    i = j = 0
    while i < len(x) or j < len(y):
        both = i < len(x) and j < len(y)
        if both and x.whole[i] == y.whole[j]:
            i, j = i + 1, j + 1
            continue
        best = _agreement(x, y, i + 1, j + 1) + 1 if both and x.kind[i] == y.kind[j] else -1
        size = 0
        for each in _rounds(x, y, i, j, repeating):
            agreement = _agreement(x, y, i, j + each)
            if agreement > best:
                best, size = agreement, each
        if best < 0:
            return None
        found.append((i, j, size))
        i, j = (i, j + size) if size else (i + 1, j + 1)
    return found


def _rounds(x: _Sequence, y: _Sequence, i: int, j: int, repeating: str) -> Iterator[int]:
    """How many entries of the longer sequence may have been inserted here: after them both sequences are the same."""
    more = (len(y) - j) - (len(x) - i)
    asked = {"amounts": y.whole, "kind": y.kind, "nothing": None}[repeating]
    for size in range(1, more + 1 if asked is None else min(more, j) + 1):
        after = j + size
        if y.kind[after] != x.kind[i] if i < len(x) else after < len(y):
            continue
        if asked is None or (asked[j] == asked[j - size] and asked[j - size : j] == asked[j:after]):
            yield size


def _agreement(x: _Sequence, y: _Sequence, i: int, j: int) -> int:
    """How well two sequences go on together: entries that are equal count, those whose amounts differ a little."""
    found = 0
    for at, other in zip(range(i, min(i + _AHEAD, len(x))), range(j, len(y)), strict=False):
        if x.whole[at] == y.whole[other]:
            found += 8
        elif x.kind[at] == y.kind[other]:
            found += 1
        else:
            break
    return found


def _keys(entries: Iterable[Entry], stars: Stars = str) -> Iterator[tuple[Any, ...]]:
    known: dict[str, str] = {}
    for entry in entries:
        path = known.get(entry.path)
        if path is None:
            path = known[entry.path] = stars(entry.path)
        yield _key(entry, path)


def _key(entry: Entry, path: str) -> tuple[Any, ...]:
    """An entry as it is compared: first what it is, then its amounts."""
    facts = vars(entry)
    kind = (path, *[facts[name] for name in _SAME], len(entry.shape))
    counts = tuple(count for _, count in entry.loop)
    growing = [facts[name] for name in _GROWING]
    return (kind, *growing, entry.shape, counts, *[_sorted(facts[name]) for name in _AMOUNTS])


def _sorted(amounts: Amounts) -> Amounts:
    if len(amounts) > 1:
        return tuple(sorted(amount for amount in amounts if amount[1]))
    return amounts if not amounts or amounts[0][1] else ()


def _head_of(ledger: Ledger) -> tuple[Any, ...]:
    counts = ledger.parameters, ledger.tokens, ledger.micro_batches, _sorted(ledger.uncounted)
    return (_sorted(ledger.resident), *counts, ledger.writer, ledger.partial, ledger.notes)


# Micro-batches


def with_rounds(ledger: Ledger, rounds: int) -> Ledger | None:
    """The entries of a step of `MICRO_BATCHES` as those of ``rounds``: the last two are alike, and a loop of them.

    None where these two are not equal entry by entry. Resident memory, tokens and notes stay as they are.
    """
    entries = ledger.entries
    starts: list[int] = []
    begins = True
    for at, entry in enumerate(entries):
        if entry.phase == "forward" and begins:
            starts.append(at)
        begins = entry.phase in ("backward", "recompute") or (begins and entry.phase != "forward")
    if len(starts) != MICRO_BATCHES:
        return None
    *_, first, last = starts
    end = last + (last - first)
    keys = list(_keys(entries[first:last]))
    if keys != list(_keys(entries[last:end])):
        return None
    if end < len(entries) and entries[end].phase in ("forward", "backward", "recompute"):
        return None
    times = rounds - MICRO_BATCHES + 2
    before = first - (last - first)
    if before >= 0 and list(_keys(entries[before:first])) == keys:
        first, last, times = before, first, times + 1
    looped = tuple(replace(each, loop=(("micro-batches", times), *each.loop)) for each in entries[first:last])
    return replace(ledger, entries=(*entries[:first], *looped, *entries[end:]))


def counted(ledger: Ledger) -> Ledger:
    """The ledger with its uncounted operations as they come in its entries."""
    found: dict[str, int] = {}
    for entry in ledger.entries:
        if entry.kind == "unknown":
            found[entry.name] = found.get(entry.name, 0) + entry.times
    return replace(ledger, uncounted=tuple(sorted(found.items())))
