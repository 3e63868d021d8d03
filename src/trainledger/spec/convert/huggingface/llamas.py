"""The families in Llama's line: RMSNorm, gated MLP, rotary positions. Keys and defaults are those of transformers 5."""

from __future__ import annotations

from typing import Any

from trainledger.spec.convert.huggingface.family import Family, Names, pairs
from trainledger.spec.convert.huggingface.reading import Reading, read_skipped_rope
from trainledger.spec.layers import kind_of
from trainledger.spec.model import ModelSpec

HEAD = {"attention.head_dim": "head_dim"}
BIAS = {"attention.bias": "attention_bias"}
BIASES = BIAS | {"feed_forward.bias": "mlp_bias"}
ROTARY = Family(
    keys=pairs(
        "vocab_size=vocab_size d_model=hidden_size n_layers=num_hidden_layers "
        "attention.n_heads=num_attention_heads attention.n_kv_heads=num_key_value_heads "
        "feed_forward.d_ff=intermediate_size max_seq_len=max_position_embeddings norm.eps=rms_norm_eps "
        "feed_forward.activation=hidden_act tie_embeddings=tie_word_embeddings"
    ),
    always={"norm": "rmsnorm", "feed_forward.gated": True, "positions": "rope"},
    defaults={
        "attention.n_kv_heads": None,
        "attention.head_dim": None,
        "norm.eps": 1e-6,
        "feed_forward.activation": "silu",
        "attention.bias": False,
        "feed_forward.bias": False,
        "tie_embeddings": False,
    },
)


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


def _write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    return {"no_rope_layers": [int(kind_of(spec, each).rotary) for each in range(spec.n_layers)]}


def _read_cohere2(reading: Reading) -> None:
    if reading.fields.get("attention.window") is None:
        reading.refuse("sliding_window", None, "is missing; without local layers no layer would have positions", 4096)
    reading.fields["positions.skip_every"] = reading.fields.get("attention.global_every")


