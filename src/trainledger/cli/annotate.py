"""Run a script under the tracer and print what each of its lines costs.

SCRIPT is run as Python would run it, with the ARGS behind its name. What it prints goes to standard error, the
annotation to standard output. Options of trainledger stand before the script's name.
Exit code 1 where the script failed, 130 where it was interrupted: what ran until then is reported all the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace

from trainledger.cli import DONE, FAILED, INTERRUPTED
from trainledger.cli.arguments import add_count, add_json, add_output
from trainledger.report.annotate import document
from trainledger.report.html import page, parts
from trainledger.report.show import show
from trainledger.spec.plain import check_target, replace_file
from trainledger.spec.problem import printable

NARROWEST = 60


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [options] SCRIPT [ARGS ...]"
    parser.add_argument("script", metavar="SCRIPT", help="the file to run, such as train.py")
    given = parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="what the script is to be given"
    )  # fmt: skip
    given.required = False  # else an error of SCRIPT's absence asks for ARGS too
    parser.add_argument("--fake", action="store_true", help="on fake tensors: of any size, nothing is computed")
    parser.add_argument(
        "--device", metavar="cuda", help="let a script for one GPU run without any: its tensors pass for the GPU's"
    )
    add_count(parser, "--steps", metavar="N", help="stop after N optimizer steps")
    parser.add_argument(
        "--files", action="append", default=[], metavar="GLOB",
        help="whose lines are shown, besides the script's; may be repeated (else all modules in its directory)",
    )  # fmt: skip
    parser.add_argument("--shapes", action="store_true", help="also the shapes and strides that each line makes")
    parser.add_argument("--per-run", action="store_true", help="divide by how often each line ran")
    parser.add_argument("--busy", action="store_true", help="only lines that do something to tensors")
    add_count(
        parser, "--width", least=NARROWEST, metavar="N", help="characters to a line (the terminal's, or 80)"
    )  # fmt: skip
    add_output(parser, "--html", suffix=".html", metavar="FILE", help="also write the annotation as a page")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    if args.html is not None:
        check_target(args.html, "--html")
    from trainledger.annotate.annotate import annotate
    from trainledger.annotate.script import compiled

    compiled(args.script)  # what is wrong with its name or its text is told before anything else happens
    with _output_aside():
        told = annotate(
            args.script, args.args, fake=args.fake, device=args.device, files=args.files, steps=args.steps,
            shapes=args.shapes,
        )  # fmt: skip
    told = replace(told, notes=(*told.notes, *_misplaced(args.args, told.outcome)))
    if args.html is not None:
        whole = told.document()
        replace_file(args.html, page(whole.title, parts(whole), {}).encode())
        print(printable(f"wrote {args.html}"), file=sys.stderr)
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = args.width or max(NARROWEST, shutil.get_terminal_size((80, 24)).columns if is_known else 80)
    show(document(told, busy=args.busy, per_run=args.per_run), as_json=args.json, width=width)
    return {"failed": FAILED, "interrupted": INTERRUPTED}.get(told.outcome, DONE)


def _misplaced(given: Sequence[str], outcome: str) -> Iterator[str]:
    """What to try where a script failed that was given options of trainledger's, behind its name."""
    if outcome != "failed":
        return
    parser = argparse.ArgumentParser(add_help=False)
    configure(parser)
    ours = {each for action in parser._actions for each in action.option_strings}
    found = list(dict.fromkeys(each.partition("=")[0] for each in given if each.partition("=")[0] in ours))
    if found:
        them = "it" if len(found) == 1 else "them"
        yield (
            f"{', '.join(found)} came after the script's name and went to the script; for trainledger's own put "
            f"{them} before it: trainledger annotate [options] SCRIPT [ARGS ...]"
        )


@contextmanager
def _output_aside() -> Iterator[None]:
    """Let what a script prints go to standard error, also what its libraries and processes print."""
    own = -1
    with suppress(OSError, ValueError, AttributeError):
        if sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2:
            sys.stdout.flush()
            own = os.dup(1)
            os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if own >= 0:
            os.dup2(own, 1)
            os.close(own)
