"""The model that Megatron-LM's arguments describe, as the fields of a ``[model]`` section."""

from __future__ import annotations

import re
from typing import Any

from trainledger.spec.convert.megatron.arguments import Reading

# Vocabularies of tokenizers that are known by their type; files are never opened.
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
# Of SentencePiece and Hugging Face models by a part of their name.
_NAMED = {
    "nemotron_2_256k": 256000, "llama-3": 128256, "llama3": 128256, "mixtral": 32000, "mistral-7b": 32000,
    "deepseek-v3": 128815, "deepseek-ai/deepseek-v3": 128815, "qwen3": 151669, "qwen2": 151665,
}  # fmt: skip
_LIST = re.compile(r"\(?\[(\d)\]\*(\d+)\+\[(\d)\]\*(\d+)\)?")


def model_of(read: Reading, tensor: int) -> dict[str, Any]:
    """The ``[model]`` section: sizes, norms, positions, attention and MLP."""
    width, layers = read.count("hidden-size"), read.count("num-layers")
    heads = read.count("num-attention-heads")
    for name, value in (("hidden-size", width), ("num-layers", layers), ("num-attention-heads", heads)):
        if value is None and not any(each.field == f"--{name}" for each in read.problems):
            read.refuse(name, None, "is missing, and Megatron-LM has no default for it")
    width, layers, heads = width or 1, layers or 1, heads or 1
    length = read.count("max-position-embeddings") or read.count("seq-length") or 1
    biased = not read.flag("disable-bias-linear")
    vocabulary, multiple = _vocabulary(read, tensor)
    root = read.text("normalization", "LayerNorm") == "RMSNorm"
    section: dict[str, Any] = {
        "name": "megatron",
        "vocab_size": vocabulary,
        "vocab_multiple": multiple,
        "d_model": width,
        "n_layers": layers,
        "max_seq_len": max(length, read.count("seq-length") or 1),
        "tie_embeddings": not read.flag("untie-embeddings-and-output-weights"),
        "norm": {"kind": "rmsnorm"} if root else {"kind": "layernorm", "bias": True},
        "attention": _attention(read, width, heads, biased),
        "positions": _positions(read, width, heads),
        "feed_forward": _feed_forward(read, width, layers, biased),
    }
    modules = read.count("mtp-num-layers", at_least=0)
    if modules:
        section["n_mtp_layers"] = modules
    return section


def _vocabulary(read: Reading, tensor: int) -> tuple[int, int]:
    """Tokens, and the multiple to which Megatron-LM pads them: --make-vocab-size-divisible-by for each tensor rank."""
    padded = read.count("padded-vocab-size")
    if padded is not None:
        return padded, 1
    multiple = (read.count("make-vocab-size-divisible-by", 128) or 1) * tensor
    given = read.count("vocab-size")
    kind, named = read.text("tokenizer-type", "GPT2BPETokenizer"), (read.given("tokenizer-model") or "").lower()
    if given is not None:
        return given, multiple
    known = _VOCABULARIES.get(str(kind)) or next((count for name, count in _NAMED.items() if name in named), None)
    if known is None:
        rule = "names a tokenizer whose file is not opened here; say how many tokens it has"
        read.refuse("tokenizer-type", kind, rule, "--set model.vocab_size=32000")
        return 1, 1
    if kind in _VOCABULARIES:
        read.notes.append(f"the tokenizer's file is not opened: assuming the {known:,} tokens of {kind}")
    else:
        read.notes.append(f"the tokenizer's file is not opened: assuming {known:,} tokens by its name")
    return known, multiple


def _attention(read: Reading, width: int, heads: int, biased: bool) -> dict[str, Any]:
    if read.flag("multi-latent-attention"):
        return {
            "kind": "latent", "n_heads": heads, "q_rank": read.count("q-lora-rank"),
            "kv_rank": read.count("kv-lora-rank", 32), "nope_head_dim": read.count("qk-head-dim", 128),
            "rope_head_dim": read.count("qk-pos-emb-head-dim", 64), "v_head_dim": read.count("v-head-dim", 128),
        }  # fmt: skip
    section: dict[str, Any] = {"n_heads": heads}
    groups = read.count("num-query-groups")
    if read.flag("group-query-attention") and groups:
        section["n_kv_heads"] = groups
    channels = read.count("kv-channels")
    if channels and channels * heads != width:
        section["head_dim"] = channels
    if biased or read.flag("add-qkv-bias"):
        section |= {"bias": True, "output_bias": biased}
    if read.flag("qk-layernorm"):
        section["qk_norm"] = "head"
    window = read.arguments.given.get("window-size")
    if window is not None:
        read.asked.add("window-size")
        found = re.findall(r"\d+", " ".join((window,) if isinstance(window, str) else window))
        if found and 0 < int(found[0]) < 10**9:
            section["window"] = int(found[0]) + 1  # Megatron-LM counts those before a token
    return section


