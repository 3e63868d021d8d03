"""A tensor such as "float32[4,8]": bytes in every unit, strides, and what one operation on each element costs."""

from __future__ import annotations

import argparse

from trainledger.cli.arguments import add_json, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tensor", help='a format and a shape, such as "float32[4,8]"')
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.explain.tensor import read_tensor
    from trainledger.report.tensor import tensor, tensor_to_json

    one = read_tensor(args.tensor)
    if args.json:
        print_json(tensor_to_json(one))
    else:
        print(tensor(one))
    return 0
