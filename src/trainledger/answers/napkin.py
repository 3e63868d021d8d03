"""A run on a napkin: in a line, its formulas with numbers, its static state, and the sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from trainledger.answers.question import question, text
from trainledger.forecast.plan import napkin as solved
from trainledger.forecast.plan.napkin import Napkin, headline, why_impossible
from trainledger.ledger.rules_of_thumb import STATES
from trainledger.report.document import Document, Table, section, sections
from trainledger.spec.device import Device
from trainledger.spec.units import format_flops_per_second, format_gigabytes, format_nbytes

_NAMES = {"flops": "FLOPs", "device_hours": "device-hours", "tokens_per_parameter": "tokens/parameter", "kwh": "energy"}


@question(impossible=why_impossible, plots=False)
def napkin(
    *,
    device: Annotated[str | Device, text("a device of the catalog, or this-machine")],
    params: Annotated[Any, text('parameters, such as "70B"')] = None,
    tokens: Annotated[Any, text('tokens, such as "15T"; "20x" is 20 per parameter', metavar="D")] = None,
    count: Annotated[Any, text("how many devices")] = None,
    days: Annotated[Any, text('days, or a time such as "2w"')] = None,
    mfu: Annotated[Any, text("share of the peak that is reached, such as 0.5 or 50%")] = None,
    price: Annotated[Any, text("money per device-hour, for the bill")] = None,
    dtype: Annotated[str | None, text("whose peak counts; bf16 where the device has it, else fp16")] = None,
) -> Napkin:
    """Days, FLOPs, device-hours and static bytes of a training run from rules of thumb.

    Give four of --params, --tokens, --count, --days and --mfu; the fifth is solved for. Exit code 2 where that needs
    more than the peak of the devices.

    Raises `InvalidInput`. `trainledger.forecast.plan.napkin` has the method.

    >>> answer = napkin(params="70B", tokens="15T", device="h100-sxm", count=1024, mfu=0.5)
    >>> round(answer.days, 1), answer.devices_for_static["fp32-adamw"]
    (143.9, 14)
    """
    return solved.napkin(
        device=device, params=params, tokens=tokens, count=count, days=days, mfu=mfu, price=price, dtype=dtype
    )


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
