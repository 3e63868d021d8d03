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
