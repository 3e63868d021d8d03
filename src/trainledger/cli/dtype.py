"""A number in every floating-point format: what it becomes, how far off that is, its bits, and the step to the next.

Without a number, the table of formats: range, smallest values, spacing, bytes, and what each suits.
"""

from __future__ import annotations

import argparse

from trainledger.cli.arguments import add_json, print_json
from trainledger.tensors.number import ALIASES, SHOWN, in_every_format, known_format, read_number


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("value", nargs="?", help="a number such as 1e-8, or a format such as fp16 (all formats)")
    parser.add_argument("--format", metavar="NAME", help="this format only, such as bf16 (all)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.report import number as report

    only = None if args.format is None else known_format(args.format, "--format", floating=True)
    if args.value is not None and _is_format(args.value):
        only = known_format(args.value, floating=True)
    elif args.value is not None:
        number = read_number(args.value)
        rounded = [each for each in in_every_format(number) if only in (None, each.format.name)]
        if args.json:
            print_json({"value": number, "formats": [report.rounded_to_json(each) for each in rounded]})
        else:
            print(report.in_formats(number, rounded))
        return 0
    if args.json:
        print_json({"formats": [report.to_json(each) for name, each in SHOWN.items() if only in (None, name)]})
    else:
        print(report.formats() if only is None else report.one_format(SHOWN[only]))
    return 0


def _is_format(text: str) -> bool:
    plain = text.strip().lower().removeprefix("torch.")
    return ALIASES.get(plain, plain) in SHOWN
