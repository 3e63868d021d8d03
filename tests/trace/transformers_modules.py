"""The modules of Hugging Face transformers beside the closed form of the same configuration.

``python tests/trace/transformers_modules.py`` writes docs/transformers.md: what transformers' own code keeps for
backward that ours does not, place by place, and why, to the byte.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.ledger.entry import Ledger
from trainledger.ledger.step import account
from trainledger.ledger.timeline import timeline
from trainledger.spec.huggingface import from_config
from trainledger.spec.layers import kind_of, rotary_modules
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.trace.trace import trace

DOCUMENT = Path(__file__).parents[2] / "docs" / "transformers.md"
B, T = 2, 32
WINDOW = 8
NUMBER = 4  # bytes of fp32
INDEX = 8  # bytes of int64

SIZES = {
    "vocab_size": 301, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
LAYERS = {**SIZES, "num_hidden_layers": 3, "intermediate_size": 160}
GROUPED = {**LAYERS, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 24}
WINDOWS = {**HEADS, "num_hidden_layers": 4, "sliding_window": WINDOW}
LATENT = {
    **LAYERS, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 40, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
SPARSE = {"num_local_experts": 4, "num_experts_per_tok": 2}
OLDER = {**SIZES, "n_layer": 3, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
HIDDEN_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": OLDER,
    "gptj": {**OLDER, "rotary_dim": 8},
    "gpt_neox": LAYERS,
    "opt": {**SIZES, "num_hidden_layers": 3, "ffn_dim": 160, "word_embed_proj_dim": 64, "dropout": 0.0},
    "bloom": {"vocab_size": 301, "hidden_size": 64, "n_head": 4, "n_layer": 3, **HIDDEN_DROPOUT},
    "falcon": {**SIZES, "num_hidden_layers": 3, **HIDDEN_DROPOUT},
    "mpt": {"vocab_size": 301, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
    "llama": GROUPED,
    "mistral": {**HEADS, "sliding_window": WINDOW},
    "qwen2": GROUPED,
    "qwen3": HEADS,
    "gemma": HEADS,
    "gemma2": WINDOWS,
    "gemma3_text": {**WINDOWS, "num_hidden_layers": 7},
    "phi": {**GROUPED, "partial_rotary_factor": 0.5, **NO_DROPOUT},
    "phi3": {**GROUPED, "sliding_window": WINDOW, **NO_DROPOUT},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "starcoder2": {
        **GROUPED, "sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0,
    },
    "smollm3": {**GROUPED, "num_hidden_layers": 5},
    "mixtral": {**GROUPED, **SPARSE},
    "qwen3_moe": {
        **HEADS, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "decoder_sparse_step": 2,
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0},
    "gpt_oss": {**WINDOWS, **SPARSE},
}  # fmt: skip


# Where an operation stands: by the innermost telling name of its module path.
PLACES = (
    ("norm", r"norm|ln_\d|ln_f|layernorm"),
    ("angles", r"rotary"),
    ("mask", r"masks"),
    ("loss", r"loss"),
    ("head", r"lm_head|embed_out"),
    ("embedding", r"embed|wte|wpe"),
    ("attention", r"attn|attention"),
    ("experts", r"experts|router"),
    ("mlp", r"mlp|ffn|feed_forward|fc\d"),
)
# What runs in a module around it: model types, place by name, operation, and where it belongs.
ELSEWHERE = (
    (".*", "attention", "where", "mask"),
    ("mpt", "stream", "_to_copy", "mask"),
    ("bloom|mpt", "attention|mlp", "add", "stream"),
    (".*", "stream", "tanh", "head"),
    (".*", "stream", "mul", "embedding"),
    ("opt", "stream", "relu", "mlp"),
    ("mixtral|qwen3_moe|deepseek.*|gpt_oss", "mlp", ".*", "experts"),
)


def place_of(kind: str, path: str, operation: str) -> str:
    """Which part of a model an operation belongs to."""
    parts = reversed(path.lower().split("."))
    found = next((place for part in parts for place, names in PLACES if re.search(names, part)), "stream")
    for kinds, place, operations, belongs in ELSEWHERE:
        if all(map(re.fullmatch, (kinds, place, operations), (kind, found, operation))):
            return belongs
    return found


Split = dict[str, int]  # kept bytes by operation


@dataclass(frozen=True)
class Comparison:
    """Two ledgers of one configuration: transformers' modules traced, and the closed form."""

    kind: str
    spec: ModelSpec
    activation: str
    theirs: Ledger
    ours: Ledger

    @property
    def fused(self) -> bool:
        """Whether their attention ran in one kernel; ours is told to do as theirs."""
        return bool(self.theirs.by("kind").get("attention"))

    @property
    def kept(self) -> int:
        """Bytes that theirs keeps for backward beyond ours."""
        difference: int = self.theirs.kept_nbytes - self.ours.kept_nbytes
        return difference

    @property
    def resident(self) -> int:
        """Bytes that are there before the step in theirs beyond ours."""
        theirs, ours = (sum(nbytes for _, nbytes in each.resident) for each in (self.theirs, self.ours))
        return theirs - ours

    @property
    def peak(self) -> int:
        """Bytes of their peak beyond ours."""
        difference: int = self.theirs.peak().nbytes - self.ours.peak().nbytes
        return difference

    @property
    def same_place(self) -> bool:
        """Whether both peak while the same operation of the same place runs."""
        theirs, ours = (each.peak().entry for each in (self.theirs, self.ours))
        names = {each.name.removeprefix("_") for each in (theirs, ours)}
        return len(names) == 1 and len({place_of(self.kind, each.path, each.name) for each in (theirs, ours)}) == 1

    def live_at_loss(self, ledger: Ledger) -> int:
        """Live bytes where the backward of the loss begins."""
        return next(each.nbytes for each in timeline(ledger) if each.entry.name == "_log_softmax_backward_data")

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every place whose kept bytes differ."""
        theirs, ours = (self._by_place(each) for each in (self.theirs, self.ours))
        rows = (Row(self, place, theirs.get(place, {}), ours.get(place, {})) for place in {**theirs, **ours})
        return tuple(each for each in rows if each.difference)

    def _by_place(self, ledger: Ledger) -> dict[str, Split]:
        split: dict[str, Split] = {}
        for each in ledger:
            if each.kept:
                here = split.setdefault(place_of(self.kind, each.path, each.name), {})
                here[each.name] = here.get(each.name, 0) + each.kept * each.times
        return split


@dataclass(frozen=True)
class Row:
    """What one place keeps on both sides, by operation."""

    of: Comparison
    place: str
    theirs: Split
    ours: Split

    @property
    def difference(self) -> int:
        return sum(self.theirs.values()) - sum(self.ours.values())

    @property
    def reasons(self) -> tuple[tuple[Reason, int], ...]:
        """Each reason that applies here with the bytes that it explains."""
        found = ((each, each.nbytes(self.of)) for each in REASONS if re.fullmatch(each.place, self.place))
        return tuple((reason, nbytes) for reason, nbytes in found if nbytes)

    def beyond(self, mine: Split, other: Split) -> str:
        """The operations of one side that keep another number of bytes on the other."""
        return ", ".join(f"{name} {nbytes:,}" for name, nbytes in mine.items() if nbytes != other.get(name)) or "–"


@dataclass(frozen=True)
class Reason:
    """Why a place keeps more in transformers, and how many bytes that is, computed from the sizes alone."""

    place: str
    name: str
    why: str
    nbytes: Callable[[Comparison], int]


def angles(c: Comparison) -> int:
    """Cosines and sines for every pair of dims, twice each but where the type has them once."""
    if c.spec.positions != "rope" or c.kind == "gptj":
        return 0
    copies = 1 if c.kind in ("gpt_oss", "deepseek_v2") else 2
    return len(rotary_modules(c.spec)) * copies * T * c.spec.rotary_size * NUMBER


def angles_of_layers(c: Comparison) -> int:
    """Cosines and sines of each sequence in each layer, twice each."""
    return 2 * c.spec.n_layers * B * T * c.spec.rotary_size * NUMBER if c.kind == "gptj" else 0


def windows(c: Comparison) -> int:
    """Layers whose mask a fused kernel is given."""
    return sum(kind_of(c.spec, each).window is not None for each in range(c.spec.n_layers)) if c.fused else 0


def masks_of_layers(c: Comparison) -> int:
    """A mask as numbers for each layer and sequence, where ours has one for all."""
    return (windows(c) * B - 1) * T * T * NUMBER if windows(c) else 0


def repeated_heads(c: Comparison) -> int:
    """Keys and values, for each query head instead of each of their own."""
    return 2 * windows(c) * (c.spec.n_heads - c.spec.kv_heads) * B * T * c.spec.head_size * NUMBER


def copied_mixtures(c: Comparison) -> int:
    """The kernel's output once more."""
    copied = c.kind in ("gpt_neox", "phi", "phi3")
    return c.spec.n_layers * B * T * c.spec.n_heads * c.spec.head_size * NUMBER if copied else 0