_GEMMA = ROTARY.like(
    "gemma",
    keys=HEAD | BIAS,
    always={"norm.plus_one": True},
    defaults={
        "attention.n_kv_heads": 16,
        "attention.head_dim": 256,
        "feed_forward.activation": "gelu_tanh",
        "tie_embeddings": True,
    },
    # Published files say gelu and mean its tanh form, which transformers takes.
    activations=dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu"), "gelu_tanh"),
    allowed={"hidden_activation": (None, "gelu_pytorch_tanh", "gelu")},
    read=_scaled_embedding,
)
_GEMMA2 = _GEMMA.like(
    "gemma2",
    keys=pairs(
        "feed_forward.activation=hidden_activation logit_softcap=final_logit_softcapping "
        "attention.softcap=attn_logit_softcapping"
    ),
    always={"norm_place": "sandwich"},
    defaults={"attention.n_kv_heads": 4, "logit_softcap": 30.0, "attention.softcap": 50.0},
    allowed={"hidden_activation": None, "hidden_act": (None, "gelu_pytorch_tanh", "gelu")},
    ignored=("sliding_window_size",),  # the first name of sliding_window
    reads=("query_pre_attn_scalar",),
    windows=2,
    window=4096,
    divides=True,
    read=_read_gemma2,
    write=_write_gemma2,
)
_GEMMA3 = _GEMMA2.like(
    "gemma3_text",
    "Gemma3ForCausalLM",
    always={"attention.qk_norm": "head"},
    defaults={
        "logit_softcap": None,
        "attention.softcap": None,
        "vocab_size": 262208,  # this and the next two are absent from published files
        "attention.n_heads": 8,
        "max_seq_len": 131072,
    },
    ignored=("_sliding_window_pattern",),
    reads=("query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq"),
    windows=6,
    theta=1e6,
    local_theta=10000.0,
)
_OLMO2 = ROTARY.like(
    "olmo2",
    keys=BIAS,
    always={"norm_place": "post", "attention.qk_norm": "width"},
    defaults={"norm.eps": 1e-5},
    allowed={"clip_qkv": (None,)},
)
_GLM = ROTARY.like(
    "glm",
    keys=HEAD | BIAS,
    always={"positions.interleaved": True, "attention.output_bias": False},
    defaults={"attention.n_kv_heads": 2, "attention.head_dim": 128, "attention.bias": True, "norm.eps": 1.5625e-7},
    rotated=0.5,
    names=Names(gate_up="mlp.gate_up_proj"),
)
_COHERE = ROTARY.like(
    "cohere",
    keys=BIAS | {"norm.eps": "layer_norm_eps", "logit_scale": "logit_scale"},
    always={"norm": "layernorm", "block": "parallel", "positions.interleaved": True},
    defaults={"norm.eps": 1e-5, "logit_scale": 0.0625, "tie_embeddings": True},
    # One norm for each head, with a weight of its own: more parameters than any of ours.
    allowed={"use_qk_norm": (False, None)},
    theta=500000.0,
)
LLAMAS = (
    ROTARY.like(
        "llama",
        "LlamaForCausalLM",
        "LLaMAForCausalLM",
        keys=HEAD | BIASES,
        allowed={"rope_interleaved": (False, None)},
        divides=True,
    ),
    ROTARY.like("mistral", keys=HEAD, defaults={"attention.n_kv_heads": 8}, windows="all", window=4096),
    ROTARY.like(
        "qwen2",
        keys=HEAD,
        always={"attention.bias": True, "attention.output_bias": False},
        defaults={"attention.n_kv_heads": 32},
        windows="after",
        window=4096,
        flagged=True,
    ),
    ROTARY.like(
        "qwen3",
        keys=HEAD | BIAS,
        always={"attention.qk_norm": "head"},
        defaults={"attention.n_kv_heads": 32, "attention.head_dim": 128},
        windows="after",
        window=4096,
        flagged=True,
    ),
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    ROTARY.like(
        "phi3",
        keys=HEAD,
        defaults={"norm.eps": 1e-5},
        allowed={"attention_bias": (False,)},
        reads=("original_max_position_embeddings",),
        windows="all",
        rotated=1.0,
        names=Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    ),
    ROTARY.like(
        "olmo",
        "OlmoForCausalLM",
        "OLMoForCausalLM",
        keys=HEAD | BIAS | {"norm.eps": None},
        always={"norm": "layernorm", "norm.weight": False, "norm.eps": 1e-5},
        allowed={"clip_qkv": (None,)},
    ),
    _OLMO2,
    _OLMO2.like("olmo3", allowed={"clip_qkv": None}, windows=4, window=4096, theta=500000.0, local_theta=500000.0),
    ROTARY.like(
        "smollm3",
        "SmolLM3ForCausalLM",
        keys=HEAD | BIASES,
        defaults={"attention.n_kv_heads": 4, "tie_embeddings": True},
        ignored=("max_window_layers",),
        reads=("no_rope_layers", "no_rope_layer_interval"),
        theta=2e6,
        read=read_skipped_rope,
        write=_write_smollm3,
    ),
    ROTARY.like(
        "arcee",
        keys=HEAD | BIASES,
        always={"feed_forward.gated": False},
        defaults={"norm.eps": 1e-5, "feed_forward.activation": "relu2"},
        divides=True,
    ),
    ROTARY.like(
        "seed_oss",
        keys=HEAD | BIASES | {"attention.output_bias": "attention_out_bias"},
        defaults={
            "attention.n_kv_heads": 8,
            "attention.head_dim": 128,
            "attention.bias": True,
            "attention.output_bias": False,
        },
        constants={"residual_dropout": 0.0},
    ),
    _GLM,
    _GLM.like(
        "glm4",
        always={"norm_place": "sandwich"},
        names=Names(
            gate_up="mlp.gate_up_proj",
            block=pairs(
                "post_attention_layernorm=post_self_attn_layernorm "
                "pre_feedforward_layernorm=post_attention_layernorm post_feedforward_layernorm=post_mlp_layernorm"
            ),
        ),
    ),
    _COHERE,
    _COHERE.like(
        "cohere2",
        allowed={"order_of_interleaved_layers": ("local_attn_first",)},
        ignored=("head_dim",),  # always width / heads: the key has no effect
        reads=("sliding_window_pattern",),
        windows=4,
        window=4096,
        theta=10000.0,
        read=_read_cohere2,
    ),
)
