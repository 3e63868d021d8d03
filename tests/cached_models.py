"""A small model of each kind that a KV cache or its account tells apart."""

SIZES = {
    "vocab_size": 31,
    "d_model": 32,
    "n_layers": 3,
    "attention.n_heads": 4,
    "feed_forward.d_ff": 48,
    "max_seq_len": 24,
}
LATENT = {
    "attention": "latent",
    "attention.kv_rank": 12,
    "attention.q_rank": 10,
    "attention.nope_head_dim": 6,
    "attention.rope_head_dim": 4,
    "attention.v_head_dim": 8,
}
KINDS = {
    "multi-head": {},
    "grouped": {"attention.n_kv_heads": 2, "attention.qk_norm": "head", "attention.bias": True},
    "multi-query": {"attention.n_kv_heads": 1, "block": "parallel", "positions.dim": 4},
    "latent": LATENT,
    "latent without query rank": LATENT | {"attention.q_rank": None, "positions.interleaved": True},
    # So many heads that no two keys have equal scores, of which ReLU leaves nothing.
    "chosen keys": LATENT
    | {"attention.indexer.n_heads": 20, "attention.indexer.head_dim": 6, "attention.indexer.top_k": 5},
    "shared choices": LATENT
    | {"attention.indexer.n_heads": 20, "attention.indexer.head_dim": 6, "attention.indexer.top_k": 5}
    | {"attention.indexer.every": 2},
    "attention.window": {"attention.window": 5},
    "local and global": {"attention.window": 5, "attention.global_every": 2, "positions.local_theta": 100.0},
    "capped": {"attention.softcap": 5.0, "logit_softcap": 5.0, "attention.window": 7, "attention.global_every": 3},
    "sinks": {"attention.sinks": True, "attention.n_kv_heads": 2},
    "alibi": {"positions": "alibi"},
    "learned": {
        "positions": "learned",
        "positions.extra_rows": 2,
        "norm": "layernorm",
        "norm.bias": True,
        "tie_embeddings": True,
    },
    "experts": {
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.per_token": 2,
        "feed_forward.n_shared": 1,
        "feed_forward.n_dense_layers": 1,
    },
    "mamba-2": {
        "layers": "RAB", "mixer": "mamba-2", "mixer.n_heads": 4, "mixer.head_dim": 6, "mixer.state": 5,
        "mixer.n_groups": 2, "mixer.chunk": 4, "attention.gated": True,
    },
    "gated delta": {
        "layers": "M*-", "mixer": "gated-delta", "mixer.n_heads": 4, "mixer.n_key_heads": 2, "mixer.key_dim": 6,
        "mixer.value_dim": 5,
    },
    "kimi": LATENT | {"layers": "RRA", "mixer": "kimi-delta", "mixer.n_heads": 2, "positions": "none"},
    "short convolution": {"layers": "RA", "mixer": "short-conv", "mixer.bias": True},
}  # fmt: skip
