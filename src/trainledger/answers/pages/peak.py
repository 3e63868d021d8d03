"""What a step's peak of memory is made of: categories, and the tensors live then, those alike in one row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.ledger.entry import CATEGORIES, HOST, Entry, TensorLife
from trainledger.ledger.ledger import Ledger
from trainledger.report.document import Cell, Section, Table, sections
from trainledger.report.table import sentence
from trainledger.spec.units import counted, format_nbytes

NO_TENSORS = (
    "This ledger has bytes by category and not single tensors: it is a closed form, a trace that multiplies its "
    "blocks, or a file that was stored without them. A full trace has them (blocks all)."
)


@dataclass(frozen=True)
class LiveTensors:
    """Tensors live at the peak that differ in nothing but which block of the model they are of.

    ``nbytes`` are those of all ``count`` together, ``born`` the indices of the first and the last entry that made one
    (-1: there before the step), ``until`` says after which operation they are gone, empty where they outlive it all.
    """

    count: int
    nbytes: int
    category: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    path: str
    phase: str
    line: str
    born: tuple[int, int]
    until: str

    @property
    def label(self) -> str:
        """A short name of them: ``32 x bf16[8, 2048, 4096] gelu of layers.*.mlp``."""
        return f"{self._many}{self._format} {self._made}"

    @property
    def sentence(self) -> str:
        """All that is known of them, in a line."""
        if self.born[0] < 0:
            made, until = "there before the step", self.until
        else:
            entries = f"entry {self.born[0]}" if self.born[0] == self.born[1] else "entries {}-{}".format(*self.born)
            made, until = f"made in {self.phase} ({entries})", self.until or "the end"
        line = f" ({self.line})" if self.line else ""
        until = f", until {until}" if until else ""
        return f"{self._many}{self._format} {self.category}: {self._made}{line}, {made}{until}"

    @property
    def _many(self) -> str:
        return f"{self.count:,} x " if self.count > 1 else ""

    @property
    def _format(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def _made(self) -> str:
        return f"{self.name} of {self.path}" if self.path else self.name


@dataclass(frozen=True)
class PeakOfTensors:
    """The peak: its bytes by category, the tensors that are live then, largest first, and what no tensor accounts for.

    ``sum(live) + sum(uncounted.values()) == nbytes``, as integers.
    """

    nbytes: int
    index: int
    entry: Entry
    by_category: dict[str, int]
    live: tuple[LiveTensors, ...]
    uncounted: dict[str, int]


def tensors_at_peak(ledger: Ledger) -> PeakOfTensors:
    """The composition of a ledger's peak. Raises ValueError for a ledger without entries."""
    peak = ledger.peak()
    live = [tensor for tensor in ledger.tensors if tensor.lives(peak.index) and tensor.category != HOST]
    uncounted = dict(peak.by_category)
    for life in live:
        uncounted[life.category] = uncounted.get(life.category, 0) - life.nbytes
    return PeakOfTensors(
        peak.nbytes,
        peak.index,
        peak.entry,
        _ordered(peak.by_category),
        tuple(_alike(live, ledger)),
        {category: nbytes for category, nbytes in _ordered(uncounted).items() if nbytes},
    )


def _ordered(nbytes: dict[str, int]) -> dict[str, int]:
    rest = [each for each in nbytes if each not in CATEGORIES]
    return {category: nbytes[category] for category in (*CATEGORIES, *rest) if category in nbytes}


def _alike(lives: Iterable[TensorLife], ledger: Ledger) -> list[LiveTensors]:
    """Tensors in groups of the same kind, the group with the most bytes first."""
    # Where a trace broke off it is not known until when live tensors would have lived.
    broken_off = len(ledger) - 1 if ledger.partial else None
    groups: dict[tuple[Any, ...], list[TensorLife]] = {}
    for live in lives:
        until = "" if live.died is None or live.died == broken_off else _after(ledger.entries[live.died])
        key = (
            live.nbytes, live.category, live.dtype, live.shape, starred(live.name), starred(live.path), live.phase,
            live.line, until, live.born < 0,
        )  # fmt: skip
        groups.setdefault(key, []).append(live)
    groups_of = [
        LiveTensors(
            len(group), sum(life.nbytes for life in group), category, dtype, shape,
            _common([life.name for life in group]), _common([life.path for life in group]), phase, line,
            (min(life.born for life in group), max(life.born for life in group)), until,
        )
        for (_, category, dtype, shape, _, _, phase, line, until, _), group in groups.items()
    ]  # fmt: skip
    return sorted(groups_of, key=lambda group: -group.nbytes)


