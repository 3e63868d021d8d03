"""Small runs on one device and on layouts, as tables of a run file, for questions about what to change."""

from typing import Any

Table = dict[str, dict[str, Any]]

ALONE: Table = {
    "model": {"preset": "gpt2"},
    "recipe": {"seq_len": 1024, "global_batch": 64, "micro_batch": 8, "tokens": "10B", "precision": "bf16-mixed"},
    "cluster": {"device": "h100-sxm", "price_per_device_hour": 2.5},
}
SHARDED: Table = {
    "model": {"preset": "llama-3.2-1b"},
    "recipe": {
        "seq_len": 4096, "global_batch": 256, "micro_batch": 1, "tokens": "1T", "precision": "bf16-sharded",
        "activation_checkpointing": "selective",
    },
    "layout": {"replicate": 2, "shard": 8},
    "cluster": {"device": "h100-sxm", "count": 16},
}  # fmt: skip
MESH: Table = {
    "model": {"preset": "llama-3-8b"},
    "recipe": {
        "seq_len": 8192, "global_batch": 64, "micro_batch": 1, "tokens": "1T", "precision": "bf16-sharded",
    },
    "layout": {"shard": 4, "tensor": 4, "pipeline": 4, "sequence_parallel": True, "zero": 2},
    "cluster": {"device": "a100-sxm-80gb", "count": 64},
}  # fmt: skip
TOO_LARGE: Table = {
    "model": {"preset": "llama-3.2-1b"},
    "recipe": {"seq_len": 8192, "global_batch": 32, "micro_batch": 8, "tokens": "1B", "precision": "bf16-mixed"},
    "cluster": {"device": "a100-sxm-40gb"},
}
