"""Predicted and measured memory of compiled steps: ``python tools/compiled.py [--width 256] [--write]``.

Each model is compiled for real and runs three steps on this CPU (a C++ compiler is needed, and some minutes); the
trace says the same without running it. ``--write`` replaces the table of docs/compiled.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "trace"))

from compiled_cases import Case, Measured, closed_form, measured, traced  # noqa: E402

from trainledger.ledger.ledger import Ledger  # noqa: E402

DOCUMENT = HERE.parent / "docs" / "compiled.md"
AGAIN: tuple[dict[str, bool], ...] = ({}, {"checkpointing": True}, {"checkpointing": True, "selective": True})
TABLE = "| model | compiled |"  # how the first line of the page's table begins


def cases(width: int, layers: int, sequences: int, tokens: int) -> list[Case]:
    """Our model and one of transformers, whole and by blocks, small and large vocabulary, both formats."""
    size = Case(width=width, layers=layers, sequences=sequences, tokens=tokens)
    return [
        replace(size, model=model, compiled=compiled, vocab_size=vocab, precision=precision, **again)
        for model in ("llama", "hf-llama")
        for compiled in ("model", "blocks")
        for vocab in (256, 8192)
        for precision in ("fp32", "bf16")
        for again in AGAIN
        if (model, compiled) == ("llama", "blocks") or not again.get("selective")
    ]


def row(case: Case, run: Measured, predicted: Ledger, eager: Ledger) -> str:
    """One line of the table."""
    kept, peak = predicted.kept_nbytes, predicted.peak().nbytes
    closed = closed_form(case)
    cells = [
        case.model, case.compiled, f"{case.vocab_size:,}", case.precision,
        "selective" if case.selective else "yes" if case.checkpointing else "no",
        f"{run.kept:,}", f"{kept / run.kept:.4f}", f"{run.peak:,}", f"{peak / run.peak:.4f}",
        f"{eager.peak().nbytes / run.peak:.3f}",
        "–" if closed is None else f"{closed.kept_nbytes / run.kept:.3f}",
        "–" if closed is None else f"{closed.peak().nbytes / run.peak:.3f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 256), ("layers", 4), ("sequences", 8), ("tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {name: getattr(options, name) for name in ("width", "layers", "sequences", "tokens")}
    rows = []
    for case in cases(**sizes):
        rows.append(row(case, measured(case), traced(case), traced(replace(case, compiled="nothing"))))
        print(rows[-1], flush=True)
    if options.write:
        page = DOCUMENT.read_text(encoding="utf-8").splitlines()
        begin = next(at for at, line in enumerate(page) if line.startswith(TABLE)) + 2
        end = next(at for at in range(begin, len(page)) if not page[at].startswith("|"))
        DOCUMENT.write_text("\n".join([*page[:begin], *rows, *page[end:]]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
