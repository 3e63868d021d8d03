"""The families with mixtures of experts. Keys and defaults are those of transformers 5."""

from __future__ import annotations

from typing import Any

from trainledger.spec.block import Router
from trainledger.spec.convert.huggingface.family import ExpertNames, Names, Switch, pairs
from trainledger.spec.convert.huggingface.llamas import BIAS, BIASES, HEAD, ROTARY
from trainledger.spec.convert.huggingface.reading import Reading, read_sparse_layers
from trainledger.spec.convert.huggingface.rope import magnitude, rope_parameters
from trainledger.spec.model import ModelSpec


def _read_qwen2_moe(reading: Reading) -> None:
    read_sparse_layers(reading)
    shared = reading.whole("shared_expert_intermediate_size", 5632, 1)
    width = reading.fields.get("feed_forward.expert_d_ff")
    if not width:
        return
    reading.fields["feed_forward.n_shared"] = max(1, shared // width)
    if shared % width:
        reading.fields["feed_forward.shared_d_ff"] = shared


def _write_sparse(spec: ModelSpec) -> dict[str, Any]:
    if spec.experts is None:
        return {}
    return {"decoder_sparse_step": spec.experts.every, "mlp_only_layers": list(range(spec.experts.n_dense_layers))}


def _write_qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    shared = 0 if spec.experts is None else spec.experts.shared_width
    return _write_sparse(spec) | {"shared_expert_intermediate_size": shared}


def _read_latent(reading: Reading) -> None:
    heads, kv_heads = reading.fields["attention.n_heads"], reading.fields.pop("attention.n_kv_heads")
    if kv_heads not in (None, heads):
        rule = "latent attention has a key and a value for every query head"
        reading.refuse("num_key_value_heads", kv_heads, rule, heads)


def _read_groups(reading: Reading, default: int) -> None:
    reading.take("feed_forward.router.groups", "n_group", default)
    reading.take("feed_forward.router.top_groups", "topk_group", default // 2 or 1)


def _read_deepseek_v2(reading: Reading) -> None:
    _read_latent(reading)
    method = reading.config.get("topk_method")
    if method == "group_limited_greedy":
        _read_groups(reading, 1)
    elif method not in (None, "greedy"):
        reading.refuse("topk_method", method, "must be greedy or group_limited_greedy", "greedy")


def _read_deepseek_v3(reading: Reading) -> None:
    _read_latent(reading)
    _read_groups(reading, 8)


def _write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    """The groups of experts, and the rotary parameters with the weight from which the scale of the scores follows."""
    router, rope = Router() if spec.experts is None else spec.experts.router, rope_parameters(spec)
    scaling = None if spec.rope is None else spec.rope.scaling
    if spec.attention.scale is not None and scaling is not None and scaling.factor > 1:
        growth = (spec.attention.scale * spec.head_size**0.5) ** 0.5
        weight = round((growth - 1) / (magnitude(scaling.factor) - 1), 9)
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    return {"rope_parameters": rope, "n_group": router.groups, "topk_group": router.top_groups}


def _write_deepseek_v2(spec: ModelSpec) -> dict[str, Any]:
    written = _write_deepseek_v3(spec)
    return written | {"topk_method": "greedy" if written["n_group"] == 1 else "group_limited_greedy"}


_NORMALIZE = {"feed_forward.router.normalize": "norm_topk_prob"}
_QWEN = _NORMALIZE | {"feed_forward.expert_d_ff": "moe_intermediate_size"}
_SPARSE = ROTARY.like(
    "",
    keys={"feed_forward.per_token": "num_experts_per_tok", "feed_forward.n_experts": "num_experts"},
    always={"feed_forward": "experts"},
    defaults={"feed_forward.router.normalize": False},
    names=Names(block={"mlp.router": "mlp.gate"}),
)
_DEEPSEEK = _SPARSE.like(
    "",
    keys=BIAS
    | pairs(
        "attention.kv_rank=kv_lora_rank attention.q_rank=q_lora_rank attention.nope_head_dim=qk_nope_head_dim "
        "attention.rope_head_dim=qk_rope_head_dim attention.v_head_dim=v_head_dim "
        "feed_forward.n_experts=n_routed_experts feed_forward.n_shared=n_shared_experts "
        "feed_forward.expert_d_ff=moe_intermediate_size feed_forward.n_dense_layers=first_k_dense_replace "
        "feed_forward.router.scale=routed_scaling_factor"
    ),
    always={"attention": "latent"},
    defaults={
        "attention.kv_rank": 512,
        "attention.q_rank": 1536,
        "attention.nope_head_dim": 128,
        "attention.rope_head_dim": 64,
        "attention.v_head_dim": 128,
    },
    # Published files have these two lines of keys; transformers does not read them.
    allowed={"moe_layer_freq": (1,)},
    ignored=("aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux"),
)
EXPERTS = (
    _SPARSE.like(
        "mixtral",
        keys=HEAD | {"feed_forward.n_experts": "num_local_experts"},
        defaults={
            "attention.n_kv_heads": 8,
            "norm.eps": 1e-5,
            "feed_forward.n_experts": 8,
            "feed_forward.per_token": 2,
        },
        aliases={"num_local_experts": "num_experts"},
        allowed={"router_jitter_noise": (0.0, 0)},
        windows="all",
        theta=1e6,
        names=Names(
            block={"mlp.router": "block_sparse_moe.gate"},
            experts=ExpertNames("block_sparse_moe.experts", ("w1", "w3", "w2")),
        ),
    ),
    _SPARSE.like(
        "qwen2_moe",
        keys=HEAD | _QWEN | {"attention.bias": "qkv_bias"},
        always={"attention.output_bias": False, "feed_forward.shared_gate": True},
        defaults={
            "attention.n_kv_heads": 16,
            "attention.bias": True,
            "feed_forward.n_experts": 60,
            "feed_forward.per_token": 4,
            "feed_forward.expert_d_ff": 1408,
        },
        reads=("decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"),
        windows="alternate",
        window=4096,
        flagged=True,
        read=_read_qwen2_moe,
        write=_write_qwen2_moe,
        names=Names(block={"mlp.router": "mlp.gate", "mlp.shared_experts": "mlp.shared_expert"}),
    ),
    _SPARSE.like(
        "qwen3_moe",
        keys=HEAD | BIAS | _QWEN,
        always={"attention.qk_norm": "head"},
        defaults={
            "attention.n_kv_heads": 4,
            "feed_forward.n_experts": 128,
            "feed_forward.per_token": 8,
            "feed_forward.expert_d_ff": 768,
        },
        aliases={"num_experts": "num_local_experts"},
        reads=("decoder_sparse_step", "mlp_only_layers"),
        windows="all",
        window=4096,
        flagged=True,
        read=read_sparse_layers,
        write=_write_sparse,
    ),
    _SPARSE.like(
        "olmoe",
        keys=BIAS | _NORMALIZE,
        always={"attention.qk_norm": "width"},
        defaults={"norm.eps": 1e-5, "feed_forward.n_experts": 64, "feed_forward.per_token": 8},
        allowed={"clip_qkv": (None,)},
        aliases={"num_experts": "num_local_experts"},
    ),
    _DEEPSEEK.like(
        "deepseek_v2",
        keys=BIASES,
        always={"positions.interleaved": True, "feed_forward.router.normalize": False},
        defaults={
            "feed_forward.n_experts": 64,
            "feed_forward.n_shared": 2,
            "feed_forward.expert_d_ff": 1407,
            "feed_forward.n_dense_layers": 0,
            "feed_forward.router.scale": 1.0,
        },
        allowed={"scoring_func": ("softmax",)},
        values={"norm_topk_prob": (False, None)},  # transformers never normalizes
        aliases={"n_routed_experts": "num_experts"},
        reads=("topk_method", "n_group", "topk_group"),
        divides=True,
        read=_read_deepseek_v2,
        write=_write_deepseek_v2,
    ),
    _DEEPSEEK.like(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "KimiK2ForCausalLM",
        also=("kimi_k2",),
        keys=_NORMALIZE | {"n_mtp_layers": "num_nextn_predict_layers"},
        always={"feed_forward.router.scores": "sigmoid", "feed_forward.router.correction": True},
        defaults={
            "feed_forward.n_experts": 256,
            "feed_forward.per_token": 8,
            "feed_forward.n_shared": 1,
            "feed_forward.expert_d_ff": 2048,
            "feed_forward.n_dense_layers": 3,
            "feed_forward.router.scale": 2.5,
            "feed_forward.router.normalize": True,
            "n_mtp_layers": 0,
        },
        switches={"rope_interleave": Switch(True, {"positions.interleaved": True}, {"positions.interleaved": False})},
        allowed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        aliases={"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
        reads=("n_group", "topk_group"),
        read=_read_deepseek_v3,
        write=_write_deepseek_v3,
        names=Names(block={"mlp.router": "mlp.gate", "mlp.router.correction": "mlp.gate.e_score_correction_bias"}),
    ),
    _SPARSE.like(
        "gpt_oss",
        keys=HEAD | BIAS | {"feed_forward.activation": None, "feed_forward.n_experts": "num_local_experts"},
        always={
            "feed_forward.activation": "clamped_swish",
            "attention.sinks": True,
            "feed_forward.bias": True,
            "feed_forward.router.scores": "softmax-of-chosen",
            "feed_forward.router.bias": True,
        },
        defaults={
            "attention.n_kv_heads": 8,
            "attention.head_dim": 64,
            "norm.eps": 1e-5,
            "attention.bias": True,
            "feed_forward.n_experts": 128,
            "feed_forward.per_token": 4,
        },
        allowed={"hidden_act": ("silu",)},
        values={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0, 7)},
        ignored=("initial_context_length",),
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
        names=Names(experts=ExpertNames(each=None, interleaved=True)),
    ),
)
