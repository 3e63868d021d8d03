"""Small runs on one device and on layouts, as tables of a run file, for questions about what to change."""

from typing import Any

from trainledger.spec.calibration import Calibration, KernelTime

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
ACROSS_NODES: Table = {
    "model": {
        "vocab_size": 50304,
        "d_model": 2048,
        "n_layers": 24,
        "attention.n_heads": 16,
        "feed_forward.d_ff": 5632,
        "max_seq_len": 2048,
    },
    "recipe": {"seq_len": 2048, "global_batch": 256, "micro_batch": 2, "tokens": "30B", "precision": "bf16-sharded"},
    "layout": {"shard": 32},
    "cluster": {"device": "a100-sxm-80gb", "count": 32},
}
HERE: Table = {
    "model": {"preset": "teach-10m"},
    "recipe": {"seq_len": 256, "global_batch": 64, "micro_batch": 4, "tokens": "1B"},
}


def a_machine() -> Calibration:
    """A small machine as measuring would describe it."""
    attention: dict[str, Any] = {"dtype": "fp32", "shape": (32, 256, 64), "nbytes": 8 * 10**6}
    kernels = (
        KernelTime(kind="matmul", dtype="fp32", shape=(512, 512, 512), flops=2**28, nbytes=3 * 2**20, seconds=2e-3),
        KernelTime(kind="matmul", dtype="fp32", shape=(2048, 512, 512), flops=2**30, nbytes=9 * 2**20, seconds=6e-3),
        KernelTime(kind="attention", flops=10**9, seconds=1e-2, **attention),
        KernelTime(kind="attention", flops=25 * 10**8, seconds=3e-2, phase="backward", **attention),
        KernelTime(kind="copy", dtype="fp32", shape=(10**6,), flops=0, nbytes=8 * 10**6, seconds=8e-4),
        KernelTime(kind="copy", dtype="fp32", shape=(10**8,), flops=0, nbytes=8 * 10**8, seconds=8e-2),
    )
    return Calibration(
        title="a small machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=2, kernels=kernels,
        operation_seconds=5e-6, memory_nbytes=2 * 10**9, storage_bytes_per_second=10**9,
    )  # fmt: skip
