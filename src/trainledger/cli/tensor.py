"""A tensor such as "float32[4,8]", and what operations such as transpose and "view(32)" make of it.

Alone: bytes in every unit, strides, and what one operation on each element costs. With operations, as one would write
them behind the tensor in torch: shape, strides, offset and storage after each, which is a view, which copies how many
bytes, which fails and what works in its place. transpose:0,1 is short for "transpose(0,1)", "[:,1]" picks a part;
view and reshape alone flatten.
"""

from __future__ import annotations

import argparse
import sys

from trainledger.cli.arguments import add_json, error_json, print_json
from trainledger.report import tensors as report
from trainledger.report.show import show
from trainledger.spec.problem import InvalidInput
from trainledger.tensors.chain import chain, places, read_index
from trainledger.tensors.tensor import read_tensor


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tensor", help='a format and a shape, such as "float32[4,8]"')
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help='such as transpose:0,1 or "view(32)"')
    parser.add_argument("--at", metavar="INDEX", help="where the element of this index lies, such as 1,2")
    parser.add_argument("--draw", action="store_true", help="draw the storage after each step, not only after the last")
    add_json(parser)
    # Operations may stand behind a flag, as in tensor T --at 1,2 transpose.
    parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]


def execute(args: argparse.Namespace) -> int:
    one = read_tensor(args.tensor)
    if not args.operations and args.at is None and not args.draw:
        show(report.tensor(one), as_json=args.json)
        return 0
    chained = chain(one, args.operations)
    index = None if args.at is None else read_index(args.at)
    found = [] if index is None else places(chained, index)
    document = report.chain(one, chained, index or (), found, draw=args.draw)
    if chained.failure is None:
        show(document, as_json=args.json)
        return 0
    failure = InvalidInput([chained.failure])
    if args.json:
        print(chained.failure, file=sys.stderr)
        print_json({**document.data(), **error_json(failure)})
        return 2
    show(document)
    print()
    sys.stdout.flush()  # the steps before the failure are printed before it
    raise failure
