"""Every published parameter count, exactly: from the fields of the row, from transformers' config, from its modules."""

import csv
import os
import re
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

from trainledger.ledger.model.parameters import parameters
from trainledger.spec.convert.huggingface import from_config
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.rules.model import model_problems

with open(Path(__file__).parents[2] / "tools/published/param_counts.csv", newline="", encoding="utf-8") as file:
    ROWS = {row["model"]: row for row in csv.DictReader(file)}

# How a row's words become fields. What a row does not say (epsilons, rope bases, activations) costs no parameter.
NORMS = {
    "rmsnorm": {"norm": "rmsnorm"},
    "layernorm": {"norm": "layernorm", "norm.bias": True},
    "layernorm(no bias)": {"norm": "layernorm"},
    "nonparam_layernorm": {"norm": "layernorm", "norm.weight": False},
    "layernorm(DeepNorm)": {"norm": "layernorm", "norm.bias": True, "norm_place": "after-add"},
}
BIASES = {
    "none": {},
    "qkv": {"attention.bias": True, "attention.output_bias": False},
    "all": {"attention.bias": True, "feed_forward.bias": True},
}
NOTES = {
    "qk-norm per head": {"attention.qk_norm": "head"},
    "qk-norm full width": {"attention.qk_norm": "width"},
    "qk-norm": {"attention.qk_norm": "head"},
    "post-norm": {"norm_place": "post"},
    "pre+post norms": {"norm_place": "sandwich"},
    "parallel residual": {"block": "parallel-two-norms"},
    "attention sinks": {"attention.sinks": True, "feed_forward.router.bias": True},
    "MLA q_lora=1536 kv_lora=512": {"attention.q_rank": 1536, "attention": "latent", "attention.kv_rank": 512},
    "MLA q_lora=None kv_lora=512": {"attention": "latent", "attention.kv_rank": 512},
}
LATENT_WIDTHS = {
    "qk 128+64, v 128": {"attention.nope_head_dim": 128, "attention.rope_head_dim": 64, "attention.v_head_dim": 128}
}

# Rows whose count is known to the printed precision only: what is printed, and what keeps it from being exact.
PRINTED = {
    "GPT-3 Small": ("125 M", "table D.1 of the paper has whole millions"),
    "GPT-3 Medium": ("356 M", "table D.1 of the paper; table 2.1 says 350 M"),
    "GPT-3 Large": ("760 M", "table D.1 of the paper has whole millions"),
    "GPT-3 XL": ("1320 M", "table D.1 of the paper; its 24 heads of 128 are wider than the model, taken are 16"),
    "GPT-3 6.7B": ("6660 M", "table D.1 of the paper has tens of millions"),
    "GPT-3 175B": ("174600 M", "table D.1 of the paper has hundreds of millions"),
    "BloombergGPT-50B": ("50.6 B", "the paper prints three digits"),
    "GLM-130B": ("1.3e5 M", "about 130 B is all that is printed, and nothing of tied embeddings"),
}
AS_TAKEN = {"GPT-3 XL": dict.fromkeys(("n_heads", "n_kv_heads"), "16")}


def number(text: str) -> int | None:
    return int(text) if text else None


def spec_of(row: dict[str, str]) -> ModelSpec:
    """A row's own fields as a spec."""
    row = row | AS_TAKEN.get(row["model"], {})
    said = {name: value for words in re.split("[;,] ", row["notes"]) for name, value in NOTES.get(words, {}).items()}
    experts = {}
    if row["n_experts"]:
        experts = {
            "feed_forward": "experts",
            "feed_forward.n_experts": number(row["n_experts"]),
            "feed_forward.per_token": number(row["experts_per_token"] or "1"),
            "feed_forward.n_shared": number(row["n_shared_experts"] or "0"),
            "feed_forward.expert_d_ff": number(row["moe_d_ff"]),
            "feed_forward.n_dense_layers": number(row["n_dense_layers"] or "0"),
        }
    latent = row["attention"] == "MLA"
    heads = LATENT_WIDTHS[row["head_dim"]] if latent else {"attention.head_dim": int(row["head_dim"])}
    return from_fields(
        ModelSpec,
        {
            "name": row["model"],
            "vocab_size": int(row["vocab"]),
            "d_model": int(row["d_model"]),
            "n_layers": int(row["n_layers"]),
            "attention.n_heads": int(row["n_heads"]),
            "attention.n_kv_heads": None if latent else int(row["n_kv_heads"]),
            "feed_forward.d_ff": int(row["d_ff"]),
            "max_seq_len": number(row["max_learned_pos"]) or 4096,
            "tie_embeddings": row["tied"] == "1",
            "feed_forward.gated": row["gated"] == "1",
            "positions": row["positional"],
            **NORMS[row["norm"]],
            **BIASES[row["biases"]],
            **experts,
            **heads,
            **said,
        },
    )


EXACT = [name for name, row in ROWS.items() if name not in PRINTED]


