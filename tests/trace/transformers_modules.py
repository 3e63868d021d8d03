"""Write docs/transformers.md: transformers' own modules beside the closed form, and why they keep more.

``python tests/trace/transformers_modules.py``; a test compares the page with what it would write today.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "published"))

from tables import DOCS, Page, Table
from transformers_compared import CONFIGS, SIZES, WINDOW, Comparison, Row, compare
from transformers_reasons import REASONS, reasons_of

PAGE = DOCS / "transformers.md"

HEAD = """\
# The modules of transformers and the closed form

Written by `python tests/trace/transformers_modules.py`; a test compares it with what it would write today.

Small models of {types} types of transformers {versions}: {width} wide, 3 to 7 layers, windows of {window} tokens where
a type has them, everything else as transformers has it; {B} sequences of {T} tokens, fp32, one AdamW step. *Theirs*
is transformers' own modules, traced on fake tensors; a test shows that the modules do the same on real ones. *Ours*
is the closed form of the same `config.json`. Parameters, the FLOPs of matmuls and those of attention kernels are
equal as integers for every type. Differences are bytes that theirs has beyond ours.

Attention is *fused* where transformers' code reaches PyTorch's kernel and *unfused* where scores are tensors: by
the model's choice (gptj, bloom, mpt, gemma2, gpt_oss), or because the kernel of a CPU refuses key-value heads that
are broadcast (falcon) and values that are not as wide as keys (deepseek_v2, deepseek_v3). Ours is set to the same.
"""
KEPT = """
## Kept for backward

Type by type: {link}.
"""
ROWS = """
## Where they differ

Of a place, the operations whose kept bytes differ. One tensor may have another name on the other side (the last
operation of the rotation is an `add` in theirs, a `cat` in ours), so what counts is the sum of a place. Places with
equal sums are left out.

| model types | place | theirs | ours | difference | why |
|---|---|---|---|--:|---|
"""
REASONED = """
## Why

The bytes of each reason are computed from the sizes of the model; a test holds their sum against each difference,
for these models and for others of the same types with more layers and heads, sequences and another length.

"""
PEAKS = """
## Peak

Where the backward of the loss begins, live bytes differ by what is kept and what is resident, as integers for every
type, and so do the peaks of these models where both are at the same operation; tests check both. *Resident* are
tables of cosines and sines (ours) against inverse frequencies and embedding scales (theirs), and 4 bytes of AdamW's
step counter for each weight that one side has in parts. *Later* is how much higher a peak of theirs is that comes
later, in the backward of an unfused GELU of full width (in bloom only the backward is unfused); a test bounds
it by the scratch that is live there.

Type by type: {link}.
"""


def page(compared: Sequence[Comparison]) -> Page:
    """docs/transformers.md and its tables."""
    from transformers import __version__

    versions = f"{__version__} with torch {torch.__version__.partition('+')[0]}"
    sizes = {"width": SIZES["hidden_size"], "window": WINDOW, "B": compared[0].B, "T": compared[0].T}
    header = ("model type", "attention", "parameters", "FLOPs", "kept, theirs", "kept, ours", "difference")
    kept = Table("transformers_kept", header, [_kept(each) for each in compared])
    header = ("model type", "peak, theirs", "at", "peak, ours", "at", "difference", "kept", "resident", "later")
    peaks = Table("transformers_peaks", header, [_peak(each) for each in compared])
    head = HEAD.format(types=len(compared), versions=versions, **sizes)
    lines = "".join(f"{line}\n" for line in _rows(compared))
    why = "".join(f"{line}\n" for line in _reasons(compared))
    text = "".join([head, KEPT.format(link=kept.link), ROWS, lines, REASONED, why, PEAKS.format(link=peaks.link)])
    return Page("transformers", text, (kept, peaks))


def _kept(c: Comparison) -> Sequence[str]:
    theirs = (f"{c.theirs.parameters:,}", f"{c.theirs.matmul_flops:,}")
    kept = (f"{c.theirs.kept_nbytes:,}", f"{c.ours.kept_nbytes:,}", f"{c.kept:+,}")
    return c.kind, "fused" if c.fused else "unfused", *theirs, *kept


def _rows(compared: Sequence[Comparison]) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for each in compared:
        for row in each.rows:
            alike.setdefault(_told(row), []).append(each.kind)
    for told, kinds in alike.items():
        yield f"| {', '.join(kinds)} | {told} |"


def _told(row: Row) -> str:
    why = ", ".join(f"{reason.name} {nbytes:+,}" for reason, nbytes in reasons_of(row))
    theirs, ours = row.beyond(row.theirs, row.ours), row.beyond(row.ours, row.theirs)
    return f"{row.place} | {theirs} | {ours} | {row.difference:+,} | {why}"


def _reasons(compared: Sequence[Comparison]) -> Iterator[str]:
    for reason in REASONS:
        kinds = ", ".join(each.kind for each in compared if reason.nbytes(each))
        yield f"- **{reason.name}** ({kinds}). {reason.why}"


def _peak(c: Comparison) -> Sequence[str]:
    peaks = (cell for each in (c.theirs, c.ours) for cell in (f"{each.peak().nbytes:,}", c.peaks_at(each)))
    later = c.peak - c.kept - c.resident
    return c.kind, *peaks, *(f"{nbytes:+,}" for nbytes in (c.peak, c.kept, c.resident, later))


def main() -> None:
    """Write the page."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    page([compare(kind) for kind in CONFIGS]).write()


if __name__ == "__main__":
    main()
