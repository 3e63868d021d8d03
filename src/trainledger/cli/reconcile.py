"""Set what was forecast beside what was measured: ratios, where the differences sit, and the unexplained rest."""

from __future__ import annotations

import argparse
import sys

from trainledger.cli.arguments import add_json, add_output
from trainledger.report.html import NO_PLOTLY, plotly_js
from trainledger.report.reconciliation import document, write_html
from trainledger.report.record import read_run
from trainledger.report.show import show
from trainledger.spec.plain import check_target
from trainledger.spec.problem import InvalidInput, Problem, printable


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the directory of a run")
    add_output(
        parser, "--html", suffix=".html", metavar="OUT.html",
        help="also write one self-contained HTML file with figures",
    )  # fmt: skip
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from pathlib import Path

    if not args.run_dir or not Path(args.run_dir).is_dir():
        rule = "is not a directory; trainledger runs lists those there are"
        raise InvalidInput([Problem("RUN_DIR", args.run_dir, rule)])
    if args.html is not None:
        check_target(args.html, "--html")
    record = read_run(args.run_dir, ledgers=args.html is not None)
    if record.forecast is None and not record.lines:
        problems = [Problem("RUN_DIR", args.run_dir, f"holds no run: {each}") for each in record.missing]
        raise InvalidInput(problems)
    show(document(record), as_json=args.json)
    if args.html is not None:
        write_html(record, args.html)
        print(printable(f"Written to {args.html}" + ("" if plotly_js() else f". {NO_PLOTLY}")), file=sys.stderr)
    return 0
