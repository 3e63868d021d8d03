"""The families in GPT's line: LayerNorm with a bias, plain MLP. Keys and defaults are those of transformers 5."""

from __future__ import annotations

from typing import Any

from trainledger.huggingface.family import WRITTEN, Family
from trainledger.huggingface.reading import Reading
from trainledger.spec.model import ModelSpec

GPT = {"norm": "layernorm", "norm.bias": True, "feed_forward.gated": False}
BIASED = {"attention.bias": True, "feed_forward.bias": True}
_GPT2_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "n_embd",
    "n_layers": "n_layer",
    "attention.n_heads": "n_head",
    "feed_forward.d_ff": "n_inner",
    "max_seq_len": "n_positions",
    "norm.eps": "layer_norm_epsilon",
    "feed_forward.activation": "activation_function",
    "tie_embeddings": "tie_word_embeddings",
}
_GPT2_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "attention.n_heads": "num_attention_heads",
    "feed_forward.d_ff": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "feed_forward.activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
}
_NEW = WRITTEN | {"gelu_tanh": "gelu_new"}


def four_times(reading: Reading) -> None:
    """The inner width where no key gives one."""
    if reading.fields.get("feed_forward.d_ff") is None and reading.has("d_model"):
        reading.fields["feed_forward.d_ff"] = 4 * reading.fields["d_model"]


def _no_dropout(*keys: str) -> dict[str, Any]:
    """Absent ones default to 0.1."""
    return dict.fromkeys(keys, 0.0)


def _read_gpt_neox(reading: Reading) -> None:
    parallel = reading.flag("use_parallel_residual", True)
    reading.fields["block"] = "parallel-two-norms" if parallel else "serial"


def _read_opt(reading: Reading) -> None:
    bias, weight = reading.flag("enable_bias", True), reading.flag("layer_norm_elementwise_affine", True)
    reading.fields |= {"attention.bias": bias, "feed_forward.bias": bias, "norm.weight": weight, "norm.bias": weight}
    reading.fields["norm_place"] = "pre" if reading.flag("do_layer_norm_before", True) else "after-add"
    width = reading.whole("word_embed_proj_dim", reading.fields.get("d_model") or 0, 1)
    if reading.has("d_model") and width != reading.fields["d_model"]:
        rule = "narrower embeddings with a projection of their own (OPT-350m) are not accounted for"
        reading.refuse("word_embed_proj_dim", width, rule, reading.fields["d_model"])


def _write_opt(spec: ModelSpec) -> dict[str, Any]:
    return {
        "enable_bias": spec.attention.bias,
        "layer_norm_elementwise_affine": spec.norm.weight,
        "do_layer_norm_before": spec.norm_place == "pre",
        "word_embed_proj_dim": spec.d_model,
    } | _no_dropout("dropout")


def _read_phi(reading: Reading) -> None:
    if reading.flag("qk_layernorm", False):
        reading.fields["attention.qk_norm"] = "head"


def _read_starcoder2(reading: Reading) -> None:
    bias = reading.flag("use_bias", True)
    reading.fields |= {"attention.bias": bias, "feed_forward.bias": bias}


def _read_stablelm(reading: Reading) -> None:
    if reading.fields.get("attention.bias"):
        reading.fields["attention.output_bias"] = False
    reading.fields["block"] = "parallel" if reading.flag("use_parallel_residual", False) else "serial"