@pytest.mark.parametrize("name", EXACT)
def test_the_fields_of_a_row_give_its_count(name: str) -> None:
    row, spec = ROWS[name], spec_of(ROWS[name])
    assert list(model_problems(spec)) == []
    count = parameters(spec)
    assert count.total == int(row["exact_params"])
    assert count.active == int(row["active_params"] or row["exact_params"])
    assert sum(count.by_component.values()) == count.total


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_a_count_known_to_the_printed_precision_is_within_it(name: str) -> None:
    """Prints what is printed, what the fields add up to, and why there is nothing exact to compare with."""
    total = parameters(spec_of(ROWS[name])).total
    printed, why = PRINTED[name]
    print(f"{name}: {printed} printed, {total:,} from the fields; {why}")
    digits, unit = printed.split()
    places = len(digits.split("e")[0].replace(".", "").rstrip("0") or "0")
    assert float(digits) == float(f"{total / {'M': 1e6, 'B': 1e9}[unit]:.{places}g}")


def test_every_row_is_counted() -> None:
    """No row is left out: those without an exact count are checked to what is printed."""
    assert len(EXACT) + len(PRINTED) == len(ROWS) == 73
    assert set(PRINTED) == {name for name, row in ROWS.items() if not row["formula_params"]}


# The model type of transformers for the rows whose names begin so, and its keys beside the sizes.
MODEL_TYPES = {
    "Llama-": "llama", "LLaMA-": "llama", "tiny-llama": "llama", "SmolLM2": "llama", "open_llama": "llama",
    "CodeLlama": "llama", "Mistral": "mistral", "Mixtral": "mixtral", "Qwen2.5": "qwen2", "Qwen3": "qwen3",
    "Gemma-2b": "gemma", "Gemma-7b": "gemma", "Gemma-2-": "gemma2", "Gemma-3-": "gemma3_text", "Phi-3": "phi3",
    "OLMo-7B": "olmo", "OLMo-2": "olmo2", "pythia": "gpt_neox", "gpt2": "gpt2", "Kimi": "deepseek_v3",
    "DeepSeek-V2": "deepseek_v2", "gpt-oss": "gpt_oss", "opt-": "opt", "mpt-": "mpt",
}  # fmt: skip
NOT_IN_TRANSFORMERS = {
    "MPT-bench": "llm-foundry's MPT with learned positions and biases; transformers' MPT has neither",
    "GPT-3": "never published; gpt2 of transformers is the same but for its sparse attention",
    "BloombergGPT": "never published",
    "GLM-130B": "its code is not part of transformers",
    "Qwen-14B": "its code is not part of transformers; qwen2 is its successor",
}
LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
OF_TYPE = {
    "deepseek_v3": {"q_lora_rank": 1536, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1} | LATENT,
    "deepseek_v2": {"q_lora_rank": None} | LATENT,
    "mpt": {"expansion_ratio": 4},
}
WIDTH_KEYS = {"gpt2": "n_inner", "opt": "ffn_dim"}
KNOWN = {name: kind for name in ROWS for start, kind in MODEL_TYPES.items() if name.startswith(start)}


def theirs(name: str) -> Any:
    """The config of transformers with the sizes of a row."""
    from transformers import AutoConfig

    row, kind = ROWS[name], KNOWN[name]
    sizes = {
        "vocab_size": int(row["vocab"]),
        "hidden_size": int(row["d_model"]),
        "num_hidden_layers": int(row["n_layers"]),
        "num_attention_heads": int(row["n_heads"]),
        "tie_word_embeddings": row["tied"] == "1",
    }
    if kind not in ("mpt", "gpt2", "opt", "gpt_neox"):
        sizes["num_key_value_heads"] = int(row["n_kv_heads"])
    if kind != "mpt":
        sizes[WIDTH_KEYS.get(kind, "intermediate_size")] = int(row["d_ff"])
    if row["head_dim"].isdigit() and int(row["head_dim"]) * sizes["num_attention_heads"] != sizes["hidden_size"]:
        sizes["head_dim"] = int(row["head_dim"])
    if row["max_learned_pos"]:
        sizes["max_position_embeddings"] = int(row["max_learned_pos"]) - (2 if kind == "opt" else 0)
    if row["n_experts"]:
        sizes["num_experts_per_tok"] = int(row["experts_per_token"])
        sizes["n_routed_experts" if "deepseek" in kind else "num_local_experts"] = int(row["n_experts"])
    if row["n_shared_experts"]:
        sizes |= {"n_shared_experts": int(row["n_shared_experts"]), "moe_intermediate_size": int(row["moe_d_ff"])}
        sizes["first_k_dense_replace"] = int(row["n_dense_layers"])
    return AutoConfig.for_model(kind, **sizes, **OF_TYPE.get(kind, {}))


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_their_config_gives_the_count(name: str) -> None:
    row = ROWS[name]
    count = parameters(from_config(theirs(name).to_dict()))
    assert count.total == int(row["exact_params"])
    assert count.active == int(row["active_params"] or row["exact_params"])


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_their_modules_have_as_many(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs(name))
    assert sum(each.numel() for each in model.parameters()) == int(ROWS[name]["exact_params"])


def test_rows_that_transformers_cannot_witness_are_reported() -> None:
    """Prints which rows the two tests above leave out, and why."""
    for name in sorted(set(ROWS) - set(KNOWN)):
        why = [reason for start, reason in NOT_IN_TRANSFORMERS.items() if name.startswith(start)]
        assert len(why) == 1, name
        print(f"not compared with transformers: {name}: {why[0]}")
    assert len(KNOWN) == 58
