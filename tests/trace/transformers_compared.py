"""Small models of Hugging Face transformers, their steps traced, beside the closed form of the same configuration."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import timeline
from trainledger.ledger.step import account
from trainledger.spec.convert.huggingface import from_config
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.trace.step import trace

WINDOW = 8

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
        **GROUPED, "sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
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


Batch = dict[str, torch.Tensor]
Split = dict[str, int]  # kept bytes by operation
SAME = {"_grouped_mm": "grouped_mm", "_safe_softmax": "_softmax"}  # the same computation by another name


@dataclass(frozen=True)
class Comparison:
    """Two ledgers of one configuration: transformers' modules traced, and the closed form."""

    kind: str
    B: int
    T: int
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
        return self.peaks_at(self.theirs) == self.peaks_at(self.ours)

    def peaks_at(self, ledger: Ledger) -> str:
        """Place and operation that run when most bytes are live."""
        entry = ledger.peak().entry
        return f"{place_of(self.kind, entry.path, entry.name)} `{SAME.get(entry.name, entry.name)}`"

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
                name = SAME.get(each.name, each.name)
                here[name] = here.get(name, 0) + each.kept * each.times
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

    def beyond(self, mine: Split, other: Split) -> str:
        """The operations of one side that keep another number of bytes on the other."""
        return ", ".join(f"{name} {nbytes:,}" for name, nbytes in mine.items() if nbytes != other.get(name)) or "–"


def config_of(kind: str, **keys: Any) -> Any:
    """A small configuration of one model type, with everything else as transformers has it."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **copy.deepcopy(CONFIGS[kind] | keys))
    config.use_cache = False
    return config


def other_sizes(kind: str) -> dict[str, Any]:
    """More layers and heads and another inner width, in this type's words: equal sizes make other formulas equal."""
    keys = CONFIGS[kind]
    more = {name: keys[name] + 2 for name in ("num_hidden_layers", "n_layer", "n_layers") if name in keys}
    more |= {name: 8 for name in ("num_attention_heads", "n_head", "n_heads") if name in keys}
    more |= {"intermediate_size": 96} if "intermediate_size" in keys else {}
    return more | ({"num_key_value_heads": 8, "v_head_dim": 28} if "kv_lora_rank" in keys else {})


@contextmanager
def step_of(config: Any, B: int = 2, T: int = 32) -> Iterator[tuple[Any, Batch, Any, torch.optim.Optimizer]]:
    """Model, batch, loss and optimizer of one AdamW step in fp32, real or fake as the mode around has it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    ids, targets = (torch.randint(config.vocab_size, (B, T)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss(output: Any) -> torch.Tensor:
        return F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten())

    yield model, {"input_ids": ids}, loss, optimizer


def traced(config: Any, B: int = 2, T: int = 32) -> Ledger:
    """The step on fake tensors."""
    with FakeTensorMode(), step_of(config, B, T) as (model, batch, loss, optimizer):
        return trace(model, batch, loss=loss, optimizer=optimizer)


@cache
def compare(kind: str, B: int = 2, T: int = 32, *, other: bool = False) -> Comparison:
    """A small model of one type, traced and in closed form, with attention as transformers chose it."""
    config = config_of(kind, **(other_sizes(kind) if other else {}))
    theirs = traced(config, B, T)
    spec = from_config(config.to_dict())
    attention = "sdpa" if theirs.by("kind").get("attention") else "math"
    recipe = Recipe(seq_len=T, global_batch=B, steps=1, grad_clip=None, attention=attention)
    activation = getattr(config, "activation_function", None) or getattr(config, "hidden_act", "")
    return Comparison(kind, B, T, spec, activation, theirs, account(Run(model=spec, recipe=recipe)))
