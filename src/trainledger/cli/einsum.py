"""A product of tensors such as "ij,jk->ik" 1024,512 512,256: FLOPs, bytes, the cheapest order, and what bounds it.

Indices are letters, or words with spaces as in einops: "batch seq d_model, d_model d_ff -> batch seq d_ff". A pattern
of einops on one tensor, such as "b (h d) t -> b h t d" 2,64,10 h=8, is read too: what it rearranges, repeats or, with
--reduce, reduces, and whether that is a view or a copy.
"""

from __future__ import annotations

import argparse

from trainledger import catalog
from trainledger.cli.arguments import add_json
from trainledger.report import tensors as report
from trainledger.report.show import show
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.tensors.chain import start_of
from trainledger.tensors.einops import is_pattern, read_sizes, rearranged
from trainledger.tensors.einsum import einsum
from trainledger.tensors.number import known_format
from trainledger.tensors.tensor import Tensor, read_shape


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("equation", help='such as "ij,jk->ik", or a pattern of einops such as "b (h d) -> b h d"')
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="of each operand, as 1024,512; or a size, as h=8")
    parser.add_argument("--reduce", metavar="HOW", help="how dims that vanish become one number: mean, sum, max ...")
    parser.add_argument("--dtype", default="fp32", help="format of all tensors (fp32)")
    parser.add_argument("--device", help="a device of the catalog, whose peaks bound the time")
    add_json(parser)
    # Shapes may stand behind a flag.
    parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]


def execute(args: argparse.Namespace) -> int:
    words, sizes = read_sizes(args.shapes)
    shapes = [read_shape(each, f"shape {number}") for number, each in enumerate(words, start=1)]
    dtype = known_format(args.dtype, "--dtype")
    if is_pattern(args.equation, shapes, sizes, args.reduce):
        return _pattern(args, shapes, sizes, dtype)
    one = einsum(args.equation, shapes, dtype)
    machine = None if args.device is None else catalog.device(args.device, "--device")
    show(report.einsum(one, machine), as_json=args.json)
    return 0


def _pattern(args: argparse.Namespace, shapes: list[tuple[int, ...]], sizes: dict[str, int], dtype: str) -> int:
    if args.device is not None:
        rule = "bounds the time of a product; a pattern on one tensor moves bytes and is not timed"
        raise InvalidInput([Problem("--device", args.device, rule)])
    if len(shapes) != 1:
        rule = f"is a pattern on one tensor, and {len(shapes)} shapes are given"
        raise InvalidInput([Problem("equation", args.equation, rule)])
    one = rearranged(start_of(Tensor(dtype, shapes[0])), args.equation, sizes, reduction=args.reduce or "")
    show(report.pattern(one), as_json=args.json)
    return 0
