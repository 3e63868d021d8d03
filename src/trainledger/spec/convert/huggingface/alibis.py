"""The families that have ALiBi, or may: BLOOM, Falcon and MPT. Keys and defaults are those of transformers 5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainledger.spec.convert.huggingface.family import IGNORED, Names, Switch, pairs
from trainledger.spec.convert.huggingface.gpts import BIASED, FOUR, GPT, NO_BIASES
from trainledger.spec.convert.huggingface.reading import Reading, is_one_of
from trainledger.spec.model import ModelSpec

_MPT_ALLOWED: dict[str, tuple[object, ...]] = {
    "attn_type": ("multihead_attention",),
    "clip_qkv": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "qk_gn": (False,),
    "rope": (False,),
    "sliding_window_size": (-1,),
    "attn_uses_sequence_id": (False,),
}
_MPT_ATTENTION = frozenset(
    {"alibi", "alibi_bias_max", "attn_impl", "attn_pdrop", "is_encoder_decoder", "softmax_scale"}
)
_AS_FOUNDRY = "transformers builds it otherwise; accounted for as llm-foundry builds it"


def _read_falcon(reading: Reading) -> None:
    newer, parallel = reading.flag("new_decoder_architecture", False), reading.flag("parallel_attn", True)
    if newer and not parallel:
        reading.refuse("parallel_attn", parallel, "is true in every new_decoder_architecture", True)
    norms = reading.whole("num_ln_in_parallel_attn", 2 if newer else 1, 1)
    if norms > (2 if newer else 1):
        rule = "must be 1 or 2" if newer else "must be 1 without new_decoder_architecture"
        reading.refuse("num_ln_in_parallel_attn", norms, rule, 1)
    if not newer:
        several = reading.flag("multi_query", True)
        reading.fields["attention.n_kv_heads"] = 1 if several else reading.fields.get("attention.n_heads")
    if parallel:
        reading.fields["block"] = "parallel-two-norms" if norms == 2 else "parallel"
    if reading.fields["positions"] == "alibi":
        reading.refuse_weights("alibi", True, "falcon's slopes are rounded to bf16 and divided by sqrt(head width)")


def _write_falcon(spec: ModelSpec) -> dict[str, Any]:
    newer = spec.block == "parallel-two-norms" or (
        spec.block == "parallel" and spec.kv_heads not in (1, spec.attention.n_heads)
    )
    return {
        "new_decoder_architecture": newer,
        "multi_query": spec.kv_heads == 1,
        "parallel_attn": spec.block != "serial",
        "num_ln_in_parallel_attn": (2 if spec.block == "parallel-two-norms" else 1) if newer else None,
    }


def _read_mpt(reading: Reading) -> None:
    """MPT as llm-foundry has it; transformers' MPT always has ALiBi, 4 D wide MLPs and no biases."""
    attend = reading.config.get("attn_config") or {}
    if isinstance(attend, dict):
        _read_mpt_attention(reading, attend)
    else:
        reading.refuse("attn_config", attend, "must be a JSON object, { ... }")
    if not reading.flag("no_bias", True):
        reading.fields |= {"norm.bias": True, "attention.bias": True, "feed_forward.bias": True}
        reading.refuse_weights("no_bias", False, _AS_FOUNDRY)
    ratio = reading.whole("expansion_ratio", 4, 1)
    if ratio != 4:
        reading.refuse_weights("expansion_ratio", ratio, _AS_FOUNDRY)
    if reading.has("d_model"):
        reading.fields["feed_forward.d_ff"] = ratio * reading.fields["d_model"]
    scale = reading.given("logit_scale")
    if scale == "inv_sqrt_d_model" and reading.has("d_model"):
        scale = reading.fields["d_model"] ** -0.5
    if scale is not None:
        reading.fields["logit_scale"] = reading.checked("logit_scale", "logit_scale", scale)
        reading.refuse_weights("logit_scale", scale, _AS_FOUNDRY)


def _read_mpt_attention(reading: Reading, attend: dict[str, Any]) -> None:
    for key, value in attend.items():
        if key not in {*_MPT_ALLOWED, *_MPT_ATTENTION, *IGNORED}:
            reading.refuse(f"attn_config.{key}", value, "is no key that is known here; it may change the model")
        elif key in _MPT_ALLOWED and not is_one_of(value, _MPT_ALLOWED[key]):
            rule = "changes what the model costs, and that is not accounted for"
            reading.refuse(f"attn_config.{key}", value, rule, _MPT_ALLOWED[key][0])
    scale, alibi = attend.get("softmax_scale"), attend.get("alibi", True)
    if scale is not None:
        reading.fields["attention.scale"] = reading.checked("attention.scale", "attn_config.softmax_scale", scale)
    if attend.get("alibi_bias_max", 8) != 8:
        reading.refuse_weights(
            "attn_config.alibi_bias_max", attend["alibi_bias_max"], "the slopes start at 2 ** (-8 / H)"
        )
    if not isinstance(alibi, bool):
        reading.refuse("attn_config.alibi", alibi, "must be true or false", True)
    elif not alibi:
        reading.fields["positions"] = "learned" if reading.flag("learned_pos_emb", True) else "none"
        reading.refuse_weights("attn_config.alibi", False, _AS_FOUNDRY)


