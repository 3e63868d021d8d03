"""config.json as published for models with mixers, and the forms that transformers' defaults have, shortened."""

_GRANITE = ["mamba"] * 5 + ["attention"] + (["mamba"] * 9 + ["attention"]) * 3 + ["mamba"] * 4
_LFM2 = "conv conv full_attention conv conv full_attention conv conv full_attention conv full_attention conv"
_ULTRA = 4 * "MEMEMEM*EMEMEM*EMEMEMEM*E" + "MEMEMEME"

HYBRIDS = {
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936,
        "max_position_embeddings": 262144, "rope_theta": 10000000, "partial_rotary_factor": 0.25, "rope_scaling": None,
        "rms_norm_eps": 1e-06, "hidden_act": "silu", "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 512,
        "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "use_sliding_window": False,
    },
    "llama-4-scout": {
        "model_type": "llama4", "text_config": {
            "attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
            "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_local_experts": 16, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "use_qk_norm": True, "vocab_size": 202048,
        },
    },
    "llama-4-maverick": {
        "model_type": "llama4", "text_config": {
            "attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "interleave_moe_layer_step": 2, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "max_position_embeddings": 1048576, "model_type": "llama4_text",
            "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_local_experts": 128, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
            "use_qk_norm": False, "vocab_size": 202048,
        },
    },
    "gemma-4-31b": {
        "model_type": "gemma4", "text_config": {
            "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": False, "expert_intermediate_size":
            None, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation":
            "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "max_position_embeddings": 262144,
            "model_type": "gemma4_text", "num_attention_heads": 32, "num_experts": None, "num_global_key_value_heads":
            4, "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06,
            "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
            "rope_type": "proportional"}, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
            "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention":
            "vision", "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        },
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4", "text_config": {
            "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping":
            30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size":
            2816, "hidden_size_per_layer_input": 0, "intermediate_size": 2112, "layer_types": (["sliding_attention"] *
            5 + ["full_attention"]) * 5, "max_position_embeddings": 262144, "model_type": "gemma4_text",
            "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads":
            2, "num_hidden_layers": 30, "num_key_value_heads": 8, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06,
            "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
            "rope_type": "proportional"}, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
            "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": 8, "use_bidirectional_attention":
            "vision", "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        },
    },
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 48, "hidden_size": 4096, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "intermediate_size": 16384, "vocab_size":
        152576, "max_position_embeddings": 262144, "rope_theta": 5000000, "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334, "sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size":
        128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "hybrid_layer_pattern": [0] + ([1] * 4 + [0] + [1]) * 7 + [1] * 4 + [0], "moe_layer_freq": [0] + [1] * 47,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": None, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "routed_scaling_factor": None, "hidden_act": "silu", "layernorm_epsilon": 1e-05, "attention_bias": False,
        "attention_value_scale": 0.707, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "tie_word_embeddings": False,
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe", "text_config": {
            "model_type": "qwen3_5_moe_text", "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
            "hidden_act": "silu", "hidden_size": 2048,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
            "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "num_attention_heads": 16, "num_experts": 256,
            "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "shared_expert_intermediate_size": 512, "vocab_size": 248320,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            },
        },
    },
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "vocab_size": 131072, "expand": 2,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_head_dim": 64,
        "mamba_num_heads": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128,
        "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-05, "use_bias": False,
        "use_conv_bias": True, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "nemotron-3-ultra-550b-a55b": {
        "model_type": "nemotron_h", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 5120, "vocab_size": 131072, "expand": 2, "moe_latent_size": 2048,
        "layers_block_type": [{"M": "mamba", "E": "moe", "*": "attention"}[letter] for letter in _ULTRA],
        "mamba_head_dim": 64, "mamba_num_heads": 256, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "chunk_size": 128, "mlp_hidden_act": "relu2", "moe_intermediate_size": 5120, "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 10240, "n_routed_experts": 512, "n_shared_experts": 1,
        "num_experts_per_tok": 22, "norm_topk_prob": True, "routed_scaling_factor": 5.0, "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "nemotron-h-56b": {
        "model_type": "nemotron_h", "hidden_size": 8192, "num_hidden_layers": 118, "num_attention_heads": 64,
        "num_key_value_heads": 8, "attention_head_dim": 128, "intermediate_size": 32768, "vocab_size": 131072,
        "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-", "mamba_head_dim": 64,
        "mamba_num_heads": 256, "n_groups": 8, "ssm_state_size": 256, "conv_kernel": 4, "chunk_size": 128,
        "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-05, "max_position_embeddings": 8192,
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 768, "shared_intermediate_size": 1536, "vocab_size": 100352,
        "num_local_experts": 72, "num_experts_per_tok": 10, "layer_types": _GRANITE, "mamba_n_heads": 128,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12, "logits_scaling": 16, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
        "position_embedding_type": "nope", "normalization_function": "rmsnorm", "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "rope_theta": 10000, "rope_scaling": None, "hidden_act": "silu",
    },
    "falcon-h1-7b": {
        "model_type": "falcon_h1", "hidden_size": 3072, "num_hidden_layers": 44, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 130048,
        "mamba_d_conv": 4, "mamba_d_head": 128, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_rms_norm": False, "mamba_chunk_size": 256,
        "rope_theta": 100000000000.0, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "lfm2-350m": {
        "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 8, "block_ff_dim": 6656, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False,
        "vocab_size": 65536, "norm_eps": 1e-05, "rope_theta": 1000000.0, "max_position_embeddings": 128000,
        "layer_types": [*_LFM2.split(), "full_attention", "conv", "full_attention", "conv"],
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "use_expert_bias": True,
        "conv_L_cache": 3, "conv_bias": False, "vocab_size": 65536, "norm_eps": 1e-05, "rope_theta": 1000000.0,
        "layer_types": ["full_attention" if at in (2, 6, 10, 14, 18, 21) else "conv" for at in range(24)],
        "max_position_embeddings": 128000,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 72, "intermediate_size": 9216, "vocab_size": 163840,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1024, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "num_expert_group": 1, "topk_group": 1,
        "use_grouped_topk": True, "moe_layer_freq": 1, "hidden_act": "silu", "rms_norm_eps": 1e-05,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
            "short_conv_kernel_size": 4,
        },
        "tie_word_embeddings": False, "max_position_embeddings": 1048576,
    },
}  # fmt: skip