def whole_projections(c: Comparison) -> int:
    """Queries and keys as they were before rotation."""
    whole = c.kind == "gpt_neox"
    return 2 * c.spec.n_layers * B * T * c.spec.n_heads * c.spec.head_size * NUMBER if whole else 0


def places_of_highest(c: Comparison) -> int:
    """An index for each query of each head."""
    return c.spec.n_layers * B * c.spec.n_heads * T * INDEX if c.kind == "gpt_oss" else 0


def index_tensors(c: Comparison) -> int:
    """Two numbers in each layer."""
    return 2 * c.spec.n_layers * INDEX if c.kind == "falcon" else 0


def bool_masks(c: Comparison) -> int:
    """One byte for each query and key of each sequence."""
    return B * T * T if c.kind == "mpt" else 0


def written_out_gelu(c: Comparison) -> int:
    """Four tensors as wide as the MLP instead of one."""
    return 3 * c.spec.n_layers * B * T * c.spec.d_ff * NUMBER if c.activation == "gelu_new" else 0


def position_ids(c: Comparison) -> int:
    """The ids of positions, for each sequence where the type makes them so."""
    return {"gpt2": 1, "opt": B}.get(c.kind, 0) * T * INDEX


def routing(c: Comparison) -> int:
    """An index for each route, less the ends of experts as int64 instead of int32."""
    sparse = sum(kind_of(c.spec, each).experts for each in range(c.spec.n_layers))
    if not sparse:
        return 0
    return sparse * (c.spec.experts_per_token * B * T * INDEX - c.spec.n_experts * (INDEX - 4))


