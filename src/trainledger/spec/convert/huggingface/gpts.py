"""The families in GPT's line, LayerNorm with a bias and plain MLP, and those that may have ALiBi.

Keys and defaults are those of transformers 5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainledger.spec.convert.huggingface.family import IGNORED, WRITTEN, Family, Names, Switch, pairs
from trainledger.spec.convert.huggingface.reading import Reading, is_one_of
from trainledger.spec.model import ModelSpec

BIASED = {"attention.bias": True, "feed_forward.bias": True}
FOUR = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
GPT = Family(
    keys=pairs(
        "vocab_size=vocab_size d_model=hidden_size n_layers=num_hidden_layers "
        "attention.n_heads=num_attention_heads feed_forward.d_ff=intermediate_size "
        "max_seq_len=max_position_embeddings norm.eps=layer_norm_eps feed_forward.activation=hidden_act "
        "tie_embeddings=tie_word_embeddings"
    ),
    always={"norm": "layernorm", "norm.bias": True, "feed_forward.gated": False, "positions": "rope"},
    defaults={"norm.eps": 1e-5, "feed_forward.activation": "gelu_tanh", "tie_embeddings": False},
)
_NEW = WRITTEN | {"gelu_tanh": "gelu_new"}
NO_BIASES = dict.fromkeys(BIASED, False)
_KV_HEADS = {"attention.n_kv_heads": "num_key_value_heads"}
_GPT2 = GPT.like(
    "",
    keys=pairs(
        "d_model=n_embd n_layers=n_layer attention.n_heads=n_head feed_forward.d_ff=n_inner "
        "max_seq_len=n_positions norm.eps=layer_norm_epsilon feed_forward.activation=activation_function"
    ),
    always={"feed_forward.bias": True},
    defaults={"feed_forward.d_ff": None},
    written=_NEW,
    allowed={"scale_attn_weights": (True,)},
    ignored=("n_ctx",),
    aliases=pairs(
        "n_embd=hidden_size n_layer=num_hidden_layers n_head=num_attention_heads n_positions=max_position_embeddings"
    ),
    theta=None,
    divides=True,
)
_GPT2_NAMES = Names(
    "transformer.",
    "h",
    top={"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"},
    block=pairs(
        "input_layernorm=ln_1 self_attn=attn self_attn.o_proj=attn.c_proj post_attention_layernorm=ln_2 "
        "mlp.up_proj=mlp.c_fc mlp.down_proj=mlp.c_proj"
    ),
    qkv="attn.c_attn",
    transposed=True,
)
_GPTJ_BLOCK = {"self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc_in", "mlp.down_proj": "mlp.fc_out"}


def _read_opt(reading: Reading) -> None:
    width = reading.whole("word_embed_proj_dim", reading.fields.get("d_model") or 0, 1)
    if reading.has("d_model") and width != reading.fields["d_model"]:
        rule = "narrower embeddings with a separate projection (OPT-350m) are not accounted for"
        reading.refuse("word_embed_proj_dim", width, rule, reading.fields["d_model"])


def _write_opt(spec: ModelSpec) -> dict[str, Any]:
    return {"word_embed_proj_dim": spec.d_model}


GPTS = (
    _GPT2.like(
        "gpt2",
        "GPT2LMHeadModel",
        always={"attention.bias": True, "positions": "learned"},
        defaults={"tie_embeddings": True},
        constants=dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # 0.1 where they are absent
        allowed={"reorder_and_upcast_attn": (False,), "scale_attn_by_inverse_layer_idx": (False,)},
        names=_GPT2_NAMES,
    ),
    _GPT2.like(
        "gptj",
        "GPTJForCausalLM",
        keys={"positions.dim": "rotary_dim"},
        always={"head_bias": True, "block": "parallel", "positions.interleaved": True},
        defaults={"positions.dim": 64},
        allowed={"rotary": (True,)},
        names=replace(_GPT2_NAMES, block={**_GPT2_NAMES.block, **_GPTJ_BLOCK}, qkv=None, transposed=False),
    ),
    GPT.like(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        keys={"attention.bias": "attention_bias"},
        always={"feed_forward.bias": True},
        defaults={"feed_forward.activation": "gelu", "attention.bias": True},
        switches={"use_parallel_residual": Switch(True, {"block": "parallel-two-norms"}, {"block": "serial"})},
        rotated=0.25,
        rope_aliases={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        divides=True,
        names=Names(
            "gpt_neox.",
            head="embed_out",
            other_head="lm_head",
            top={"embed_tokens": "embed_in", "norm": "final_layer_norm"},
            block={"self_attn.o_proj": "attention.dense"} | FOUR,
            qkv="attention.query_key_value",
            grouped=True,
        ),
    ),
    GPT.like(
        "opt",
        "OPTForCausalLM",
        keys={"norm.eps": None, "feed_forward.d_ff": "ffn_dim", "feed_forward.activation": "activation_function"},
        always={"norm.eps": 1e-5, "positions": "learned", "positions.extra_rows": 2},
        defaults={"feed_forward.activation": "relu", "tie_embeddings": True},
        switches={
            "enable_bias": Switch(True, BIASED, NO_BIASES),
            "layer_norm_elementwise_affine": Switch(
                True, {"norm.weight": True, "norm.bias": True}, {"norm.weight": False, "norm.bias": False}
            ),
            "do_layer_norm_before": Switch(True, {"norm_place": "pre"}, {"norm_place": "after-add"}),
        },
        constants={"dropout": 0.0},  # 0.1 where it is absent
        allowed={"_remove_final_layer_norm": (False,), "layerdrop": (0.0, 0)},
        reads=("word_embed_proj_dim",),
        theta=None,
        divides=True,
        read=_read_opt,
        write=_write_opt,
        names=Names(
            "model.decoder.",
            top={"norm": "final_layer_norm"},
            block=pairs(
                "self_attn.o_proj=self_attn.out_proj input_layernorm=self_attn_layer_norm "
                "post_attention_layernorm=final_layer_norm mlp.up_proj=fc1 mlp.down_proj=fc2"
            ),
            where=(
                "norm_place",
                "after-add",
                {"post_attention_layernorm": "self_attn_layer_norm", "post_feedforward_layernorm": "final_layer_norm"},
            ),
        ),
    ),
    GPT.like(
        "phi",
        keys=_KV_HEADS,
        always=BIASED | {"head_bias": True, "block": "parallel"},
        defaults={"attention.n_kv_heads": None},
        switches={"qk_layernorm": Switch(False, {"attention.qk_norm": "head"}, {"attention.qk_norm": None})},
        written=_NEW,
        rotated=0.5,
        names=Names(
            top={"norm": "final_layernorm"},
            block=pairs(
                "self_attn.o_proj=self_attn.dense self_attn.q_norm=self_attn.q_layernorm "
                "self_attn.k_norm=self_attn.k_layernorm mlp.up_proj=mlp.fc1 mlp.down_proj=mlp.fc2"
            ),
        ),
    ),
    GPT.like(
        "starcoder2",
        keys=_KV_HEADS | {"attention.head_dim": "head_dim", "norm.eps": "norm_epsilon"},
        defaults={"attention.n_kv_heads": 2, "attention.head_dim": None, "tie_embeddings": True},
        switches={"use_bias": Switch(True, BIASED, NO_BIASES)},
        allowed={"mlp_type": ("default",), "norm_type": ("layer_norm",), "layer_norm_epsilon": (1e-5,)},
        ignored=("activation_function",),
        windows="all",
        names=Names(block={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    ),
    GPT.like(
        "stablelm",
        "StableLmForCausalLM",
        "StableLMEpochForCausalLM",
        keys=_KV_HEADS | {"attention.bias": "use_qkv_bias"},
        always={"feed_forward.gated": True, "attention.output_bias": False},
        defaults={"attention.n_kv_heads": 32, "attention.bias": False, "feed_forward.activation": "silu"},
        switches={"use_parallel_residual": Switch(False, {"block": "parallel"}, {"block": "serial"})},
        # One norm for each head, with a weight of its own: more parameters than any of ours.
        allowed={"qk_layernorm": (False,)},
        rotated=0.25,
    ),
)


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
