"""The compute-optimal model and data for a budget, by every published law; and what the budget really pays for.

The budget is one of --flops, --device-hours, --days with --count, or --money with --price. With devices and days the
rule's model gets a shape, a layout that fits and a predicted speed, and the rule goes on with that.
"""

from __future__ import annotations

import argparse
from typing import Any

from trainledger.api.optimal import optimal
from trainledger.cli.arguments import add_json, add_plot, check_plot_of, while_waiting
from trainledger.report.optimal import document
from trainledger.report.show import show
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.runfile import value_of

_FIELDS = {
    "cluster.device": "device", "cluster.count": "count", "cluster.price_per_device_hour": "price",
    "recipe.seq_len": "seq_len",
}  # fmt: skip


class _Set(argparse.Action):
    """``--set SECTION.FIELD=VALUE``, as other verbs have it, for the fields that an option stands for here too."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        field, _, text = values.partition("=")
        if option := _FIELDS.get(field.strip()):
            setattr(namespace, option, value_of(None, text.strip()) if text.strip() else None)
            return
        rule = f"is no field of a budget, which has {', '.join(_FIELDS)}; layout and recipe are found here"
        names = {each.partition(".")[2]: each for each in _FIELDS}
        near = nearest_text(field.strip().rpartition(".")[2], names)
        problem = Problem("--set", values, rule, names[near] if near else None)
        namespace.problems = [*getattr(namespace, "problems", []), problem]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flops", metavar="C", help='training FLOPs, such as "6e23"')
    parser.add_argument("--device", help="a device of the catalog")
    parser.add_argument("--count", help="how many devices")
    parser.add_argument("--days", help='days, or a time such as "2w"')
    parser.add_argument("--device-hours", metavar="H", help="hours of one device, summed over all")
    parser.add_argument("--money", help="money, in the currency of --price")
    parser.add_argument("--price", help="money for an hour of one device")
    parser.add_argument(
        "--set", action=_Set, dest=argparse.SUPPRESS, metavar="SECTION.FIELD=VALUE",
        help=f"an option by its name in a run file: {', '.join(_FIELDS)}",
    )  # fmt: skip
    parser.add_argument("--mfu", default="0.5", help="share of the peak that the rule supposes (0.5)")
    parser.add_argument("--dtype", help="whose peak counts; bf16 where the device has it, else fp16")
    parser.add_argument("--law", metavar="NAME", help="the law to follow (rule-20); --json lists them all")
    parser.add_argument("--loss-law", metavar="NAME", help="the law that says losses (besiroglu)")
    off = parser.add_mutually_exclusive_group()
    off.add_argument("--params", metavar="N", help='what a model of this size gives instead, such as "8B"')
    off.add_argument("--ratio", metavar="K", help="what so many tokens per parameter give instead")
    parser.add_argument("--inference", metavar="TOKENS", help='tokens that will be served, such as "2T"')
    parser.add_argument("--unique", metavar="TOKENS", help="tokens that exist; more are repetitions")
    parser.add_argument(
        "--family", default="llama-3-8b", metavar="MODEL",
        help="model of the catalog whose shape is scaled (llama-3-8b); none = the rules alone",
    )  # fmt: skip
    parser.add_argument("--seq-len", metavar="T", help="tokens of a sequence (4096)")
    parser.add_argument(
        "--tokens-per-step", metavar="N",
        help="about so many tokens in a step (4M; 16M from 1e24 FLOP, fewer below 7e21)",
    )  # fmt: skip
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    check_plot_of(args)
    named = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
    if named["family"] == "none":
        named["family"] = None
    say = while_waiting()
    answer = optimal(**named, say=say)
    say("")
    show(document(answer), as_json=args.json, plot=args.plot)
    return 0