def _write_mpt(spec: ModelSpec) -> dict[str, Any]:
    return {
        "attn_config": {"alibi": spec.positions.kind == "alibi", "softmax_scale": spec.attention.scale},
        "no_bias": not spec.norm.bias,
        "expansion_ratio": spec.feed_forward.d_ff // spec.d_model,
        "logit_scale": None if spec.logit_scale == 1 else spec.logit_scale,
        "learned_pos_emb": spec.positions.kind == "learned",
    }


_BLOOM_NAMES = Names(
    "transformer.",
    "h",
    top={"embed_tokens": "word_embeddings", "embed_norm": "word_embeddings_layernorm", "norm": "ln_f"},
    block={"self_attn.o_proj": "self_attention.dense"} | FOUR,
    qkv="self_attention.query_key_value",
    grouped=True,
)
ALIBIS = (
    GPT.like(
        "bloom",
        keys={
            "n_layers": "n_layer",
            "attention.n_heads": "n_head",
            "feed_forward.d_ff": None,
            "max_seq_len": "seq_length",
            "norm.eps": "layer_norm_epsilon",
            "feed_forward.activation": None,
        },
        always=BIASED | {"feed_forward.activation": "gelu_tanh", "positions": "alibi", "embedding_norm": True},
        # The longest sequence is no key of transformers' config; the models were trained at 2048.
        defaults={"tie_embeddings": True, "max_seq_len": 2048},
        allowed={"apply_residual_connection_post_layernorm": (False,), "n_inner": (None,)},
        ignored=(
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "slow_but_exact",
        ),
        aliases={"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
        theta=None,
        divides=True,
        names=_BLOOM_NAMES,
    ),
    GPT.like(
        "falcon",
        "FalconForCausalLM",
        "RWForCausalLM",
        keys=pairs(
            "attention.n_kv_heads=num_kv_heads feed_forward.d_ff=ffn_hidden_size norm.eps=layer_norm_epsilon "
            "feed_forward.activation=activation"
        ),
        defaults={
            "attention.n_kv_heads": None,
            "feed_forward.d_ff": None,
            "max_seq_len": 2048,
            "feed_forward.activation": "gelu",
            "tie_embeddings": True,
        },
        allowed={"apply_residual_connection_post_layernorm": (False,)},
        aliases={"hidden_size": "n_embed"},
        switches={
            "bias": Switch(False, BIASED, NO_BIASES),
            "alibi": Switch(False, {"positions": "alibi"}, {"positions": "rope"}),
        },
        reads=("new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn"),
        divides=True,
        read=_read_falcon,
        write=_write_falcon,
        names=replace(
            _BLOOM_NAMES,
            where=("block", "parallel-two-norms", {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}),
        ),
    ),
    GPT.like(
        "mpt",
        "MptForCausalLM",
        "MPTForCausalLM",
        keys={
            "d_model": "d_model",
            "n_layers": "n_layers",
            "attention.n_heads": "n_heads",
            "feed_forward.d_ff": None,
            "max_seq_len": "max_seq_len",
            "norm.eps": "layer_norm_epsilon",
            "feed_forward.activation": None,
        },
        always={"norm.bias": None, "feed_forward.activation": "gelu", "positions": "alibi"},
        defaults={"max_seq_len": 2048, "tie_embeddings": True},
        allowed={"norm_type": ("low_precision_layernorm", "layernorm")},
        ignored=("embedding_fraction", "init_config", "init_device", "verbose", "tokenizer_name", "use_pad_tok_in_ffn"),
        aliases={"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
        reads=("attn_config", "expansion_ratio", "learned_pos_emb", "logit_scale", "no_bias"),
        theta=None,
        divides=True,
        read=_read_mpt,
        write=_write_mpt,
        names=Names(
            "transformer.",
            "blocks",
            top={"embed_tokens": "wte", "embed_positions": "wpe", "norm": "norm_f"},
            block=pairs(
                "input_layernorm=norm_1 post_attention_layernorm=norm_2 self_attn.o_proj=attn.out_proj mlp=ffn"
            ),
            qkv="attn.Wqkv",
        ),
    ),
)
