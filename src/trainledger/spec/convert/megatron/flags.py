"""Which of Megatron-LM's arguments change nothing that is accounted for, and which cannot be accounted for at all."""

from __future__ import annotations

import re

# Logging, checkpoints, data files, seeds, restarts, names of a run: by how they begin or end.
_SILENT = re.compile(
    r"(log|tensorboard|wandb|tiktoken|tokenizer|save|load|ckpt|dist-ckpt|async|data|train-data|valid-data|test-data|"
    r"per-split|eval|exit|manual-gc|timing|ft|one-logger|inprocess|rerun|straggler|inference|rl|grpo|langrl|fim|"
    r"distributed|profile|pytorch-profiler|nvtx|record-memory|memory-snapshot|result|error-injection|adlr|num-dataset|"
    r"init-method|weight-decay|start-weight|end-weight|adam|sgd|muon|decoupled|lr|override-opt|override-lr|"
    r"use-checkpoint|dataloader|mid-level|object-storage|te-rng|rng|seed|hysteresis|initial-loss|min-loss|loss-scale|"
    r"check-for|deterministic|no-check|no-mmap|no-one-logger|no-load|no-save|high-priority|app-tag|run-workload|"
    r"enable-gloo|disable-gloo|use-gloo|attention-softmax|world-size|rank|local-rank|config|enable-one|tensorboard|"
    r"mtp-loss|moe-aux|moe-z|moe-router-bias|moe-router-dtype|moe-token-drop|moe-input|moe-per-layer|mscale|yarn|beta|"
    r"barrier|trace|goodput|enable-ft|calc-ft|logger|vocab-extra|use-pytorch|use-mp-args|apply-wd|dump|phase-transition"
    r")(-.*)?|.*-(path|dir|file|interval|iters|samples|warmup.*|seed|timeout.*|name|project|entity)"
)
_ALSO_SILENT = frozenset(
    [
        "accumulate-allreduce-grads-in-fp32",
        "apply-layernorm-1p",
        "apply-query-key-layer-scaling",
        "attention-softmax-in-fp32",
        "auto-detect-ckpt-format",
        "bert-no-binary-head",
        "bf16",
        "calculate-per-token-loss",
        "clone-scatter-output-in-embedding",
        "cross-entropy-fusion-impl",
        "cuda-graph-warmup-steps",
        "ddp-average-in-collective",
        "ddp-bucket-size",
        "ddp-num-buckets",
        "ddp-pad-buckets-for-high-nccl-busbw",
        "delay-wgrad-compute",
        "disable-bf16-reduced-precision-matmul",
        "dist-url",
        "empty-unused-memory-level",
        "enable-experimental",
        "eod-mask-loss",
        "export-te-mcore-model",
        "finetune",
        "fp16",
        "hierarchical-context-parallel-sizes",
        "is-hybrid-model",
        "iteration",
        "mask-prob",
        "master-addr",
        "master-port",
        "max-tokens-to-oom",
        "microbatch-group-size-per-virtual-pipeline-stage",
        "mock-data",
        "moe-enable-deepep",
        "moe-flex-dispatcher-backend",
        "moe-grouped-gemm",
        "moe-hybridep-num-sms",
        "moe-permute-fusion",
        "moe-router-fusion",
        "moe-router-load-balancing-type",
        "moe-router-num-groups",
        "moe-router-padding-for-fp8",
        "moe-router-padding-for-quantization",
        "moe-router-pre-softmax",
        "moe-shared-expert-overlap",
        "moe-token-dispatcher-type",
        "moe-use-legacy-grouped-gemm",
        "no-align-param-gather",
        "no-async-tensor-model-parallel-allreduce",
        "no-bias-dropout-fusion",
        "no-create-attention-mask-in-dataloader",
        "no-data-sharding",
        "no-gradient-reduce-div-fusion",
        "no-initialization",
        "no-persist-layer-norm",
        "no-position-embedding",
        "no-rope-fusion",
        "no-use-tokenizer-model-from-checkpoint-args",
        "norm-epsilon",
        "num-workers",
        "optimizer-cpu-offload-fraction",
        "overlap-p2p-communication-warmup-flush",
        "perform-initialization",
        "recompute-num-layers",
        "reset-attention-mask",
        "reset-position-ids",
        "rotary-base",
        "rotary-seq-len-interpolation-factor",
        "sft",
        "short-seq-prob",
        "split",
        "step-batch-size-schedule",
        "suggested-communication-unit-size",
        "test-mode",
        "train-sync-interval",
        "transformer-impl",
        "trust-remote-code",
        "untie-embeddings-and-output-weights",
        "use-cpu-initialization",
        "use-distributed-optimizer",
        "use-flash-attn",
        "use-mcore-models",
        "use-nccl-ub",
        "use-persistent-ckpt-worker",
        "use-tp-pp-dp-mapping",
        "variable-seq-lengths",
        "verify-integrity",
        "yaml-cfg",
    ]
)
# What makes another model than the decoders that are accounted for, or another way of training, with what it is.
REFUSED = {
    "hybrid-layer-pattern": "layers of state space models are not accounted for",
    "hybrid-override-pattern": "layers of state space models are not accounted for",
    "encoder-num-layers": "an encoder with the decoder is not accounted for",
    "decoder-seq-length": "an encoder with the decoder is not accounted for",
    "bert-no-binary-head": "BERT is an encoder, which is not accounted for",
    "perform-rl-step": "reinforcement learning generates text between its steps, which is not accounted for",
    "model-provider": "the model is another program's",
    "export-kd-cfg": "distillation runs a second model, which is not accounted for",
    "mtp-use-repeated-layer": "one repeated layer of multi-token prediction is not accounted for",
    "moe-latent-size": "experts on a latent are not accounted for",
    "linear-attention-freq": "linear attention is not accounted for",
    "experimental-attention-variant": "experimental attention is not accounted for",
    "heterogeneous-layers-config-path": "layers of different sizes are not accounted for",
    "heterogeneous-layers-config-encoded-json": "layers of different sizes are not accounted for",
    "retro-project-dir": "retrieval is not accounted for",
    "vision-backbone-type": "vision models are not accounted for",
    "moe-layer-recompute": "recomputing experts alone is not accounted for",
    "fine-grained-activation-offloading": "offloading a part of what is kept is not accounted for",
    "cpu-offloading": "offloading a part of what is kept is not accounted for",
    "defer-embedding-wgrad-compute": "keeping the head's inputs and gradients for later is not accounted for",
    "optimizer-cpu-offload": "an optimizer on the host is not accounted for",
}  # fmt: skip

# Programs of Megatron-LM, by a part of their names, whose models are not decoders.
PROGRAMS = {
    "bert": "an encoder", "t5": "an encoder and a decoder", "ict": "a retriever", "retro": "a decoder with retrieval",
    "vision": "a vision model", "vlm": "a vision and language model", "multimodal": "a vision and language model",
    "mimo": "a vision and language model", "mamba": "layers of state space models",
    "hybrid": "layers of state space models",
}  # fmt: skip


def changes_nothing(name: str) -> bool:
    """Whether an argument changes neither memory nor time nor what is trained, as far as they are accounted for.

    >>> changes_nothing("tensorboard-dir"), changes_nothing("num-layers")
    (True, False)
    """
    return name in _ALSO_SILENT or _SILENT.fullmatch(name) is not None
