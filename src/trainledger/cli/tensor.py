"""A tensor such as "float32[4,8]", and what operations such as transpose and "view(32)" make of it.

Alone: bytes in every unit, strides, and what one operation on each element costs. With operations, as one would write
them behind the tensor in torch: shape, strides, offset and storage after each, which is a view, which copies how many
bytes, which fails and what works in its place. transpose:0,1 is short for "transpose(0,1)", "[:,1]" picks a part;
view and reshape alone flatten.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import add_json, error_json, print_json
from trainledger.report import tensors as report
from trainledger.spec.problem import InvalidInput
from trainledger.tensors.chain import chain, places, read_index
from trainledger.tensors.tensor import read_tensor

if TYPE_CHECKING:
    from trainledger.tensors.strided import Chain


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
    told = report.tensor_to_json(one) if args.json else None
    if args.operations or args.at is not None or args.draw:
        return _chain(args, told, "" if args.json else report.tensor(one))
    if told is not None:
        print_json(told)
    else:
        print(report.tensor(one))
    return 0


def _chain(args: argparse.Namespace, told: dict[str, Any] | None, alone: str) -> int:
    chained = chain(read_tensor(args.tensor), args.operations)
    index = None if args.at is None else read_index(args.at)
    found = None if index is None else places(chained, index)
    if told is not None:
        told |= report.chain_to_json(chained, found)
        problem = chained.failure
        if problem is not None:
            told |= error_json(InvalidInput([problem]))
            print(problem, file=sys.stderr)
        print_json(told)
        return 0 if chained.failure is None else 2
    parts = [report.chain(chained) if args.operations else alone]
    if index is not None and found is not None:
        parts.append(report.elements(chained, index, found))
    parts += _drawings(chained, every=args.draw)
    print("\n\n".join(parts))
    if chained.failure is not None:
        print()
        sys.stdout.flush()  # what came before the failure is told before it
        raise InvalidInput([chained.failure])
    return 0


def _drawings(chained: Chain, every: bool) -> list[str]:
    steps = [("at first", chained.start), *((each.word, each.result) for each in chained.steps)]
    if every:
        return [report.drawing(one, word) for word, one in steps]
    word, one = steps[-1]
    drawn = report.drawing(one, f"after {word}")
    return [] if len(steps) == 1 or one.contiguous or drawn.startswith("No drawing") else [drawn]
