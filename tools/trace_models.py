"""Trace every model of the zoo on fake tensors, run it for real, and write docs/traced_models.md.

``python tools/trace_models.py [NAME ...]`` (about two minutes); with names only those are compared, and printed.
The models stand in tests/trace/zoo_transformers.py, zoo_torch.py and zoo_own_code.py, the witnesses in zoo_compared.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "trace"), str(ROOT / "tools" / "published")]

import torch  # noqa: E402
from tables import Page, Table, markdown  # noqa: E402
from zoo_compared import BEYOND, LIMITS, PRECISIONS, ZOO, Comparison, built, compare, kept_by, traced  # noqa: E402
from zoo_reasons import REASONS, keys_of  # noqa: E402

HEAD = """\
# Traced models: fake tensors and real runs

Written by `python tools/trace_models.py` on {today}: torch {torch}, transformers {transformers}, peft {peft};
kernels for {cpu}, one thread. {count} small models of {kinds} kinds; of each one training step in the steady state,
with its optimizer, as `tl.trace` (`tl.trace_step` for two optimizers) accounts for it on fake tensors, and as it runs.

Witnesses, none of which is ours: `torch.utils.flop_counter.FlopCounterMode` over the real step for FLOPs; the
allocator's own events, as torch's profiler records them, for the peak and for what is *kept*: bytes live where backward
begins, on top of parameters, buffers, optimizer states and batch. *Saved* are the bytes that
`torch.autograd.graph.saved_tensors_hooks` sees, distinct pieces of memory; the rest of kept is what Python still holds
there: the loss, inputs of checkpointed blocks, what a function keeps in its context. Of the two backward passes of
`gan`, kept is what autograd saves for both, and the two losses.

Limits that a test holds every row to: peak and kept within {fp32} of the real run's in fp32, {bf16} under bf16
autocast; FLOPs equal for every operator, but where a reason is given.
"""
FLOPS = """
## FLOPs

Matmuls, convolutions and attention of the whole step. Both precisions have the same.
Model by model: {flops}. Where they differ, by operator:

"""
REST = """
## Memory

Model by model in fp32 and under bf16 autocast: {memory}.

What is left of kept: a Python number in an operation becomes a tensor of 8 bytes below the dispatcher, which autograd
may save; a test holds each difference to be a few of those. What is left of peaks in bf16 is memory that oneDNN takes
inside its kernels: transposed matrices, and sums, which are known for processors without bf16 instructions.

## What cannot be followed to the end

The trace says so: it is partial, or lists what it does not count.

"""


def page(compared: Sequence[Comparison], today: str) -> Page:
    """docs/traced_models.md, of comparisons of every model in every precision."""
    first = [each for each in compared if each.precision == "fp32"]
    cpu = torch.backends.cpu.get_cpu_capability()
    cpu += "" if torch.cpu._is_avx512_bf16_supported() else " without bf16"
    text = HEAD.format(
        today=today, torch=torch.__version__.partition("+")[0], transformers=version("transformers"),
        peft=version("peft"), cpu=cpu, count=len(first),
        kinds=len({each.specimen.kind for each in first}), **{name: f"{limit:.1%}" for name, limit in LIMITS.items()},
    )  # fmt: skip
    flops = Table("traced_flops", FLOPS_HEADER, [flops_row(each) for each in first])
    rows = [(precision, *memory_row(c)) for precision in PRECISIONS for c in compared if c.precision == precision]
    memory = Table("traced_memory", ("precision", *MEMORY_HEADER), rows)
    reasons = "".join(f"- **{key}**. {why}\n" for key, why in REASONS.items())
    text += FLOPS.format(flops=flops.link) + reasons + REST.format(memory=memory.link)
    text += markdown(("model", "kind", "what the trace says"), map(beyond_row, BEYOND))
    return Page("traced_models", text, (flops, memory))


FLOPS_HEADER = ("model", "kind", "parameters", "FLOPs", "FlopCounterMode", "ratio", "why")
MEMORY_HEADER = (
    "model",
    "peak, traced",
    "peak, real",
    "difference %",
    "kept, traced",
    "kept, real",
    "difference %",
    "saved",
)


def flops_row(c: Comparison) -> Sequence[str]:
    theirs = sum(c.truth.flops.values())
    counts = (f"{c.ledger.parameters:,}", f"{c.ledger.matmul_flops:,}", f"{theirs:,}")
    return c.specimen.name, c.specimen.kind, *counts, f"{c.ledger.matmul_flops / theirs:.4f}", ", ".join(keys_of(c))


def memory_row(c: Comparison) -> Sequence[str]:
    peak = (f"{c.ledger.peak().nbytes:,}", f"{c.truth.peak:,}", f"{c.peak_error:+.3%}")
    kept = (f"{kept_by(c.ledger):,}", f"{c.truth.kept:,}", f"{c.kept_error:+.3%}")
    return c.specimen.name, *peak, *kept, f"{c.truth.saved:,}"


def beyond_row(specimen: object) -> Sequence[str]:
    ledger = traced(built(specimen), None)  # type: ignore[arg-type]
    said = [ledger.partial] if ledger.partial else []
    said += [f"uncounted: {count} x {name}" for name, count in ledger.uncounted]
    return specimen.name, specimen.kind, "; ".join(said)  # type: ignore[attr-defined]


def main() -> None:
    """Write the page, or print the rows of the named models."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(each.name for each in ZOO))
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = args.names or [each.name for each in ZOO]
    compared = []
    for name in names:
        for precision in PRECISIONS:
            compared.append(compare(name, precision))
            print(precision, *memory_row(compared[-1]), sep="  ", file=sys.stderr, flush=True)
    if not args.names:
        page(compared, date.today().isoformat()).write()


if __name__ == "__main__":
    main()
