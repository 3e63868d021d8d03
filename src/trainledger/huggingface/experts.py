"""The families with mixtures of experts. Keys and defaults are those of transformers 5."""

from __future__ import annotations

from typing import Any

from trainledger.huggingface.family import Family
from trainledger.huggingface.layers import read_sparse_layers
from trainledger.huggingface.llamas import ABSENT, BIAS, HEAD, MLP_BIAS, ROTARY, SIZES
from trainledger.huggingface.reading import Reading
from trainledger.huggingface.rope import magnitude, rope_parameters
from trainledger.spec.model import ModelSpec

_PER_TOKEN = {"experts_per_token": "num_experts_per_tok"}
_NORMALIZE = {"router_normalize": "norm_topk_prob"}
_LATENT = {
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_DEEPSEEK = {
    "n_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "expert_d_ff": "moe_intermediate_size",
    "n_dense_layers": "first_k_dense_replace",
    "router_scale": "routed_scaling_factor",
}
# What the published files say besides, and transformers has no other way for.
_DEEPSEEK_ALLOWED: dict[str, tuple[object, ...]] = {"moe_layer_freq": (1,)}
_DEEPSEEK_IGNORED = frozenset({"aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux"})


def _read_qwen2_moe(reading: Reading) -> None:
    read_sparse_layers(reading)
    shared = reading.whole("shared_expert_intermediate_size", 5632, 1)
    width = reading.fields.get("expert_d_ff")
    if not width:
        return
    if shared % width:
        rule = f"must be a multiple of moe_intermediate_size = {width}"
        reading.refuse("shared_expert_intermediate_size", shared, rule, max(1, round(shared / width)) * width)
    else:
        reading.fields |= {"n_shared_experts": shared // width, "shared_expert_gate": True}


def _write_sparse(spec: ModelSpec) -> dict[str, Any]:
    return {"decoder_sparse_step": spec.expert_every, "mlp_only_layers": list(range(spec.n_dense_layers))}


def _write_qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    return _write_sparse(spec) | {"shared_expert_intermediate_size": spec.n_shared_experts * spec.expert_width}


def _read_groups(reading: Reading, default: int) -> None:
    reading.take("router_groups", "n_group", default)
    reading.take("router_top_groups", "topk_group", default // 2 or 1)


def _read_deepseek_v2(reading: Reading) -> None:
    method = reading.config.get("topk_method")
    if method == "group_limited_greedy":
        _read_groups(reading, 1)
    elif method not in (None, "greedy"):
        known = "greedy or group_limited_greedy"
        reading.refuse("topk_method", method, f"must be {known}", "greedy")


def _write_latent_rope(spec: ModelSpec) -> dict[str, Any]:
    """The rotary parameters; the scale of the scores follows from a weight among them."""
    rope = rope_parameters(spec)
    if spec.attention_scale is not None and spec.rope_factor is not None and spec.rope_factor > 1:
        grown = (spec.attention_scale * spec.head_size**0.5) ** 0.5
        weight = round((grown - 1) / (magnitude(spec.rope_factor) - 1), 9)
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    return {"rope_parameters": rope}


def _write_deepseek_v2(spec: ModelSpec) -> dict[str, Any]:
    method = "greedy" if spec.router_groups == 1 else "group_limited_greedy"
    return _write_latent_rope(spec) | {
        "topk_method": method,
        "n_group": spec.router_groups,
        "topk_group": spec.router_top_groups,
    }


def _read_deepseek_v3(reading: Reading) -> None:
    _read_groups(reading, 8)
    reading.fields["rope_interleaved"] = reading.flag("rope_interleave", True)


def _write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    return _write_latent_rope(spec) | {
        "n_group": spec.router_groups, "topk_group": spec.router_top_groups, "rope_interleave": spec.rope_interleaved,
    }  # fmt: skip


MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    keys=SIZES | HEAD | _PER_TOKEN | {"n_experts": "num_local_experts"},
    always=ROTARY,
    defaults=ABSENT | {"n_kv_heads": 8, "norm_eps": 1e-5, "n_experts": 8, "experts_per_token": 2},
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
    | {"attention_bias": "qkv_bias", "n_experts": "num_experts", "expert_d_ff": "moe_intermediate_size"},
    always=ROTARY | {"attention_output_bias": False},
    defaults=ABSENT
    | {"n_kv_heads": 16, "attention_bias": True, "n_experts": 60, "experts_per_token": 4, "expert_d_ff": 1408}
    | {"router_normalize": False},
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
    | {"n_experts": "num_experts", "expert_d_ff": "moe_intermediate_size"},
    always=ROTARY | {"qk_norm": "head"},
    defaults=ABSENT
    | {"n_kv_heads": 4, "n_experts": 128, "experts_per_token": 8, "expert_d_ff": 768, "router_normalize": False},
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
    keys=SIZES | BIAS | _PER_TOKEN | _NORMALIZE | {"n_experts": "num_experts"},
    always=ROTARY | {"qk_norm": "width"},
    defaults=ABSENT | {"norm_eps": 1e-5, "n_experts": 64, "experts_per_token": 8, "router_normalize": False},
    allowed={"clip_qkv": (None,)},
    aliases={"num_experts": "num_local_experts"},
)
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    divides=True,
    architectures=("DeepseekV2ForCausalLM",),
    keys=SIZES | BIAS | MLP_BIAS | _LATENT | _DEEPSEEK | _PER_TOKEN,
    always=ROTARY | {"rope_interleaved": True, "router_normalize": False},
    defaults=ABSENT
    | {"kv_rank": 512, "q_rank": 1536, "nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}
    | {"n_experts": 64, "n_shared_experts": 2, "expert_d_ff": 1407, "n_dense_layers": 0, "router_scale": 1.0},
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
    keys=SIZES | BIAS | _LATENT | _DEEPSEEK | _PER_TOKEN | _NORMALIZE | {"n_predict_ahead": "num_nextn_predict_layers"},
    always=ROTARY | {"router": "sigmoid", "router_correction": True},
    defaults=ABSENT
    | {"kv_rank": 512, "q_rank": 1536, "nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}
    | {"n_experts": 256, "n_shared_experts": 1, "expert_d_ff": 2048, "n_dense_layers": 3, "router_scale": 2.5}
    | {"experts_per_token": 8, "router_normalize": True, "n_predict_ahead": 0},
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
    keys={name: key for name, key in SIZES.items() if name != "activation"}
    | HEAD
    | BIAS
    | _PER_TOKEN
    | {"n_experts": "num_local_experts"},
    always=ROTARY
    | {"activation": "clamped_swish", "attention_sinks": True, "mlp_bias": True}
    | {"router": "softmax-of-chosen", "router_bias": True},
    defaults=ABSENT
    | {"n_kv_heads": 8, "head_dim": 64, "norm_eps": 1e-5, "attention_bias": True, "n_experts": 128}
    | {"experts_per_token": 4},
    allowed={"hidden_act": ("silu",)},
    values={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0, 7)},
    ignored=frozenset({"initial_context_length"}),
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    windows=2,
    window=128,
    theta=150000.0,
    rope_default={
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)  # fmt: skip
EXPERTS = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)
