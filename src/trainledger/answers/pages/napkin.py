"""The document of a napkin: the run in a line, its formulas with numbers, its static state, and the sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.forecast.plan.napkin import Napkin, headline
from trainledger.ledger.rules_of_thumb import STATES
from trainledger.report.document import Document, Table, section, sections
from trainledger.spec.units import format_flops_per_second, format_gigabytes, format_nbytes

_NAMES = {"flops": "FLOPs", "device_hours": "device-hours", "tokens_per_parameter": "tokens/parameter", "kwh": "energy"}


def page(answer: Napkin) -> Document:
    """The whole answer; that it is impossible comes first."""
    device, impossible = answer.device, answer.mfu > 1
    peak = f"{answer.dtype} peak of {device.title}: {format_flops_per_second(answer.peak_flops_per_second)}, dense"
    rows = tuple((_NAMES.get(each.name, each.name), each.formula, each.numbers) for each in answer.formulas)
    return Document(
        title=headline(answer),
        verdict=" ".join((*answer.remarks[:impossible], headline(answer))),
        sections=sections(
            Table("formulas", ("", "formula", "with its numbers"), rows, align="lll"),
            answer.remarks[impossible:],
            section(
                "Static memory: parameters, gradients and optimizer state, without activations",
                _static(answer),
                detail="static memory",
            ),
            section("Sources", peak, _sources(answer), detail="sources"),
        ),
        data=lambda: _data(answer),
        more=("plan MODEL",),
    )


def _static(answer: Napkin) -> Table:
    fit, memory = answer.devices_for_static, answer.device.memory_nbytes
    rows = []
    for name, recipe in STATES.items():
        terms = " + ".join(str(nbytes) for _, nbytes in recipe.terms)
        total = format_gigabytes(answer.static_nbytes[name])
        devices = None if fit is None else fit[name]
        rows.append((recipe.title, f"{terms} = {recipe.bytes_per_parameter}", total, devices))
    last = "devices" if memory is None else f"x {format_nbytes(memory)}"
    columns = ("recipe", "bytes/parameter", "N x bytes", last)
    return Table("static state", columns, tuple(rows), units=("", "", "", "integer"), align="lrrr")


def _sources(answer: Napkin) -> Iterator[str]:
    yield from (f"{each.formula}: {each.source}" for each in answer.formulas if each.source != "arithmetic")
    yield from (f"{recipe.title}: {recipe.source}" for recipe in STATES.values())
    yield f"{answer.device.title}: {answer.device.source}, read {answer.device.date}"


def _data(answer: Napkin) -> dict[str, Any]:
    """The answer as plain data, every number with its formula."""
    names = (
        "params",
        "tokens",
        "dtype",
        "peak_flops_per_second",
        "count",
        "count_exact",
        "mfu",
        "solved",
        "flops",
        "days",
        "device_hours",
        "money",
        "kwh",
        "static_nbytes",
        "devices_for_static",
    )
    return {name: getattr(answer, name) for name in names} | {
        "device": answer.device.name,
        "bytes_per_parameter": {name: each.bytes_per_parameter for name, each in STATES.items()},
        "formulas": {each.name: vars(each) for each in answer.formulas},
        "remarks": list(answer.remarks),
        "source": {"peak": answer.device.source, "date": answer.device.date},
    }
