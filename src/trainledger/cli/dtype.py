"""A number in every floating-point format: what it becomes, how far off that is, its bits, and the step to the next.

Without a number, the table of formats: range, smallest values, spacing, bytes, and what each suits. A format in place
of the number, or before it, shows that format only: fp16, fp8 (both of them), int (integers), mxfp4 (its elements).
"""

from __future__ import annotations

import argparse

from trainledger.cli.arguments import add_json
from trainledger.report import tensors as report
from trainledger.report.show import show
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.tensors.number import SHOWN, formats_named, known_format, read_number


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="VALUE", help="a number such as 1e-8, a format such as fp8, or both"
    )
    parser.add_argument("--format", metavar="NAME", help="this format only, such as bf16 (all)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    words = [each for each in args.words if not formats_named(each)]
    numbers = [read_number(each) for each in words]
    if len(numbers) > 1:
        raise InvalidInput([Problem("value", words[1], "is a second number; one is shown at a time", words[0])])
    number = numbers[0] if numbers else None
    if args.format is not None and not formats_named(args.format):
        known_format(args.format, "--format", floating=True)
    named = [each for each in args.words if each not in words] + [args.format] * (args.format is not None)
    chosen = dict.fromkeys(each for name in named for each in formats_named(name)) or dict.fromkeys(SHOWN.values())
    show(report.formats(list(chosen), number, named), as_json=args.json)
    return 0