def _positions(read: Reading, width: int, heads: int) -> dict[str, Any]:
    latent = read.flag("multi-latent-attention")
    kind = read.text("position-embedding-type", "rope" if latent else "learned_absolute")
    if read.flag("use-rotary-position-embeddings") or latent:
        kind = "rope"
    if kind == "none" or read.flag("no-position-embedding"):
        return {"kind": "none"}
    if kind == "learned_absolute":
        return {"kind": "learned"}
    if kind not in ("rope", "yarn"):
        read.refuse("position-embedding-type", kind, "is not accounted for", "rope")
    section: dict[str, Any] = {"kind": "rope", "theta": read.number("rotary-base", 10000.0)}
    share = read.number("rotary-percent", 1.0) or 1.0
    channels = read.count("kv-channels") or max(2, width // heads)
    if share != 1.0 and not latent:
        section["dim"] = max(2, int(channels * share) // 2 * 2)
    if read.flag("rotary-interleaved"):
        section["interleaved"] = True
    if read.flag("use-rope-scaling"):
        section["scaling"] = {"kind": "llama3", "factor": read.number("rope-scaling-factor", 8.0)}
    return section


def _feed_forward(read: Reading, width: int, layers: int, biased: bool) -> dict[str, Any]:
    gated = read.flag("swiglu")
    inner = read.count("ffn-hidden-size")
    if inner is None:
        inner = int(4 * width * 2 / 3 / 64) * 64 if gated else 4 * width
        read.supplied["ffn-hidden-size"] = inner
    section: dict[str, Any] = {"d_ff": max(1, inner), "activation": _activation(read, gated, biased), "gated": gated}
    if biased:
        section["bias"] = True
    experts = read.count("num-experts")
    return section if not experts or experts == 1 else section | _experts(read, inner, experts, layers)


def _activation(read: Reading, gated: bool, biased: bool) -> str:
    """SwiGLU, squared ReLU or GELU, which is the tanh form where it is fused with the bias (fused_bias_gelu.py)."""
    fused = not read.flag("no-bias-gelu-fusion") and biased
    if gated:
        return "silu"
    if read.flag("squared-relu"):
        return "relu2"
    if read.flag("quick-geglu"):
        read.refuse("quick-geglu", "true", "is not accounted for", "--swiglu")
    return "gelu_tanh" if fused or read.flag("openai-gelu") else "gelu"


def _experts(read: Reading, inner: int, experts: int, layers: int) -> dict[str, Any]:
    width = read.count("moe-ffn-hidden-size", inner) or inner
    shared = read.count("moe-shared-expert-intermediate-size", at_least=0) or 0
    section: dict[str, Any] = {
        "kind": "experts", "n_experts": experts, "per_token": read.count("moe-router-topk", 2),
        "expert_d_ff": width,
    }  # fmt: skip
    if shared:
        section["n_shared"] = max(1, shared // width)
        if shared % width:
            section["shared_d_ff"] = shared
    if read.flag("moe-shared-expert-gate"):
        section["shared_gate"] = True
    section |= _layers_with_experts(read, layers)
    router: dict[str, Any] = {"scores": read.text("moe-router-score-function", "softmax")}
    if router["scores"] == "softmax" and not read.flag("moe-router-pre-softmax"):
        router["scores"] = "softmax-of-chosen"
    if router["scores"] == "softmax":
        router["normalize"] = False
    if (factor := read.number("moe-router-topk-scaling-factor")) is not None:
        router["scale"] = factor
    if read.flag("moe-router-enable-expert-bias"):
        router["correction"] = True
    groups = read.count("moe-router-num-groups")
    if groups and groups > 1:
        router |= {"groups": groups, "top_groups": read.count("moe-router-group-topk", 1)}
    return section | {"router": router}


def _layers_with_experts(read: Reading, layers: int) -> dict[str, Any]:
    """Which layers have experts: every n-th, or all but some at the beginning."""
    said = read.text("moe-layer-freq", "1") or "1"
    if said.isdecimal():
        every = int(said)
        return {} if every <= 1 else {"every": every}
    found = _LIST.fullmatch(said.replace(" ", ""))
    if found and found[1] == "0" and found[3] == "1" and int(found[2]) + int(found[4]) == layers:
        return {"n_dense_layers": int(found[2])}
    read.refuse("moe-layer-freq", said, f"must be a number, or ([0]*n+[1]*m) with n + m = {layers} layers", 1)
    return {}