REASONS = (
    Reason(
        "angles", "angles made again",
        "Cosines and sines of the rotation are computed in every forward and kept, each of them twice (once in gpt_oss"
        " and, as one complex number, in deepseek_v2). Ours are a table that is made once; it stands under the"
        " resident bytes.",
        angles,
    ),
    Reason(
        "attention", "angles of each layer",
        "gptj looks cosines and sines up by position ids in each layer, repeats them for both dims of a pair and keeps"
        " them for each sequence.",
        angles_of_layers,
    ),
    Reason(
        "attention", "heads repeated",
        "A fused kernel with a mask is given keys and values copied for every query head. Ours lets the kernel share"
        " them.",
        repeated_heads,
    ),
    Reason(
        "mask", "mask of each layer",
        "The mask of a window is true or false for each sequence, and in each layer it is made into numbers for the"
        " kernel, which keeps them. Ours makes numbers once for all layers and sequences.",
        masks_of_layers,
    ),
    Reason(
        "attention", "output copied",
        "Where only a part of each head turns, the parts are joined heads first, the kernel's output takes that order,"
        " and it is copied to tokens first for the projection that follows. Kernel and projection each keep theirs.",
        copied_mixtures,
    ),
    Reason(
        "attention", "whole projection",
        "Values are a view of the one projection of queries, keys and values, so all of it stays; ours projects values"
        " apart.",
        whole_projections,
    ),
    Reason(
        "attention", "places of the highest scores",
        "The highest score is subtracted before softmax, and where it stood is kept for its gradient; softmax does"
        " the same inside, without.",
        places_of_highest,
    ),
    Reason(
        "attention", "numbers as indices",
        "Keys and values are taken out of their projection by [-2] and [-1], which become tensors that are kept.",
        index_tensors,
    ),
    Reason(
        "mask", "mask as bytes",
        "masked_fill keeps its mask, one byte for each pair of tokens of each sequence; adding numbers keeps nothing.",
        bool_masks,
    ),
    Reason(
        "mlp", "GELU written out",
        "GELU's tanh form runs as eight operations, of which four results are kept beside the input; ours is one"
        " kernel that keeps one.",
        written_out_gelu,
    ),
    Reason(
        "stream|embedding", "position ids",
        "Learned positions are looked up by ids, which the lookup keeps; ours takes the first rows of the table.",
        position_ids,
    ),
    Reason(
        "experts", "order of routes",
        "The token of each place is one more index that is kept, as gradients are added up by it; ours goes back by the"
        " inverse order. Where experts end is int32, ours int64.",
        routing,
    ),
)  # fmt: skip


