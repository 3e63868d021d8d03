"""The ledger of a step: entries in the order they run, their sums, the peak of their memory, and files of them.

A file is JSON, compressed where its name ends in .gz.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from trainledger.ledger.core.sizes import summed
from trainledger.ledger.entry import Amounts, Entry, Int, TensorLife
from trainledger.ledger.memory.timeline import Peak, peak
from trainledger.spec.durable import opened
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import GIB


@frozen
class Ledger:
    """The entries of one optimizer step of one device, in the order in which they run.

    ``resident`` is what is live before the step, by category; ``uncounted`` lists what has no rule, with
    how often it ran; ``parameters`` are distinct trained elements; ``tokens`` pass through in the step.
    ``tensors`` are the pieces of memory one by one, from a full trace; ``partial`` is a sentence why a trace
    ended before its step did, empty for a whole one; ``notes`` are what else must be said of it. ``reserved`` are bytes
    that the program's allocator holds and no live tensor has (`ledger.step`): no part of the peak.
    """

    entries: tuple[Entry, ...]
    resident: Amounts = ()
    parameters: Int = 0
    tokens: Int = 0
    micro_batches: Int = 1
    uncounted: tuple[tuple[str, int], ...] = ()
    writer: str = ""
    tensors: tuple[TensorLife, ...] = ()
    partial: str = ""
    notes: tuple[str, ...] = ()
    reserved: Amounts = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        partial = ", partial" if self.partial else ""
        return f"Ledger({len(self.entries)} entries, parameters={self.parameters}, writer={self.writer!r}{partial})"

    def __str__(self) -> str:
        """The totals, and FLOPs and kept bytes by phase, in a short table."""
        flops, kept = self.by("phase", "flops"), self.by("phase", "kept")
        rows = [("phase", "FLOPs", "kept bytes"), *((name, f"{flops[name]:,}", f"{kept[name]:,}") for name in flops)]
        return "\n".join([repr(self), *(f"{name:<16}{of:>26}{nbytes:>22}" for name, of, nbytes in rows)])

    def total(self, amount: str) -> Int:
        """The sum of one amount (``flops``, ``read``, ``kept`` …) over all entries, each as often as it runs."""
        _known(amount)
        return summed(
            getattr(entry, amount) * entry.times if entry.loop else getattr(entry, amount) for entry in self.entries
        )

    @property
    def flops(self) -> Int:
        return self.total("flops")

    @property
    def model_flops(self) -> Int:
        return self.total("model_flops")

    @property
    def matmul_flops(self) -> Int:
        """FLOPs of matmuls and attention kernels, what is called hardware FLOPs; pointwise work left out."""
        return self.filter(lambda entry: entry.kind in ("matmul", "attention")).flops

    @property
    def kept_nbytes(self) -> Int:
        """Bytes that one micro-batch's forward keeps for its backward."""
        return self.total("kept") // self.micro_batches

    @property
    def reserved_nbytes(self) -> Int:
        """All bytes of ``reserved``."""
        return summed(nbytes for _, nbytes in self.reserved)

    def by(self, key: str, amount: str = "flops") -> dict[str, Int]:
        """One amount split by an attribute of the entries (``phase``, ``kind``, ``basis`` …).

        By ``path`` the blocks of a model are taken together: ``layers.*`` for ``layers.0``, ``layers.1`` …
        """
        _known(key, amount)
        split: dict[str, Int] = {}
        for entry in self.entries:
            label = getattr(entry, key)
            if key == "path":
                label = ".".join("*" if part.isdigit() else part for part in label.split("."))
            split[label] = split.get(label, 0) + getattr(entry, amount) * entry.times
        return split

    def diff(self, other: Ledger, key: str = "kind", amount: str = "flops") -> dict[str, Int]:
        """This ledger's amount less the other's, by an attribute of the entries; what is equal is left out."""
        mine, theirs = self.by(key, amount), other.by(key, amount)
        differences = {each: mine.get(each, 0) - theirs.get(each, 0) for each in {**mine, **theirs}}
        return {label: rest for label, rest in differences.items() if _differs(rest)}

    def peak(self) -> Peak:
        """The most bytes live at once, by category, and the entry that runs then."""
        return peak(self)

    def records(self) -> list[dict[str, Any]]:
        """Its entries as dicts, in the order in which they run, for ``pandas.DataFrame(...)`` or polars."""
        names = [each.name for each in fields(Entry)]
        return [{name: getattr(entry, name) for name in names} | {"times": entry.times} for entry in self.entries]

    def _repr_html_(self) -> str:
        # Reports know ledgers, and not the other way round: a notebook asks one by its name.
        page = import_module("trainledger.answers.pages.traced").page(self, self.writer or "step", by="kind")
        return str(import_module("trainledger.report.html").fragment(page))

    def filter(self, keep: Callable[[Entry], bool]) -> Ledger:
        """The same ledger with the entries that ``keep`` accepts."""
        return self._with(entry for entry in self.entries if keep(entry))

    def __add__(self, other: Ledger) -> Ledger:
        return self._with((*self.entries, *other.entries))

    def _with(self, entries: Iterable[Entry]) -> Ledger:
        return replace(self, entries=tuple(entries))


@frozen(kw_only=True)
class StepFigures:
    """Figures of a step's ledger, under the names of `summary`: what forecasts and measurements have in common."""

    parameters: int | None = None
    tokens_per_step: int | None = None
    flops: dict[str, int] = field(default_factory=dict)
    model_flops: int | None = None
    kept_nbytes: int | None = None
    kept_by_kind: dict[str, int] = field(default_factory=dict)
    peak_nbytes: int | None = None
    peak_by_category: dict[str, int] = field(default_factory=dict)


