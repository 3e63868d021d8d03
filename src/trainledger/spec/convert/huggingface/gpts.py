"""The families in GPT's line: LayerNorm with a bias, plain MLP. Keys and defaults are those of transformers 5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainledger.spec.convert.huggingface.family import WRITTEN, Family, Names, Switch, pairs
from trainledger.spec.convert.huggingface.reading import Reading
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