def _common(paths: list[str]) -> str:
    """The path of one tensor, or that of several with stars for what differs."""
    return paths[0] if len(set(paths)) == 1 else starred(paths[0])


def _after(entry: Entry) -> str:
    path = starred(entry.path)
    return f"{entry.name} of {path} in {entry.phase}" if path else f"{entry.name} in {entry.phase}"


def starred(path: str) -> str:
    """A path with a star in the place of each number.

    >>> starred("layers.3.mlp.experts.7.weight")
    'layers.*.mlp.experts.*.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def place(entry: Entry) -> str:
    """Where an entry is: its operation, phase, module and line.

    >>> place(Entry("mm", "layers.0.mlp", "backward", "matmul", line="model.py:41"))
    'mm of layers.0.mlp in backward (model.py:41)'
    """
    module = f" of {entry.path}" if entry.path else ""
    line = f" ({entry.line})" if entry.line else ""
    return f"{entry.name}{module} in {entry.phase}{line}"


def peak_sections(ledger: Ledger, top: int = 15) -> tuple[Section, ...]:
    """The peak's composition: categories, then the ``top`` largest groups of tensors."""
    peak = tensors_at_peak(ledger)
    head = f"The peak, {format_nbytes(peak.nbytes)} ({peak.nbytes:,} bytes), is at {place(peak.entry)}, "
    rows = tuple((name, nbytes, _share(nbytes, peak.nbytes)) for name, nbytes in peak.by_category.items())
    rows += (("all", peak.nbytes, _share(peak.nbytes, peak.nbytes)),)
    units = ("", "integer", "share")
    partial = sentence(f"PARTIAL: the highest moment of what ran before {ledger.partial}") if ledger.partial else ""
    return sections(
        f"{head}entry {peak.index} of {len(ledger):,}.",
        Table("peak", ("live at the peak", "bytes", ""), rows, units=units, align="lrr"),
        _tensors(peak, top) if peak.live else NO_TENSORS,
        partial,
    )


def _tensors(peak: PeakOfTensors, top: int) -> Table:
    shown, rest = peak.live[:top], peak.live[top:]
    rows: list[tuple[Cell, ...]] = [
        (live_tensors.nbytes, _share(live_tensors.nbytes, peak.nbytes), live_tensors.sentence) for live_tensors in shown
    ]
    if rest:
        nbytes = sum(live_tensors.nbytes for live_tensors in rest)
        count = sum(live_tensors.count for live_tensors in rest)
        others = f"{counted(count, 'other tensor')} of {counted(len(rest), 'kind')}"
        rows.append((nbytes, _share(nbytes, peak.nbytes), others))
    for category, nbytes in peak.uncounted.items():
        where = "inside the operation while it runs" if category == "scratch" else "not listed one by one"
        rows.append((nbytes, _share(nbytes, peak.nbytes), f"{category}: {where}"))
    columns = ("bytes", "", "tensors live then")
    return Table("tensors", columns, tuple(rows), units=("nbytes", "share"), align="rrl")


def _share(nbytes: int, of: int) -> float | None:
    return nbytes / of if of else None


def peak_data(ledger: Ledger) -> dict[str, Any]:
    """The same for programs: all groups of tensors, whose ``nbytes`` and ``uncounted`` sum to the peak's."""
    peak = tensors_at_peak(ledger)
    return {
        "nbytes": peak.nbytes,
        "index": peak.index,
        "at": place(peak.entry),
        "by_category": peak.by_category,
        "tensors": [plain(live_tensors) | {"until": live_tensors.until or None} for live_tensors in peak.live],
        "uncounted": peak.uncounted,
        "partial": ledger.partial,
    }