GPT2 = Family(
    model_type="gpt2",
    divides=True,
    architectures=("GPT2LMHeadModel",),
    keys=_GPT2_KEYS,
    always=GPT | BIASED | {"positions": "learned"},
    written=_NEW,
    defaults={
        "feed_forward.d_ff": None,
        "norm.eps": 1e-5,
        "feed_forward.activation": "gelu_tanh",
        "tie_embeddings": True,
    },
    allowed={
        "reorder_and_upcast_attn": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
    },
    ignored=frozenset({"n_ctx"}),
    aliases=_GPT2_ALIASES,
    theta=None,
    read=four_times,
    write=lambda spec: _no_dropout("attn_pdrop", "embd_pdrop", "resid_pdrop"),
)
GPTJ = Family(
    model_type="gptj",
    divides=True,
    architectures=("GPTJForCausalLM",),
    keys=_GPT2_KEYS | {"positions.dim": "rotary_dim"},
    always=GPT
    | {
        "feed_forward.bias": True,
        "head_bias": True,
        "block": "parallel",
        "positions": "rope",
        "positions.interleaved": True,
    },
    written=_NEW,
    defaults=dict(GPT2.defaults) | {"positions.dim": 64, "tie_embeddings": False},
    allowed={"scale_attn_weights": (True,), "rotary": (True,)},
    ignored=frozenset({"n_ctx"}),
    aliases=_GPT2_ALIASES,
    theta=None,
    read=four_times,
    write=lambda spec: {"rotary_dim": spec.rotary_size},
)
GPT_NEOX = Family(
    model_type="gpt_neox",
    divides=True,
    architectures=("GPTNeoXForCausalLM",),
    keys=_KEYS | {"norm.eps": "layer_norm_eps", "attention.bias": "attention_bias"},
    always=GPT | {"feed_forward.bias": True, "positions": "rope"},
    defaults={"norm.eps": 1e-5, "feed_forward.activation": "gelu", "tie_embeddings": False, "attention.bias": True},
    reads=frozenset({"use_parallel_residual"}),
    turned=0.25,
    rope_aliases={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    read=_read_gpt_neox,
    write=lambda spec: {"use_parallel_residual": spec.block != "serial"},
)
OPT = Family(
    model_type="opt",
    divides=True,
    architectures=("OPTForCausalLM",),
    keys={name: key for name, key in _KEYS.items() if name != "feed_forward.activation"}
    | {"feed_forward.d_ff": "ffn_dim", "feed_forward.activation": "activation_function"},
    always=GPT | {"norm.eps": 1e-5, "positions": "learned", "positions.extra_rows": 2},
    defaults={"feed_forward.activation": "relu", "tie_embeddings": True},
    allowed={"_remove_final_layer_norm": (False,), "layerdrop": (0.0, 0)},
    reads=frozenset({"do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "word_embed_proj_dim"}),
    theta=None,
    read=_read_opt,
    write=_write_opt,
)
PHI = Family(
    model_type="phi",
    architectures=("PhiForCausalLM",),
    keys=_KEYS | {"norm.eps": "layer_norm_eps", "attention.n_kv_heads": "num_key_value_heads"},
    always=GPT | BIASED | {"head_bias": True, "block": "parallel", "positions": "rope"},
    written=_NEW,
    defaults={
        "attention.n_kv_heads": None,
        "norm.eps": 1e-5,
        "feed_forward.activation": "gelu_tanh",
        "tie_embeddings": False,
    },
    reads=frozenset({"qk_layernorm"}),
    turned=0.5,
    read=_read_phi,
    write=lambda spec: {"qk_layernorm": spec.attention.qk_norm == "head"},
)
STARCODER2 = Family(
    model_type="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    keys=_KEYS
    | {"norm.eps": "norm_epsilon", "attention.n_kv_heads": "num_key_value_heads", "attention.head_dim": "head_dim"},
    always=GPT | {"positions": "rope"},
    defaults={
        "attention.n_kv_heads": 2,
        "attention.head_dim": None,
        "norm.eps": 1e-5,
        "feed_forward.activation": "gelu_tanh",
        "tie_embeddings": True,
    },
    allowed={"mlp_type": ("default",), "norm_type": ("layer_norm",), "layer_norm_epsilon": (1e-5,)},
    ignored=frozenset({"activation_function"}),
    reads=frozenset({"use_bias"}),
    windows="all",
    read=_read_starcoder2,
    write=lambda spec: {"use_bias": spec.attention.bias},
)
STABLELM = Family(
    model_type="stablelm",
    architectures=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    keys=_KEYS
    | {"norm.eps": "layer_norm_eps", "attention.n_kv_heads": "num_key_value_heads", "attention.bias": "use_qkv_bias"},
    always={"norm": "layernorm", "norm.bias": True, "feed_forward.gated": True, "positions": "rope"},
    defaults={"attention.n_kv_heads": 32, "norm.eps": 1e-5, "feed_forward.activation": "silu", "tie_embeddings": False}
    | {"attention.bias": False},
    # One norm for each head, with a weight of its own: more parameters than any of ours.
    allowed={"qk_layernorm": (False,)},
    reads=frozenset({"use_parallel_residual"}),
    turned=0.25,
    read=_read_stablelm,
    write=lambda spec: {"use_parallel_residual": spec.block != "serial"},
)
GPTS = (GPT2, GPTJ, GPT_NEOX, OPT, PHI, STARCODER2, STABLELM)
