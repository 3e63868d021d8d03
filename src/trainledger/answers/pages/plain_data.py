"""An answer as plain data, for JSON: dicts of the fields of its dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from os import PathLike, fspath
from typing import Any

from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import RankAccount
from trainledger.spec.parts import field_at, table_of
from trainledger.spec.plain import finite
from trainledger.spec.problem import InvalidInput, shown
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override
from trainledger.spec.runfile import sections_of

SECTIONS = ("model", "recipe", "layout", "cluster")
Shape = Mapping[type, Sequence[str]]


def plain(value: Any, more: Shape | None = None, less: Shape | None = None) -> Any:
    """A value as JSON takes it: dataclasses as dicts of their fields, exact fractions as numbers, no ledgers.

    Of a class, ``more`` names properties that are included, and ``less`` fields that are left out. A run is given by
    its sections (`run_data`).

    >>> from trainledger.forecast.predict.forecast import Bar
    >>> plain((Bar("data", 2 * 10**9), Fraction(4, 2)), more={Bar: ["seconds"]})
    [{'cause': 'data', 'nanoseconds': 2000000000, 'seconds': 2.0}, 2]
    """
    more, less = more or {}, less or {}
    if isinstance(value, Run):
        return run_data(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [*(field.name for field in fields(value)), *more.get(type(value), ())]
        of = {name: getattr(value, name) for name in names if name not in less.get(type(value), ())}
        return {name: plain(each, more, less) for name, each in of.items() if not isinstance(each, Ledger)}
    if isinstance(value, Mapping):
        return {key: plain(each, more, less) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each, more, less) for each in value]
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return fspath(value) if isinstance(value, PathLike) else value


def named(value: object, names: str) -> dict[str, Any]:
    """Some fields and properties of an object, by their names with spaces between them."""
    return {name: getattr(value, name) for name in names.split()}


def run_data(run: Run) -> dict[str, Any]:
    """The sections of a run as in a run file, a found layout too.

    ``assumed`` are the fields that were not given but assumed (`Run.origin`), each as ``--set`` takes it.
    """
    sections = {name: table_of(part) for name, part in sections_of(run).items() if name != "data"}
    fields = (each.partition(".") for each in run.origin.assumed)
    assumed = [as_override(f"{at}.{name}", field_at(getattr(run, at), name)) for at, _, name in fields]
    return {**sections, "assumed": assumed}


def error_json(error: InvalidInput) -> dict[str, Any]:
    """What is wrong, for programs: every problem with what its sentence is made of."""
    problems = [
        {
            "field": problem.field,
            "value": _plain(problem.value),
            "rule": problem.rule,
            "nearest": _plain(problem.nearest),
            "sentence": str(problem),
            "where": problem.where or error.where,
        }
        for problem in error.problems
    ]
    return {"error": problems, "where": error.where}


def _plain(value: object) -> object:
    """A value as JSON has it, or in words: an input may be any object."""

    def plain(one: object) -> object:
        huge = isinstance(one, int) and one.bit_length() > 200  # more digits than Python writes
        writable = one is None or (isinstance(one, int | float | str) and not huge and finite(one) == one)
        return one if writable else shown(one)

    return [plain(each) for each in value] if isinstance(value, list | tuple) else plain(value)


def rank_data(rank: RankAccount) -> dict[str, Any]:
    """A rank in figures: its place, its memory, its FLOPs, and the bytes of its collectives by axis and kind."""
    peak = rank.ledger.peak()
    sent: dict[str, int] = {}
    for entry in rank.ledger:
        if entry.kind == "collective" and entry.payload:
            key = f"{entry.name} over {entry.group}"
            sent[key] = sent.get(key, 0) + entry.payload * entry.times
    return {
        "title": rank.title, "count": rank.count, "stage": rank.stage, "place": rank.plan.place,
        "layers": rank.plan.layers, "in_flight": rank.in_flight, "parameters": rank.ledger.parameters,
        "model_flops": rank.ledger.model_flops,
        "peak_nbytes": peak.nbytes, "peak_by_category": peak.by_category,
        "peak_at": f"{peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}",
        "payload_nbytes": sent,
    }  # fmt: skip
