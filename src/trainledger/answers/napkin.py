"""A run on a napkin: in a line, its formulas with numbers, its static state, and the sources; or the largest model
that memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from trainledger.answers.pages.plain_data import named
from trainledger.answers.question import question, text
from trainledger.forecast.plan import napkin as solved
from trainledger.forecast.plan.napkin import GIVEN, LargestModels, Napkin, headline, headline_of_largest, largest_models
from trainledger.ledger.rules_of_thumb import STATES
from trainledger.report.document import Document, Table, section, sections
from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import format_flops_per_second, format_gigabytes, format_nbytes

_NAMES = {"flops": "FLOPs", "device_hours": "device-hours", "tokens_per_parameter": "tokens/parameter", "kwh": "energy"}


def why_impossible(answer: Napkin | LargestModels) -> Problem | None:
    """Why a run cannot be; None where it can."""
    return solved.why_impossible(answer) if isinstance(answer, Napkin) else None


@question(impossible=why_impossible, plots=False)
def napkin(
    *,
    device: Annotated[str | Device | None, text("a device of the catalog, or this-machine")] = None,
    params: Annotated[Any, text('parameters, such as "70B"')] = None,
    tokens: Annotated[Any, text('tokens, such as "15T"; "20x" is 20 per parameter', metavar="D")] = None,
    count: Annotated[Any, text("how many devices")] = None,
    days: Annotated[Any, text('days, or a time such as "2w"')] = None,
    mfu: Annotated[Any, text("share of the peak that is reached, such as 0.5 or 50%")] = None,
    price: Annotated[Any, text("money per device-hour, for the bill")] = None,
    dtype: Annotated[str | None, text("whose peak counts; bf16 where the device has it, else fp16")] = None,
    memory: Annotated[
        Any, text("solve for the largest model whose static state --count devices of it hold", metavar="BYTES")
    ] = None,
    bytes_per_param: Annotated[
        Any, text("of the largest model: bytes of static state a parameter; absent: by recipe")
    ] = None,
) -> Napkin | LargestModels:
    """Days, FLOPs, device-hours and static bytes of a training run from rules of thumb.

    Give four of --params, --tokens, --count, --days and --mfu; the fifth is solved for. Exit code 2 where that needs
    more than the peak of the devices. Given --memory, or a device and --count alone, the largest model is solved for
    whose static state they hold.

    Raises `InvalidInput`. `trainledger.forecast.plan.napkin` has the method.

    >>> answer = napkin(params="70B", tokens="15T", device="h100-sxm", count=1024, mfu=0.5)
    >>> round(answer.days, 1), answer.devices_for_static["fp32-adamw"]
    (143.9, 14)
    >>> napkin(device="h100-sxm", count=8).params["fp32-adamw"]
    40000000000
    """
    of_a_run = {"params": params, "tokens": tokens, "days": days, "mfu": mfu, "price": price, "dtype": dtype}
    given = [name for name, value in of_a_run.items() if value is not None]
    if memory is not None or bytes_per_param is not None or (device is not None and count is not None and not given):
        rule = "has no part in the largest model that memory holds, which leaves time out"
        if given:
            raise InvalidInput([Problem(name, of_a_run[name], rule) for name in given])
        return largest_models(device=device, memory=memory, count=count, bytes_per_param=bytes_per_param)
    if device is None:
        raise InvalidInput([Problem("device", None, "is missing; only with memory there need be none", "h100-sxm")])
    return solved.napkin(
        device=device, params=params, tokens=tokens, count=count, days=days, mfu=mfu, price=price, dtype=dtype
    )


def page(answer: Napkin | LargestModels) -> Document:
    """The whole answer; that it is impossible comes first."""
    if isinstance(answer, LargestModels):
        return _of_largest(answer)
    device, impossible = answer.device, answer.mfu > 1
    peak = f"{answer.dtype} peak of {device.title}: {format_flops_per_second(answer.peak_flops_per_second)}, dense"
    rows = tuple(
        (_NAMES.get(formula.name, formula.name), formula.formula, formula.numbers) for formula in answer.formulas
    )
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


def _of_largest(answer: LargestModels) -> Document:
    rows = []
    for name, params in answer.params.items():
        recipe = STATES.get(name)
        terms = "" if recipe is None else " + ".join(str(nbytes) for nbytes in recipe.terms.values()) + " = "
        title, each = name if recipe is None else recipe.title, f"{answer.bytes_per_parameter[name]:g}"
        rows.append((title, f"{terms}{each}", params, answer.params_of_one[name]))
    columns = ("recipe", "bytes/parameter", "largest N", "of one device")
    formula = answer.formulas[0]
    sources = [] if GIVEN in answer.params else [f"{state.title}: {state.source}" for state in STATES.values()]
    if answer.device is not None:
        sources.append(f"{answer.device.title}: {answer.device.source}, read {answer.device.date}")
    return Document(
        title=headline_of_largest(answer),
        verdict=headline_of_largest(answer),
        sections=sections(
            (formula.formula, f"= {formula.numbers}"),
            Table("largest models", columns, tuple(rows), units=("", "", "count", "count"), align="lrrr"),
            answer.remarks,
            section("Sources", sources, detail="sources") if sources else None,
        ),
        data=lambda: {
            **named(answer, "memory_nbytes count params params_of_one remarks"),
            "device": None if answer.device is None else answer.device.name,
            "bytes_per_parameter": answer.bytes_per_parameter,
            "formulas": {each.name: vars(each) for each in answer.formulas},
        },
        more=("fit MODEL",),
    )


def _static(answer: Napkin) -> Table:
    fit, memory = answer.devices_for_static, answer.device.memory_nbytes
    rows = []
    for name, recipe in STATES.items():
        terms = " + ".join(str(nbytes) for nbytes in recipe.terms.values())
        total = format_gigabytes(answer.static_nbytes[name])
        devices = None if fit is None else fit[name]
        rows.append((recipe.title, f"{terms} = {recipe.bytes_per_parameter}", total, devices))
    last = "devices" if memory is None else f"x {format_nbytes(memory)}"
    columns = ("recipe", "bytes/parameter", "N x bytes", last)
    return Table("static state", columns, tuple(rows), units=("", "", "", "integer"), align="lrrr")


def _sources(answer: Napkin) -> Iterator[str]:
    yield from (f"{formula.formula}: {formula.source}" for formula in answer.formulas if formula.source != "arithmetic")
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
        "tokens_per_parameter": answer.tokens / answer.params,
        "device": answer.device.name,
        "bytes_per_parameter": {name: state.bytes_per_parameter for name, state in STATES.items()},
        "formulas": {formula.name: vars(formula) for formula in answer.formulas},
        "remarks": list(answer.remarks),
        "source": {"peak": answer.device.source, "date": answer.device.date},
    }
