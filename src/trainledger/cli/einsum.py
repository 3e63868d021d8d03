"""A product of tensors such as "ij,jk->ik" 1024,512 512,256: FLOPs, bytes, the cheapest order, and what bounds it."""

from __future__ import annotations

import argparse

from trainledger.cli.arguments import add_json, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("equation", help='indices of the operands and of the result, such as "ij,jk->ik"')
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="the sizes of each operand, such as 1024,512")
    parser.add_argument("--dtype", default="fp32", help="format of all tensors (fp32)")
    parser.add_argument("--device", help="a device of the catalog, whose peaks bound the time")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger import catalog
    from trainledger.explain.einsum import einsum
    from trainledger.explain.number import known_format
    from trainledger.explain.tensor import read_shape
    from trainledger.report import tensor as report

    shapes = [read_shape(each, f"shape {number}") for number, each in enumerate(args.shapes, start=1)]
    one = einsum(args.equation, shapes, known_format(args.dtype, "--dtype"))
    machine = None if args.device is None else catalog.device(args.device, "--device")
    if args.json:
        print_json(report.einsum_to_json(one, machine))
    else:
        print(report.einsum(one, machine))
    return 0
