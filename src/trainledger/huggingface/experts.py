"""The families with mixtures of experts. Keys and defaults are those of transformers 5."""

from __future__ import annotations

from typing import Any

from trainledger.huggingface.family import Family
from trainledger.huggingface.layers import read_sparse_layers
from trainledger.huggingface.llamas import ABSENT, BIAS, HEAD, MLP_BIAS, ROTARY, SIZES
from trainledger.huggingface.reading import Reading
from trainledger.huggingface.rope import magnitude, rope_parameters
from trainledger.spec.feed_forward import Router
from trainledger.spec.model import ModelSpec

_SPARSE = ROTARY | {"feed_forward": "experts"}
_SPARSE = ROTARY | {"feed_forward": "experts"}
_PER_TOKEN = {"feed_forward.per_token": "num_experts_per_tok"}
_NORMALIZE = {"feed_forward.router.normalize": "norm_topk_prob"}
_LATENT = {
    "attention.kv_rank": "kv_lora_rank",
    "attention.q_rank": "q_lora_rank",
    "attention.nope_head_dim": "qk_nope_head_dim",
    "attention.rope_head_dim": "qk_rope_head_dim",
    "attention.v_head_dim": "v_head_dim",
}
_DEEPSEEK = {
    "feed_forward.n_experts": "n_routed_experts",
    "feed_forward.n_shared": "n_shared_experts",
    "feed_forward.expert_d_ff": "moe_intermediate_size",
    "feed_forward.n_dense_layers": "first_k_dense_replace",
    "feed_forward.router.scale": "routed_scaling_factor",
}
# What the published files say besides, and transformers has no other way for.
_DEEPSEEK_ALLOWED: dict[str, tuple[object, ...]] = {"moe_layer_freq": (1,)}
_DEEPSEEK_IGNORED = frozenset({"aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux"})


