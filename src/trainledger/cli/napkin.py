"""Days, FLOPs, device-hours and static bytes of a training run from rules of thumb.

Give four of --params, --tokens, --count, --days and --mfu; the fifth is solved for. Exit code 2 where that needs more
than the peak of the devices.
"""

from __future__ import annotations

import argparse
from textwrap import fill

from trainledger.cli.arguments import add_json, print_json
from trainledger.ledger.rules_of_thumb import STATES
from trainledger.plan.napkin import Napkin, headline, napkin, refuse_impossible, to_json
from trainledger.report.table import table
from trainledger.units import format_flops_per_second, format_gigabytes, format_nbytes


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", metavar="N", help='parameters, such as "70B"')
    parser.add_argument("--tokens", metavar="D", help='tokens, such as "15T"; "20x" is 20 per parameter')
    parser.add_argument("--device", required=True, help="a device of the catalog, or this-machine")
    parser.add_argument("--count", help="how many devices")
    parser.add_argument("--days", help='days, or a time such as "2w"')
    parser.add_argument("--mfu", help="share of the peak that is reached, such as 0.5 or 50%%")
    parser.add_argument("--price", help="money per device-hour, for the bill")
    parser.add_argument("--dtype", help="whose peak counts; bf16 where the device has it, else fp16")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    answer = napkin(
        device=args.device, params=args.params, tokens=args.tokens, count=args.count, days=args.days, mfu=args.mfu,
        price=args.price, dtype=args.dtype,
    )  # fmt: skip
    if not args.json:
        print(text(answer), flush=True)
    refuse_impossible(answer)
    if args.json:
        print_json(to_json(answer))
    return 0


def text(answer: Napkin) -> str:
    """The answer for a terminal of 80 columns; that it is impossible comes first."""
    shown = {"flops": "FLOPs", "device_hours": "device-hours", "tokens_per_parameter": "tokens/parameter"}
    rows = [[shown.get(each.name, each.name), each.formula, each.numbers] for each in answer.formulas]
    device = answer.device
    peak = f"{answer.dtype} peak of {device.title}: {format_flops_per_second(answer.peak_flops_per_second)}, dense"
    sources = [fill(f"{what}: {source}", 80, subsequent_indent="  ") for what, source in _sources(answer)]
    impossible = answer.mfu > 1
    parts = [
        "\n".join(fill(each, 80) for each in (*answer.remarks[:impossible], headline(answer))),
        table(["", "formula", "with its numbers"], rows, align="lll"),
        _static(answer),
        "\n".join([fill(peak, 80), *(fill(each, 80) for each in answer.remarks[impossible:])]),
        "\n".join(["Sources", *sources]),
    ]
    return "\n\n".join(parts)


def _static(answer: Napkin) -> str:
    fit = answer.devices_for_static
    rows = []
    for name, recipe in STATES.items():
        terms = " + ".join(str(nbytes) for _, nbytes in recipe.terms)
        devices = "" if fit is None else f"{fit[name]:,}"
        total = format_gigabytes(answer.static_nbytes[name])
        rows.append([recipe.title, f"{terms} = {recipe.bytes_per_parameter}", total, devices])
    memory = answer.device.memory_nbytes
    last = "devices" if memory is None else f"x {format_nbytes(memory)}"
    title = "Static state: parameters, gradients, optimizer; before any activation"
    return title + "\n" + table(["recipe", "bytes/parameter", "N x bytes", last], rows, align="lrrr")


def _sources(answer: Napkin) -> list[tuple[str, str]]:
    named = [(each.formula, each.source) for each in answer.formulas if each.source != "arithmetic"]
    named += [(recipe.title, recipe.source) for recipe in STATES.values()]
    return [*named, (answer.device.title, f"{answer.device.source}, read {answer.device.date}")]
