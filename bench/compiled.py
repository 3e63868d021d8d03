"""Predicted and measured memory of compiled steps: ``python bench/compiled.py [--width 256] [--write]``.

Each model is compiled for real and runs three steps on this CPU (a C++ compiler is needed, and some minutes); the
trace says the same without running it. ``--write`` puts the table into docs/compiled.md.
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
HEAD = """# Compiled steps: what the trace says and what the run does

Written by `python bench/compiled.py --write`, with torch {torch}{transformers} on {threads} thread of a CPU.

Models {width} wide of {layers} layers, {sequences} sequences of {tokens} tokens, one AdamW step of steady state.
*model*: `torch.compile(model)` with its loss; *blocks*: each block by `block.compile()`, everything else eager.
*kept* is what a forward leaves allocated for its backward, *peak* the most bytes live at once, both of the real
compiled run by the allocator's own events; the ratios are predicted over measured, and the prediction runs nothing.
*eager* is what the trace says of the same step without compile, over the compiled run's peak: how far off a prediction
is that knows nothing of the compiler. *closed* is the closed form of the same run (`trainledger plan`), kept and peak
over the measured ones: it follows the partitioner's rules for the blocks of our models, without torch.

| model | compiled | vocabulary | format | checkpointed | kept | ratio | peak | ratio | eager | closed kept | and peak |
|---|---|--:|---|---|--:|--:|--:|--:|--:|--:|--:|
"""
FOOT = """
What is left of a difference of the peak is memory that libraries take inside of a kernel, as oneDNN's scratch for bf16
products and the buffers of the attention kernel: what the trace knows of it is what it knows of eager steps.

The closed form takes what a block keeps from the rules of AOTAutograd's partitioner
(`ledger.memory.compiled.partition`), and gives a pointwise result memory only where a product, a collective, the
backward or something outside of the block reads it. It is held against the trace for 20 kinds of blocks in fp32, bf16
and bf16-mixed, checkpointed and not
(`tests/trace/test_compiled_closed_form.py`).

Selective: the checkpoint stands inside of the compiled block, in the engine as in torchtitan, and the partitioner makes
every operation again that the policy does not keep: nothing is left to choose. Kept is what backward, or what it makes
again, reads of the block's input and of the outputs that the policy names. Unlike in eager blocks the last product is
not among them, nor is a copy of a matrix in low precision. Beside it stand the generator's state on a CPU (5,056
bytes) where attention runs again, and a seed (8 bytes) for each dropout. On tensor ranks the last product stays, if the
policy keeps it: the sum over the ranks counts as needed until backward is put in order, which drops it. What runs again
does so when it is first needed, and pointwise operations that read the same become one kernel, whose results all exist
at once (`compiled.schedule`). Kept bytes are equal in 18 kinds of blocks and 9 policies, in three formats; the peak is
within 1 % for Llama's blocks, within 2 % for GPT-2's, within 5 % for the others but one
(`tests/trace/test_compiled_policies.py`).

The loss: `recipe.loss = "compiled"` is `torch.compile` of the cross entropy alone, beside compiled or eager blocks, as
torchtitan's `compile.components` has it. Of a row's logits the closed form keeps them in their own format and two fp32
numbers, the largest of them and the logarithm of the sum; in backward their gradient comes beside them, in the same
format: 4 bytes of a 16-bit logit where the eager loss holds 12. Kept bytes and peak are those of the trace to 8 bytes,
for vocabularies of 61 to 50,257 in fp32, bf16 and bf16-mixed, with and without upcast, with the compiler's kernels for
CPUs and those for GPUs, and what a real forward leaves allocated is as much (`tests/trace/test_compiled_loss.py`); so
are a rank's of FSDP2, DDP and hybrid sharding, and the last stage of a pipeline (`tests/train/test_compiled_ranks.py`).
Pointwise FLOPs are those of the definition, the softmax made again in backward included. Over tensor ranks, whose loss
sums over columns, it is refused. Losses of multi-token prediction stay eager, and so does a metered or rehearsed step.

In 8 bits (`tests/trace/test_compiled_float8.py`, on ranks `tests/train/test_compiled_float8_ranks.py`), a scale per
tensor or per row, autocast or gathered by FSDP2: nothing in 8 bits is kept, nor any scale. Backward casts again what it
needs, of weights, of the products' own outputs and of the stream, as its casts look for the largest magnitude as
torchao's do; eager blocks keep the input of every product. Kept bytes are equal with no, selective and full
checkpointing, and what a real forward leaves allocated is as much. On a CPU Inductor gives memory to what it computes
of a sigmoid or a tanh and reads twice, as every cast reads what it casts: there the closed form's peak is up to 12 %
low for two small blocks. With the compiler's rules for GPUs, traced on a CPU, the peak is within 1 %, under FSDP2
2.5 %, and 4 % where blocks run again as a whole. `train` refuses compiled blocks in 8 bits, and no GPU's
allocator was asked.

Ranks (`tests/train/test_compiled_ranks.py`, 43 layouts and 18 stages of pipelines, against the trace of the rank): kept
bytes are equal under FSDP2, hybrid sharding, DDP, and tensor ranks with and without sequence parallelism, whose
collectives no kernel goes over; so are, to the byte, kept bytes and peak of two real FSDP2 processes, in fp32, fully
checkpointed of bf16 shards, and selectively. The peak is within 1 % (0.5 % for stages of a pipeline; 1.2 % for FSDP2
with GPT-2's blocks and a policy), and where blocks run again within 2 % in a pipeline and 4 % over tensor ranks: the
engine runs a fully checkpointed, compiled block again to its end, which the closed form does not. ZeRO 1 and 2 have no
run of their own: their blocks keep what those of replicas and of sharded parameters keep.

With experts, latent attention, context ranks, `sequence_gather = "again"`, 8-bit precision with a scale per block, over
tensor ranks or with weights cast once a step, gathered precision of parameters that are whole, segments of sharded
parameters, with other ways to save activations than full, segments and selective, and with policies that keep what the
compiler takes apart (`silu`, `gelu`, `_softmax`, `native_layer_norm`, `native_dropout`), memory is told as that of
eager blocks, and a note of the plan says so. Known to be further off than 5 %: layer norm without weights in fp32 (kept
1.14), the clamped swish checkpointed (peak 0.92), parallel blocks and attention dropout checkpointed in fp32 (peak 1.05
and 1.08), as Inductor orders operations otherwise; selectively checkpointed GELU blocks with norms on the sums (peak
0.90 to 0.94), whose kernel on a CPU writes the tanh for another.
"""


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
    transformers = sys.modules.get("transformers")
    rows = []
    for case in cases(**sizes):
        rows.append(row(case, measured(case), traced(case), traced(replace(case, compiled="nothing"))))
        print(rows[-1], flush=True)
        transformers = sys.modules.get("transformers")
    if options.write:
        version = "" if transformers is None else f", transformers {transformers.__version__}"
        head = HEAD.format(torch=torch.__version__, transformers=version, threads=1, **sizes)
        DOCUMENT.write_text(head + "\n".join(rows) + "\n" + FOOT, encoding="utf-8")


if __name__ == "__main__":
    main()
