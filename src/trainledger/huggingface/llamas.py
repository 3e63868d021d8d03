"""The families in Llama's line: RMSNorm, gated MLP, rotary positions. Keys and defaults are those of transformers 5."""

from __future__ import annotations

from typing import Any

from trainledger.huggingface.family import Family
from trainledger.huggingface.layers import read_skipped_rope
from trainledger.huggingface.reading import Reading
from trainledger.spec.layers import kind_of
from trainledger.spec.model import ModelSpec

SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "attention.n_heads": "num_attention_heads",
    "attention.n_kv_heads": "num_key_value_heads",
    "feed_forward.d_ff": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm.eps": "rms_norm_eps",
    "feed_forward.activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
}
HEAD = {"attention.head_dim": "head_dim"}
BIAS = {"attention.bias": "attention_bias"}
MLP_BIAS = {"feed_forward.bias": "mlp_bias"}
ROTARY = {"norm": "rmsnorm", "feed_forward.gated": True, "positions": "rope"}
ABSENT = {
    "attention.n_kv_heads": None,
    "attention.head_dim": None,
    "norm.eps": 1e-6,
    "feed_forward.activation": "silu",
    "attention.bias": False,
    "feed_forward.bias": False,
    "tie_embeddings": False,
}
_GEMMA = ROTARY | {"norm.plus_one": True}
_GEMMA_ACT = dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu"), "gelu_tanh")


def _scaled_embedding(reading: Reading) -> None:
    if reading.has("d_model"):
        reading.fields["embedding_scale"] = float(reading.fields["d_model"]) ** 0.5


def _read_gemma2(reading: Reading) -> None:
    _scaled_embedding(reading)
    scalar = reading.given("query_pre_attn_scalar")
    if scalar is None:
        scalar = 256
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or not 0 < scalar < 1e18:
        reading.refuse("query_pre_attn_scalar", scalar, "must be a number above 0", 256)
    else:
        reading.fields["attention.scale"] = float(scalar) ** -0.5


def _write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    scale = spec.attention.scale
    scalar = float(spec.head_size) if scale is None else 1 / scale / scale
    near = round(scalar) if scalar < 1e18 else scalar
    return {"query_pre_attn_scalar": near if abs(scalar - near) < 1e-9 * scalar else scalar}


def _no_bias_out(reading: Reading) -> None:
    """Biases of the attention are those of queries, keys and values only."""
    if reading.fields.get("attention.bias"):
        reading.fields["attention.output_bias"] = False


def _write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    return {"no_rope_layers": [int(kind_of(spec, each).rotary) for each in range(spec.n_layers)]}


def _read_cohere2(reading: Reading) -> None:
    if reading.fields.get("attention.window") is None:
        reading.refuse("sliding_window", None, "is missing; without local layers no layer would have positions", 4096)
    reading.fields["positions.skip_every"] = reading.fields.get("attention.global_every")