def summary(ledger: Ledger, peak: Peak | None = None) -> dict[str, Any]:
    """What a step's ledger says, under the names that forecasts and measurements give it; its ``peak`` if known."""
    peak = peak or ledger.peak()
    kept = ledger.filter(lambda entry: bool(entry.kept)).by("kind", "kept")
    return {
        "parameters": ledger.parameters,
        "tokens_per_step": ledger.tokens,
        "flops": {kind: flops for kind, flops in ledger.by("kind").items() if flops},
        "model_flops": ledger.model_flops,
        "kept_nbytes": ledger.kept_nbytes,
        "kept_by_kind": {kind: nbytes // ledger.micro_batches for kind, nbytes in kept.items()},
        "peak_nbytes": peak.nbytes,
        "peak_by_category": dict(peak.by_category),
    }


def _known(*names: str) -> None:
    known = Entry.__dataclass_fields__
    for name in names:
        if name not in known:
            raise ValueError(f"an entry has no {name!r}; it has {', '.join(known)}")


def _differs(difference: Int) -> bool:
    different = difference != 0
    return bool(different.any()) if hasattr(different, "any") else bool(different)


FORMAT = 1
_ENTRY = {each.name: each.default for each in fields(Entry)}
_TENSOR = {each.name: each.default for each in fields(TensorLife)}
_PAIRS = ("allocated", "freed", "loop", "resident", "uncounted")
_SIZES = ("shape", "fused")


def to_json(ledger: Ledger) -> dict[str, Any]:
    """A ledger of numbers as plain data; fields at their defaults are left out.

    Raises TypeError for a ledger of arrays or symbols, which is not one run.
    """
    head = {name: getattr(ledger, name) for name in _HEAD}
    head |= {name: getattr(ledger, name) for name in _TRACED if getattr(ledger, name)}
    entries = [_told(entry, _ENTRY) for entry in ledger.entries]
    tensors = [_told(tensor, _TENSOR) for tensor in ledger.tensors]
    for record in (head, *entries, *tensors):
        for name, value in record.items():
            if not _is_plain(value):
                raise TypeError(f"{name} = {value!r} of a ledger is not a number that can be stored")
    return {"format": FORMAT, **head, "entries": entries, **({"tensors": tensors} if tensors else {})}


def _told(record: Entry | TensorLife, defaults: dict[str, Any]) -> dict[str, Any]:
    facts = {name: getattr(record, name) for name in defaults}
    return {name: value for name, value in facts.items() if value != defaults[name]}


def from_json(data: dict[str, Any]) -> Ledger:
    """The ledger that `to_json` wrote; InvalidInput where it is not one."""
    try:
        if data["format"] != FORMAT:
            raise InvalidInput([Problem("format", data["format"], "is not a ledger this version reads", FORMAT)])
        entries = tuple(Entry(**_tuples(each)) for each in data["entries"])
        tensors = tuple(TensorLife(**_tuples(each)) for each in data.get("tensors", ()))
        traced = {"partial": data.get("partial", ""), "notes": tuple(data.get("notes", ()))}
        traced["reserved"] = tuple((str(name), int(nbytes)) for name, nbytes in data.get("reserved", ()))
        return Ledger(entries, **_tuples({name: data[name] for name in _HEAD}), **traced, tensors=tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput([Problem("ledger", None, f"is not what trainledger writes: {error}")]) from error


LARGEST_NBYTES = GIB  # of a ledger as text: a million entries
_TRACED = ("partial", "notes", "reserved")  # what few ledgers have
_HEAD = tuple(each.name for each in fields(Ledger) if each.name not in ("entries", "tensors", *_TRACED))


def write_ledger(ledger: Ledger, path: str | os.PathLike[str]) -> None:
    """Store a ledger; the file appears whole or not at all, and equal ledgers give equal files."""
    content = json.dumps(to_json(ledger), separators=(",", ":"), allow_nan=False).encode()
    replace_file(path, gzip.compress(content, mtime=0) if os.fspath(path).endswith(".gz") else content)


def read_ledger(path: str | os.PathLike[str]) -> Ledger:
    """The ledger in a file; InvalidInput where it is missing, truncated or something else."""
    where = os.fspath(path)
    try:
        with opened(path) as file:
            content = file.read(LARGEST_NBYTES + 1)
        return from_json(json.loads(_unpacked(content) if where.endswith(".gz") else content))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise InvalidInput([Problem(Path(path).name, None, rule)], where) from error
    except (EOFError, zlib.error, ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise InvalidInput(list(error.problems), where) from error
        raise InvalidInput([Problem(Path(path).name, None, f"is truncated or not a ledger: {error}")], where) from error


def _unpacked(content: bytes) -> bytes:
    """The text of a compressed ledger; ValueError where it is longer than any ledger is."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(LARGEST_NBYTES + 1)
    if len(text) > LARGEST_NBYTES:
        raise ValueError(f"it has more than {LARGEST_NBYTES} bytes when it is decompressed")
    return text


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, str | int | float)


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    tuples = dict(record)
    for name, value in record.items():
        if name in _PAIRS:
            tuples[name] = tuple((str(key), amount) for key, amount in value)
        elif name in _SIZES:
            tuples[name] = tuple(value)
    return tuples