def _read_qwen2_moe(reading: Reading) -> None:
    read_sparse_layers(reading)
    shared = reading.whole("shared_expert_intermediate_size", 5632, 1)
    width = reading.fields.get("feed_forward.expert_d_ff")
    if not width:
        return
    if shared % width:
        rule = f"must be a multiple of moe_intermediate_size = {width}"
        reading.refuse("shared_expert_intermediate_size", shared, rule, max(1, round(shared / width)) * width)
    else:
        reading.fields |= {"feed_forward.n_shared": shared // width, "feed_forward.shared_gate": True}


def _write_sparse(spec: ModelSpec) -> dict[str, Any]:
    if spec.experts is None:
        return {}
    if spec.experts is None:
        return {}
    return {"decoder_sparse_step": spec.experts.every, "mlp_only_layers": list(range(spec.experts.n_dense_layers))}


def _write_qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    shared = 0 if spec.experts is None else spec.experts.n_shared * spec.experts.width
    return _write_sparse(spec) | {"shared_expert_intermediate_size": shared}


def _read_latent(reading: Reading) -> None:
    heads, spread = reading.fields["attention.n_heads"], reading.fields.pop("attention.n_kv_heads")
    if spread not in (None, heads):
        rule = "latent attention has a key and a value for every query head"
        reading.refuse("num_key_value_heads", spread, rule, heads)


def _read_groups(reading: Reading, default: int) -> None:
    reading.take("feed_forward.router.groups", "n_group", default)
    reading.take("feed_forward.router.top_groups", "topk_group", default // 2 or 1)


def _read_deepseek_v2(reading: Reading) -> None:
    _read_latent(reading)
    method = reading.config.get("topk_method")
    if method == "group_limited_greedy":
        _read_groups(reading, 1)
    elif method not in (None, "greedy"):
        known = "greedy or group_limited_greedy"
        reading.refuse("topk_method", method, f"must be {known}", "greedy")


def _write_latent_rope(spec: ModelSpec) -> dict[str, Any]:
    """The rotary parameters; the scale of the scores follows from a weight among them."""
    rope = rope_parameters(spec)
    scaling = None if spec.rope is None else spec.rope.scaling
    if spec.attention.scale is not None and scaling is not None and scaling.factor > 1:
        grown = (spec.attention.scale * spec.head_size**0.5) ** 0.5
        weight = round((grown - 1) / (magnitude(scaling.factor) - 1), 9)
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    return {"rope_parameters": rope}


def _write_groups(spec: ModelSpec) -> dict[str, Any]:
    router = Router() if spec.experts is None else spec.experts.router
    return _write_latent_rope(spec) | {"n_group": router.groups, "topk_group": router.top_groups}


def _write_deepseek_v2(spec: ModelSpec) -> dict[str, Any]:
    written = _write_groups(spec)
    return written | {"topk_method": "greedy" if written["n_group"] == 1 else "group_limited_greedy"}


def _read_deepseek_v3(reading: Reading) -> None:
    _read_latent(reading)
    _read_groups(reading, 8)
    reading.fields["positions.interleaved"] = reading.flag("rope_interleave", True)


def _write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    return _write_groups(spec) | {"rope_interleave": spec.rope is not None and spec.rope.interleaved}


MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    keys=SIZES | HEAD | _PER_TOKEN | {"feed_forward.n_experts": "num_local_experts"},
    always=_SPARSE,
    defaults=ABSENT
    | {"attention.n_kv_heads": 8, "norm.eps": 1e-5, "feed_forward.n_experts": 8, "feed_forward.per_token": 2},
    aliases={"num_local_experts": "num_experts"},
    allowed={"router_jitter_noise": (0.0, 0)},
    windows="all",
    theta=1e6,
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    keys=SIZES
    | HEAD
    | _PER_TOKEN
    | _NORMALIZE
    | {
        "attention.bias": "qkv_bias",
        "feed_forward.n_experts": "num_experts",
        "feed_forward.expert_d_ff": "moe_intermediate_size",
    },
    always=_SPARSE | {"attention.output_bias": False},
    defaults=ABSENT
    | {
        "attention.n_kv_heads": 16,
        "attention.bias": True,
        "feed_forward.n_experts": 60,
        "feed_forward.per_token": 4,
        "feed_forward.expert_d_ff": 1408,
    }
    | {"feed_forward.router.normalize": False},
    reads=frozenset({"decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"}),
    windows="alternate",
    window=4096,
    flagged=True,
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    keys=SIZES
    | HEAD
    | BIAS
    | _PER_TOKEN
    | _NORMALIZE
    | {"feed_forward.n_experts": "num_experts", "feed_forward.expert_d_ff": "moe_intermediate_size"},
    always=_SPARSE | {"attention.qk_norm": "head"},
    defaults=ABSENT
    | {
        "attention.n_kv_heads": 4,
        "feed_forward.n_experts": 128,
        "feed_forward.per_token": 8,
        "feed_forward.expert_d_ff": 768,
        "feed_forward.router.normalize": False,
    },
    aliases={"num_experts": "num_local_experts"},
    reads=frozenset({"decoder_sparse_step", "mlp_only_layers"}),
    windows="all",
    window=4096,
    flagged=True,
    read=read_sparse_layers,
    write=_write_sparse,
)
OLMOE = Family(
    model_type="olmoe",
    architectures=("OlmoeForCausalLM",),
    keys=SIZES | BIAS | _PER_TOKEN | _NORMALIZE | {"feed_forward.n_experts": "num_experts"},
    always=_SPARSE | {"attention.qk_norm": "width"},
    defaults=ABSENT
    | {
        "norm.eps": 1e-5,
        "feed_forward.n_experts": 64,
        "feed_forward.per_token": 8,
        "feed_forward.router.normalize": False,
    },
    allowed={"clip_qkv": (None,)},
    aliases={"num_experts": "num_local_experts"},
)
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    divides=True,
    architectures=("DeepseekV2ForCausalLM",),
    keys=SIZES | BIAS | MLP_BIAS | _LATENT | _DEEPSEEK | _PER_TOKEN,
    always=_SPARSE | {"attention": "latent", "positions.interleaved": True, "feed_forward.router.normalize": False},
    defaults=ABSENT
    | {
        "attention.kv_rank": 512,
        "attention.q_rank": 1536,
        "attention.nope_head_dim": 128,
        "attention.rope_head_dim": 64,
        "attention.v_head_dim": 128,
    }
    | {
        "feed_forward.n_experts": 64,
        "feed_forward.n_shared": 2,
        "feed_forward.expert_d_ff": 1407,
        "feed_forward.n_dense_layers": 0,
        "feed_forward.router.scale": 1.0,
    },
    # transformers leaves norm_topk_prob and the inner norms' epsilon as they are here.
    allowed=_DEEPSEEK_ALLOWED | {"scoring_func": ("softmax",)},
    values={"norm_topk_prob": (False, None)},
    ignored=_DEEPSEEK_IGNORED,
    aliases={"n_routed_experts": "num_experts"},
    reads=frozenset({"topk_method", "n_group", "topk_group"}),
    read=_read_deepseek_v2,
    write=_write_deepseek_v2,
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    also=("kimi_k2",),
    architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    keys=SIZES | BIAS | _LATENT | _DEEPSEEK | _PER_TOKEN | _NORMALIZE | {"n_mtp_layers": "num_nextn_predict_layers"},
    always=_SPARSE
    | {"attention": "latent", "feed_forward.router.scores": "sigmoid", "feed_forward.router.correction": True},
    defaults=ABSENT
    | {
        "attention.kv_rank": 512,
        "attention.q_rank": 1536,
        "attention.nope_head_dim": 128,
        "attention.rope_head_dim": 64,
        "attention.v_head_dim": 128,
    }
    | {
        "feed_forward.n_experts": 256,
        "feed_forward.n_shared": 1,
        "feed_forward.expert_d_ff": 2048,
        "feed_forward.n_dense_layers": 3,
        "feed_forward.router.scale": 2.5,
    }
    | {"feed_forward.per_token": 8, "feed_forward.router.normalize": True, "n_mtp_layers": 0},
    allowed=_DEEPSEEK_ALLOWED | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ignored=_DEEPSEEK_IGNORED,
    aliases={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    reads=frozenset({"n_group", "topk_group", "rope_interleave"}),
    read=_read_deepseek_v3,
    write=_write_deepseek_v3,
)
GPT_OSS = Family(
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    keys={name: key for name, key in SIZES.items() if name != "feed_forward.activation"}
    | HEAD
    | BIAS
    | _PER_TOKEN
    | {"feed_forward.n_experts": "num_local_experts"},
    always=_SPARSE
    | {"feed_forward.activation": "clamped_swish", "attention.sinks": True, "feed_forward.bias": True}
    | {"feed_forward.router.scores": "softmax-of-chosen", "feed_forward.router.bias": True},
    defaults=ABSENT
    | {
        "attention.n_kv_heads": 8,
        "attention.head_dim": 64,
        "norm.eps": 1e-5,
        "attention.bias": True,
        "feed_forward.n_experts": 128,
    }
    | {"feed_forward.per_token": 4},
    allowed={"hidden_act": ("silu",)},
    values={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0, 7)},
    ignored=frozenset({"initial_context_length"}),
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    windows=2,
    window=128,
    theta=150000.0,
    rope_default={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)
EXPERTS = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)
