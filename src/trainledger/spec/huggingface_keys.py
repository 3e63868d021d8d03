"""What the keys of transformers' config.json mean, for the model types that are built here: tables only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from trainledger.frozen import frozen

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
}  # fmt: skip


@frozen
class Family:
    """A model type of transformers: which key holds which field, and what is the same in all of its models."""

    model_type: str
    architecture: str
    keys: Mapping[str, str]  # our field -> their key
    always: Mapping[str, object]  # fields of ours that every model of the family has
    activations: Mapping[str, str]  # ours -> the name to write
    defaults: Mapping[str, object]  # what transformers takes where a key is absent
    allowed: Mapping[str, tuple[object, ...]]  # keys that change the computation unless they have one of these values
    ignored: frozenset[str]  # keys that change nothing here
    aliases: Mapping[str, str] = field(default_factory=dict)


# No effect on the logits of a given set of weights: names, token ids, settings of generation, training and storage.
_IGNORED = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
    "_name_or_path", "architectures", "attn_implementation", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_range", "is_decoder", "is_llama_config", "label2id",
    "length_penalty", "max_length", "max_sequence_length", "min_length", "model_type", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_past", "output_scores", "pad_token_id", "prefix", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip
DROPOUTS = frozenset({"attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"})
_ALLOWED: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "auto_map": (None, {}),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_sliding_window": (False, None),
}
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types")
ROPE_TYPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
LLAMA3_KEYS = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_max_position_embeddings",
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "d_ff": "intermediate_size",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "tie_embeddings": "tie_word_embeddings",
    },
    always={"norm": "rmsnorm", "gated": True, "positions": "rope"},
    activations={"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"},
    defaults={
        "n_kv_heads": None,
        "head_dim": None,
        "norm_eps": 1e-6,
        "activation": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_embeddings": False,
    },
    allowed=_ALLOWED | {"rope_interleaved": (False, None)},
    # pretraining_tp only splits the same products into parts
    ignored=_IGNORED | {"attention_dropout", "pretraining_tp"},
)
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "vocab_size": "vocab_size",
        "d_model": "n_embd",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "d_ff": "n_inner",
        "max_seq_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "tie_embeddings": "tie_word_embeddings",
    },
    always={
        "norm": "layernorm",
        "norm_bias": True,
        "gated": False,
        "positions": "learned",
        "attention_bias": True,
        "mlp_bias": True,
    },
    activations={"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"},
    defaults={"d_ff": None, "norm_eps": 1e-5, "activation": "gelu_tanh", "tie_embeddings": True},
    allowed=_ALLOWED
    | {
        "reorder_and_upcast_attn": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
    },
    ignored=_IGNORED
    | (DROPOUTS - {"attention_dropout"})
    | {"n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"}
    | {"summary_use_proj"},
    aliases={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    },
)
FAMILIES = {each.model_type: each for each in (LLAMA, GPT2)}