def config_of(kind: str) -> Any:
    """A small configuration of one model type, with everything else as transformers has it."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **copy.deepcopy(CONFIGS[kind]))
    config.use_cache = False
    return config


@contextmanager
def step_of(config: Any) -> Iterator[tuple[Any, dict[str, torch.Tensor], Any, torch.optim.Optimizer]]:
    """Model, batch, loss and optimizer of one AdamW step in fp32, real or fake as the mode around has it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    ids, targets = (torch.randint(config.vocab_size, (B, T)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss(output: Any) -> torch.Tensor:
        return F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten())

    yield model, {"input_ids": ids}, loss, optimizer


def traced(config: Any) -> Ledger:
    """The step on fake tensors."""
    with FakeTensorMode(), step_of(config) as (model, batch, loss, optimizer):
        return trace(model, batch, loss=loss, optimizer=optimizer)


@cache
def compare(kind: str) -> Comparison:
    """A small model of one type, traced and in closed form, with attention as transformers chose it."""
    config = config_of(kind)
    theirs = traced(config)
    spec = from_config(config.to_dict())
    attention = "sdpa" if theirs.by("kind").get("attention") else "math"
    recipe = Recipe(seq_len=T, global_batch=B, steps=1, grad_clip=None, attention=attention)
    activation = getattr(config, "activation_function", None) or getattr(config, "hidden_act", "")
    return Comparison(kind, spec, activation, theirs, account(Run(model=spec, recipe=recipe)))


def document(compared: list[Comparison]) -> str:
    """docs/transformers.md."""
    parts = (_head(compared), _kept(compared), _rows(compared), _reasons(compared), _peaks(compared))
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(compared: list[Comparison]) -> Iterator[str]:
    yield "# The modules of transformers beside the closed form"
    yield ""
    yield "Written by `python tests/trace/transformers_modules.py`; a test compares it with what it would write today."
    yield ""
    yield f"Small models of {len(compared)} types of Hugging Face transformers ({SIZES['hidden_size']} wide, 3 to 7"
    yield f"layers, windows of {WINDOW} tokens where a type has them, everything else as transformers has it), {B} sequences"
    yield f"of {T} tokens, fp32, one AdamW step. *Theirs* is transformers' own modules, traced on fake tensors;"
    yield "that these run the operations of the real modules is a test. *Ours* is the closed form of the same"
    yield "`config.json`. Parameters, the FLOPs of matmuls and those of attention kernels are equal as integers for every"
    yield "type. Differences are bytes that theirs has beyond ours."
    yield ""
    yield "Attention is *fused* where transformers' code reached PyTorch's kernel and *written out* where scores are"
    yield "tensors: by the model's choice (gptj, bloom, mpt, gemma2, gpt_oss), or because the kernel of a CPU refuses"
    yield "key-value heads that are broadcast (falcon) and values that are not as wide as keys (deepseek_v2, deepseek_v3)."
    yield "Ours is told to do the same."


def _kept(compared: list[Comparison]) -> Iterator[str]:
    yield ""
    yield "## Kept for backward"
    yield ""
    yield "| model type | attention | parameters | FLOPs | kept, theirs | kept, ours | difference |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for each in compared:
        theirs, ours = each.theirs, each.ours
        yield (
            f"| {each.kind} | {'fused' if each.fused else 'written out'} | {theirs.parameters:,} |"
            f" {theirs.matmul_flops:,} | {theirs.kept_nbytes:,} | {ours.kept_nbytes:,} | {each.kept:+,} |"
        )


def _rows(compared: list[Comparison]) -> Iterator[str]:
    yield ""
    yield "## Where they differ"
    yield ""
    yield "Of a place, the operations whose kept bytes differ. One tensor may have another name on the other side (the last"
    yield "operation of the rotation is an `add` in theirs, a `cat` in ours), so what counts is the sum of a place. Places"
    yield "with equal sums are left out."
    yield ""
    yield "| model type | place | theirs | ours | difference | why |"
    yield "|---|---|---|---|--:|---|"
    for each in compared:
        for row in each.rows:
            why = ", ".join(f"{reason.name} {nbytes:+,}" for reason, nbytes in row.reasons)
            theirs, ours = row.beyond(row.theirs, row.ours), row.beyond(row.ours, row.theirs)
            yield f"| {each.kind} | {row.place} | {theirs} | {ours} | {row.difference:+,} | {why} |"


def _reasons(compared: list[Comparison]) -> Iterator[str]:
    yield ""
    yield "## Why"
    yield ""
    yield "The bytes of each reason are computed from the sizes of the model; a test holds their sum against each difference."
    yield ""
    for reason in REASONS:
        kinds = ", ".join(each.kind for each in compared if reason.nbytes(each))
        yield f"- **{reason.name}** ({kinds}). {reason.why}"


def _peaks(compared: list[Comparison]) -> Iterator[str]:
    yield ""
    yield "## Peak"
    yield ""
    yield "Where the backward of the loss begins, live bytes differ by what is kept and what is resident, as integers for"
    yield "every type, and so do the peaks where both stand at the same operation; tests hold both. *Resident* are tables of"
    yield "cosines and sines (ours) against inverse frequencies and embedding scales (theirs), and 4 bytes of AdamW's step"
    yield "counter for each weight that one side has in parts. *Later* is how much higher a peak of theirs is that comes"
    yield "later, in the backward of a GELU that is written out in full width (bloom writes out only the backward), bounded by"
    yield "the scratch that is live there."
    yield ""
    yield "| model type | peak, theirs | at | peak, ours | at | difference | kept | resident | later |"
    yield "|---|--:|---|--:|---|--:|--:|--:|--:|"
    for each in compared:
        theirs, ours = each.theirs.peak(), each.ours.peak()
        at = (f"`{peak.entry.name}`" for peak in (theirs, ours))
        yield (
            f"| {each.kind} | {theirs.nbytes:,} | {next(at)} | {ours.nbytes:,} | {next(at)} | {each.peak:+,} |"
            f" {each.kept:+,} | {each.resident:+,} | {each.peak - each.kept - each.resident:+,} |"
        )


def main() -> None:
    """Write the document."""
    torch.set_num_threads(1)
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document([compare(kind) for kind in CONFIGS]), encoding="utf-8")
    print(f"wrote {DOCUMENT}", file=sys.stderr)


if __name__ == "__main__":
    main()