LLAMA = Family(
    model_type="llama",
    divides=True,
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    keys=SIZES | HEAD | BIAS | MLP_BIAS,
    always=ROTARY,
    defaults=ABSENT,
    allowed={"rope_interleaved": (False, None)},
    # pretraining_tp only splits the same products into parts
)
MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    keys=SIZES | HEAD,
    always=ROTARY,
    defaults=ABSENT | {"attention.n_kv_heads": 8},
    windows="all",
    window=4096,
)
QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    keys=SIZES | HEAD,
    always=ROTARY | {"attention.bias": True, "attention.output_bias": False},
    defaults=ABSENT | {"attention.n_kv_heads": 32},
    windows="after",
    window=4096,
    flagged=True,
)
QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    keys=SIZES | HEAD | BIAS,
    always=ROTARY | {"attention.qk_norm": "head"},
    defaults=ABSENT | {"attention.n_kv_heads": 32, "attention.head_dim": 128},
    windows="after",
    window=4096,
    flagged=True,
)
GEMMA = Family(
    model_type="gemma",
    architectures=("GemmaForCausalLM",),
    keys=SIZES | HEAD | BIAS,
    always=_GEMMA,
    # Published files say gelu and mean its tanh form, which transformers takes.
    activations=_GEMMA_ACT,
    defaults=ABSENT
    | {
        "attention.n_kv_heads": 16,
        "attention.head_dim": 256,
        "feed_forward.activation": "gelu_tanh",
        "tie_embeddings": True,
    },
    allowed={"hidden_activation": (None, "gelu_pytorch_tanh", "gelu")},
    read=_scaled_embedding,
)
GEMMA2 = Family(
    model_type="gemma2",
    divides=True,
    architectures=("Gemma2ForCausalLM",),
    keys=SIZES
    | HEAD
    | BIAS
    | {
        "feed_forward.activation": "hidden_activation",
        "logit_softcap": "final_logit_softcapping",
        "attention.softcap": "attn_logit_softcapping",
    },
    always=_GEMMA | {"norm_place": "sandwich"},
    activations=_GEMMA_ACT,
    defaults=ABSENT
    | {
        "attention.n_kv_heads": 4,
        "attention.head_dim": 256,
        "feed_forward.activation": "gelu_tanh",
        "tie_embeddings": True,
    }
    | {"logit_softcap": 30.0, "attention.softcap": 50.0},
    allowed={"hidden_act": (None, "gelu_pytorch_tanh", "gelu")},
    ignored=frozenset({"sliding_window_size"}),  # what sliding_window was called at first
    reads=frozenset({"query_pre_attn_scalar"}),
    windows=2,
    window=4096,
    read=_read_gemma2,
    write=_write_gemma2,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    divides=True,
    architectures=("Gemma3ForCausalLM",),
    keys=GEMMA2.keys,
    always=_GEMMA | {"norm_place": "sandwich", "attention.qk_norm": "head"},
    activations=_GEMMA_ACT,
    defaults=dict(GEMMA2.defaults)
    | {"logit_softcap": None, "attention.softcap": None}
    | {"vocab_size": 262208, "attention.n_heads": 8, "max_seq_len": 131072},  # which published files leave out
    allowed={"hidden_act": (None, "gelu_pytorch_tanh", "gelu")},
    ignored=frozenset({"_sliding_window_pattern"}),
    reads=frozenset({"query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq"}),
    windows=6,
    window=4096,
    theta=1e6,
    local_theta=10000.0,
    read=_read_gemma2,
    write=_write_gemma2,
)
PHI3 = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    keys=SIZES | HEAD,
    always=ROTARY,
    defaults=ABSENT | {"norm.eps": 1e-5},
    allowed={"attention_bias": (False,)},
    reads=frozenset({"original_max_position_embeddings"}),
    windows="all",
    turned=1.0,
)
OLMO = Family(
    model_type="olmo",
    architectures=("OlmoForCausalLM", "OLMoForCausalLM"),
    keys={name: key for name, key in SIZES.items() if name != "norm.eps"} | HEAD | BIAS,
    always={
        "norm": "layernorm",
        "norm.weight": False,
        "norm.eps": 1e-5,
        "feed_forward.gated": True,
        "positions": "rope",
    },
    defaults=ABSENT,
    allowed={"clip_qkv": (None,)},
)
OLMO2 = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    keys=SIZES | BIAS,
    always=ROTARY | {"norm_place": "post", "attention.qk_norm": "width"},
    defaults=ABSENT | {"norm.eps": 1e-5},
    allowed={"clip_qkv": (None,)},
)
OLMO3 = Family(
    model_type="olmo3",
    architectures=("Olmo3ForCausalLM",),
    keys=OLMO2.keys,
    always=OLMO2.always,
    defaults=OLMO2.defaults,
    windows=4,
    window=4096,
    theta=500000.0,
    local_theta=500000.0,
)
SMOLLM3 = Family(
    model_type="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    keys=SIZES | HEAD | BIAS | MLP_BIAS,
    always=ROTARY,
    defaults=ABSENT | {"attention.n_kv_heads": 4, "tie_embeddings": True},
    ignored=frozenset({"max_window_layers"}),
    reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    theta=2e6,
    read=read_skipped_rope,
    write=_write_smollm3,
)
ARCEE = Family(
    model_type="arcee",
    divides=True,
    architectures=("ArceeForCausalLM",),
    keys=SIZES | HEAD | BIAS | MLP_BIAS,
    always=ROTARY | {"feed_forward.gated": False},
    defaults=ABSENT | {"norm.eps": 1e-5, "feed_forward.activation": "relu2"},
)
SEED_OSS = Family(
    model_type="seed_oss",
    architectures=("SeedOssForCausalLM",),
    keys=SIZES | HEAD | BIAS | MLP_BIAS | {"attention.output_bias": "attention_out_bias"},
    always=ROTARY,
    defaults=ABSENT
    | {"attention.n_kv_heads": 8, "attention.head_dim": 128, "attention.bias": True, "attention.output_bias": False},
    write=lambda spec: {"attention_out_bias": spec.output_bias, "attention_dropout": 0.0, "residual_dropout": 0.0},
)
GLM = Family(
    model_type="glm",
    architectures=("GlmForCausalLM",),
    keys=SIZES | HEAD | BIAS,
    always=ROTARY | {"positions.interleaved": True},
    defaults=ABSENT
    | {"attention.n_kv_heads": 2, "attention.head_dim": 128, "attention.bias": True, "norm.eps": 1.5625e-7},
    turned=0.5,
    read=_no_bias_out,
)
GLM4 = Family(
    model_type="glm4",
    architectures=("Glm4ForCausalLM",),
    keys=GLM.keys,
    always={**GLM.always, "norm_place": "sandwich"},
    defaults=GLM.defaults,
    turned=0.5,
    read=_no_bias_out,
)
_COHERE = {name: key for name, key in SIZES.items() if name != "norm.eps"} | {
    "norm.eps": "layer_norm_eps",
    "logit_scale": "logit_scale",
}
COHERE = Family(
    model_type="cohere",
    architectures=("CohereForCausalLM",),
    keys=_COHERE | BIAS,
    always={
        "norm": "layernorm",
        "block": "parallel",
        "feed_forward.gated": True,
        "positions": "rope",
        "positions.interleaved": True,
    },
    defaults=ABSENT | {"norm.eps": 1e-5, "logit_scale": 0.0625, "tie_embeddings": True},
    # One norm for each head, with a weight of its own: more parameters than any of ours.
    allowed={"use_qk_norm": (False, None)},
    theta=500000.0,
)
COHERE2 = Family(
    model_type="cohere2",
    architectures=("Cohere2ForCausalLM",),
    keys=COHERE.keys,
    always=COHERE.always,
    defaults=COHERE.defaults,
    allowed={"use_qk_norm": (False, None), "order_of_interleaved_layers": ("local_attn_first",)},
    ignored=frozenset({"head_dim"}),  # always width / heads, whatever it says
    reads=frozenset({"sliding_window_pattern"}),
    windows=4,
    window=4096,
    read=_read_cohere2,
)
LLAMAS = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO,
    OLMO2,
    OLMO3,
    SMOLLM3,
    ARCEE,
    SEED_OSS,
    GLM,
    GLM4,
    COHERE,
    COHERE2,
)
