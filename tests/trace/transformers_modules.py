"""The modules of Hugging Face transformers beside the closed form of the same configuration.

``python tests/trace/transformers_modules.py`` writes docs/transformers.md: what transformers' own code keeps for
backward that ours does not, operation by operation, and why.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.ledger.entry import Ledger
from trainledger.ledger.step import account
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.trace.trace import trace

DOCUMENT = Path(__file__).parents[2] / "docs" / "transformers.md"
BATCH, TOKENS = 2, 32

_NEW = {"vocab_size": 301, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
_GROUPED = {**_NEW, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 301, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    "llama": _GROUPED,
}  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """Why an operation of one place keeps more on one side; ``place`` and ``operation`` are regular expressions."""

    place: str
    operation: str
    why: str


REASONS = (
    Reason(
        "mlp", "mul|tanh|add|pow", "GELU's tanh form written out in seven operations, each of which saves its input"
    ),
)
PLACES = (
    ("norm", r"norm|ln_\d|ln_f|layernorm"),
    ("rotary", r"rotary"),
    ("loss", r"loss"),
    ("head", r"lm_head|embed_out"),
    ("embedding", r"embed|wte|wpe"),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|experts|feed_forward|fc1|fc2|activation_fn"),
)


def place_of(path: str) -> str:
    """Which part of a model a module path belongs to: by its innermost telling name."""
    for part in reversed(path.lower().split(".")):
        for place, names in PLACES:
            if re.search(names, part):
                return place
    return "stream"


@dataclass(frozen=True)
class Row:
    """What one kind of operation in one place keeps: theirs, ours, and why they differ."""

    place: str
    operation: str
    theirs: int
    ours: int
    why: str


@dataclass(frozen=True)
class Comparison:
    """Two ledgers of one configuration: transformers' modules traced, and the closed form."""

    name: str
    theirs: Ledger
    ours: Ledger

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every place and operation whose kept bytes differ."""
        theirs, ours = kept(self.theirs), kept(self.ours)
        keys = [*theirs, *(each for each in ours if each not in theirs)]
        return tuple(
            Row(place, operation, theirs.get((place, operation), 0), ours.get((place, operation), 0),
                why(place, operation))
            for place, operation in keys
            if theirs.get((place, operation), 0) != ours.get((place, operation), 0)
        )  # fmt: skip


def kept(ledger: Ledger) -> dict[tuple[str, str], int]:
    """Kept bytes by place and operation."""
    split: dict[tuple[str, str], int] = {}
    for each in ledger:
        if each.kept:
            key = (place_of(each.path), each.name)
            split[key] = split.get(key, 0) + each.kept * each.times
    return split


def why(place: str, operation: str) -> str:
    """The reason on record for a difference, or nothing."""
    for each in REASONS:
        if re.fullmatch(each.place, place) and re.fullmatch(each.operation, operation):
            return each.why
    return ""


def compare(name: str) -> Comparison:
    """A small model of one type, traced and in closed form: one AdamW step in fp32, fused attention where it has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **CONFIGS[name])
    config.use_cache = False
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config)
        ids, targets = (torch.zeros(BATCH, TOKENS, dtype=torch.int64) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def loss(output: Any) -> torch.Tensor:
            return F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten())

        theirs = trace(model, {"input_ids": ids}, loss=loss, optimizer=optimizer)
    spec = ModelSpec.from_hf(config.to_dict())
    attention = "sdpa" if theirs.by("kind").get("attention") else "math"
    recipe = Recipe(seq_len=TOKENS, global_batch=BATCH, steps=1, grad_clip=None, attention=attention)
    return Comparison(name, theirs, account(Run(model=spec, recipe=recipe)))


def document(compared: list[Comparison]) -> str:
    """docs/transformers.md."""
    return "\n".join(_lines(compared)) + "\n"


def _lines(compared: list[Comparison]) -> Iterator[str]:
    yield "# transformers' modules beside the closed form"
    yield ""
    yield "Written by `python tests/trace/transformers_modules.py`; a test compares it with what it would write today."
    yield f"Small models (3 layers, width 64), {BATCH} sequences of {TOKENS} tokens, fp32, one AdamW step. Parameters and"
    yield "the FLOPs of matmuls and attention are equal as integers for every type. Kept bytes are what the forward saves"
    yield "for its backward."
    yield ""
    yield "| model type | parameters | FLOPs | kept, theirs | kept, ours | peak, theirs | peak, ours |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for each in compared:
        theirs, ours = each.theirs, each.ours
        yield (
            f"| {each.name} | {theirs.parameters:,} | {theirs.matmul_flops:,} | {theirs.kept_nbytes:,}"
            f" | {ours.kept_nbytes:,} | {theirs.peak().nbytes:,} | {ours.peak().nbytes:,} |"
        )
    for each in compared:
        yield ""
        yield f"## {each.name}"
        yield ""
        if not each.rows:
            yield "The same bytes in every place."
            continue
        yield "| where | operation | theirs | ours | difference | why |"
        yield "|---|---|--:|--:|--:|---|"
        for row in each.rows:
            yield (
                f"| {row.place} | {row.operation} | {row.theirs:,} | {row.ours:,} | {row.theirs - row.ours:+,}"
                f" | {row.why} |"
            )


def main() -> None:
    """Write the document."""
    torch.set_num_threads(1)
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document([compare(name) for name in CONFIGS]), encoding="utf-8")
    print(f"wrote {DOCUMENT}", file=sys.stderr)


if __name__ == "__main__":
    main()
