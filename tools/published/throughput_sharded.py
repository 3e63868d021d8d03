"""FSDP, ZeRO and plain data parallelism: llm-foundry, torchtitan, fms-fsdp, FlashAttention-2, maxtext, nanoGPT, ..."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from published_case import Row
from throughput_case import (
    TimeCase,
    TimeSource,
    case,
    from_hardware_flops,
    from_palm_flops,
    from_step,
    from_tokens,
    gpt,
    llama,
    number,
)
from torchtitan_runs import TITAN_PRECISIONS, titan_case

from trainledger import catalog
from trainledger.spec.device import clock_share
from trainledger.spec.layout import Layout
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe

HDR_8 = (("network", "hdr"),)
NDR_8 = (("network", "ndr"),)
ROCE_1600 = (("network", "roce-200"),)  # 1,600 Gb/s for a node of eight
ROCE_3200 = (("network", "roce-400"),)

_FOUNDRY = (
    "FSDP: parameters gathered in bf16 block by block, gradients reduced in fp32 (Composer's MP=DEFAULT); "
    "SHARD_GRAD_OP keeps gathered parameters from forward to backward",
    "flash attention in Triton, late 2022, which has about half the speed of FlashAttention-2: modelled as "
    "`efficient`; "
    "biases everywhere, low-precision layer norms, no dropout, eager "
    "PyTorch 1.13; cross entropy in one kernel on 16-bit logits; AdamW",
)  # fmt: skip
FOUNDRY_A100 = TimeSource(
    name="mosaicml/llm-foundry:scripts/train/benchmarking/README.md [A100]",
    title="llm-foundry, A100",
    convention="tokens/s and device",
    network=ROCE_1600,
    assumed=(*_FOUNDRY, "1,600 Gb/s between nodes, as the tables say"),
)
FOUNDRY_H100 = TimeSource(
    name="mosaicml/llm-foundry:scripts/train/benchmarking/README.md [H100]",
    title="llm-foundry, H100",
    convention="tokens/s and device",
    network=ROCE_3200,
    assumed=(
        *_FOUNDRY,
        "3,200 Gb/s between nodes (not stated)",
        "fp8 rows: linear layers in fp8, a scale per tensor, of what FSDP gathers in bf16; Transformer Engine casts "
        "in kernels of norms and GELU, modelled as compile = true",
    ),
)
_TITAN = (
    "as in docs/published_memory.md; compiled rows with compile = true, selective recomputation included",
    "the device is Meta's H100 of 96 GB: 2.4 TB/s, limited to 500 W of 700 W, which leaves 0.86 of the clock (the "
    "cube root of the power, assuming that 150 W of either go elsewhere)",
    "400 Gb/s for each GPU",
    "rows with asynchronous tensor parallelism: overlap = tensor",
)  # fmt: skip
TITAN_H100 = TimeSource(
    name="pytorch/torchtitan [H100]",
    title="torchtitan, H100",
    convention="tokens/s and device",
    network=NDR_8,
    assumed=_TITAN,
)
TITAN_A100 = TimeSource(
    name="pytorch/torchtitan:docs/performance.md @ commit 0413364",
    title="torchtitan, A100",
    convention="tokens/s and device",
    network=HDR_8,
    assumed=(
        "as in docs/published_memory.md; torch.compile is not stated: assumed off",
        "`selective layer` recomputes every second block whole",
        "200 Gb/s for each GPU (not stated)",
    ),
)
FMS = TimeSource(
    name="foundation-model-stack/fms-fsdp:README.md",
    title="fms-fsdp Llama 2, A100 and H100",
    convention="tokens/s and device",
    network=ROCE_1600,
    assumed=(
        "FSDP with compile, all in bf16 but fp32 shards; hybrid sharding: shards within a node, copies over nodes",
        "selective recomputation: every third block of the 13B on A100, every fourth on H100 (from its MFU and HFU)",
        "1,600 Gb/s between nodes of A100 and of H100 (not stated)",
    ),
)
FLASH = TimeSource(
    name="FlashAttention-2 paper Table 1 (arXiv 2307.08691)",
    title="FlashAttention-2 Table 1, A100",
    convention="model TFLOP/s, 6N + 12 L d T for a token",
    assumed=(
        "data parallel on eight GPUs, no recomputation; fused MLP, norm and cross entropy (modelled as compile = true)",
        "16,384 tokens in a micro-batch, 512 sequences of 2,048 or 128 of 8,192 in a step (not stated)",
        "without FlashAttention: Megatron-LM's unfused attention, softmax one kernel for up to 2,048 keys and "
        "several operations beyond (modelled as compile = false)",
        "rows of FlashAttention's first version are modelled as `efficient` (about half the speed of the second)",
    ),
)
AZURE = TimeSource(
    name="deepspeedai/DeepSpeed:docs/_posts/2022-07-26-deepspeed-azure.md",
    title="DeepSpeed ZeRO-3 on Azure, A100",
    convention="hardware TFLOP/s by the formula of Narayanan et al., recomputation in it",
    network=HDR_8,
    assumed=(
        "unfused attention with fused softmax kernels (Megatron-DeepSpeed), dropout 0.1, every block recomputed",
        "a vocabulary of 51,200, tied; offloading of activations and optimizer is fully overlapped (not modelled)",
    ),
    reason=(
        "the larger the model, the more of its state and activations goes over the host, which is not modelled: "
        "175B, which needs no offload, is within 3 %, 2T is predicted a quarter too fast"
    ),
)
NANO = TimeSource(
    name="karpathy/nanoGPT",
    title="nanoGPT GPT-2 124M, A100",
    convention="printed seconds of a step",
    assumed=(
        "data parallel, bf16 autocast, flash attention, no dropout, no biases; 480 sequences of 1,024 in a step",
        "one device: a step of 12 sequences with one forward (bench.py); unfused attention, since the comparison is "
        "from before the repository used PyTorch's fused attention (from memory of its history)",
    ),
)
QWEN_FULL = TimeSource(
    name="QwenLM/Qwen:README.md (Profiling of Memory and Speed)",
    title="Qwen full fine-tuning, A100",
    convention="printed seconds of a step",
    assumed=(
        "as in docs/published_memory.md: bf16 with a master copy, every block recomputed, eight micro-batches of one "
        "sequence; two devices gather parameters (ZeRO-3)",
        "the flash attention and the fused norms and rotations of its repository are not all said to be installed",
    ),
    reason="a step of one short sequence waits for its program: Hugging Face's modules under DeepSpeed launch more, "
    "and each launch later, than the ledger's operations at a calibration's pace",
)
MAXTEXT_GPU = TimeSource(
    name="AI-Hypercomputer/maxtext:src/maxtext/configs/gpu/a3/llama_2_7b/README.md",
    title="maxtext Llama 2 7B, H100",
    convention="model TFLOP/s, 6N + 12 L d T for a token (maxtext of early 2024: causality not halved)",
    network=(("network", "ethernet-100"), ("network_bytes_per_second", 25_000_000_000)),
    assumed=(
        "sharded over the eight GPUs of a node, copies over nodes; 4 sequences of 4,096 on a device; remat "
        "minimal_flash (all matmuls kept) modelled as no recomputation; cuDNN's attention (cudnn_flash_te); XLA's "
        "fusion modelled as compile = true "
        "(MaxText/configs/a3/llama_2_7b/2vm.sh)",
        "GCP A3: eight 200 Gb/s adapters to a node, over TCP",
    ),
    reason=(
        "on one node it is within 10 %; over nodes XLA sums gradients of copies after the backward pass, which is "
        "modelled as overlapped"
    ),
)
JAX_TOOLBOX = TimeSource(
    name="NVIDIA/JAX-Toolbox:docs/frameworks/maxtext/README.md",
    title="JAX-Toolbox maxtext, H100",
    convention="printed seconds of a step",
    assumed=("as maxtext's own",),
)
PYTHIA = TimeSource(
    name="Pythia paper Table (arXiv 2304.01373)",
    title="Pythia, A100 40 GB",
    convention="GPU-hours of 143,000 steps, computed from the time of a step by the paper",
    network=(("network", "efa-v1"),),
    assumed=(
        "sizes of micro-batches, tensor ranks, full recomputation and flash attention as the repository's files have "
        "them, FlashAttention's first version modelled as `efficient`; 70M and 1B: unfused attention, its softmax "
        "one kernel, modelled as compile = true",
        "ZeRO-1; nodes of eight A100 40 GB with 400 Gb/s of EFA (AWS p4d, not stated)",
    ),
    reason="the repository's files ask for a synchronization of device and program at every block "
    "(synchronize-each-layer), which is not modelled",
)
SOURCES = (
    FOUNDRY_A100, FOUNDRY_H100, TITAN_H100, TITAN_A100, FMS, FLASH, AZURE, NANO, QWEN_FULL, MAXTEXT_GPU, JAX_TOOLBOX,
    PYTHIA,
)  # fmt: skip


def _device(row: Row) -> str:
    if "H100" in row["hardware"]:
        return "h100-sxm"
    return "a100-sxm-40gb" if "40GB" in row["hardware"] else "a100-sxm-80gb"


def _recipe(row: Row, batch: int, total: int, **others: object) -> Recipe:
    fields = {
        "seq_len": int(row["seq_len"]), "micro_batch": batch, "global_batch": total, "steps": 1,
        "precision": "bf16-sharded", "attention": "flash", "compile": row["compile"] == "1",
        "activation_checkpointing": row["activation_ckpt"] or "none",
    }  # fmt: skip
    return from_fields(Recipe, {**fields, **others})  # type: ignore[arg-type]


def foundry_case(row: Row) -> TimeCase:
    source = FOUNDRY_H100 if "H100" in row["hardware"] else FOUNDRY_A100
    layout = Layout(
        shard=int(row["n_devices"]), zero=3, reshard_after_forward=False if row["sharding"] == "zero2" else None
    )  # fmt: skip
    fp8 = {"precision": "fp8-tensorwise-sharded", "compile": True} if row["precision"] == "fp8" else {}
    recipe = _recipe(
        row, int(row["micro_batch_per_device"]), int(row["global_batch_seqs"]), attention="efficient", **fp8,
        **{"loss.upcast": False},
    )  # fmt: skip
    return case(row, source, _device(row), gpt(row), recipe, layout, from_tokens)


META_CLOCK = clock_share(500, 700)  # what a limit of 500 W of 700 W leaves of the clock


def _meta_device() -> dict[str, Any]:
    """What sets Meta's device apart from what its calibration, the H100's, was fitted for."""
    peaks = catalog.device("h100-sxm").peak_flops_per_second
    return {
        "peak_flops_per_second": {name: rate * META_CLOCK for name, rate in peaks.items()},
        "efficiency": catalog.efficiency("h100-sxm"),
    }


def titan_time_case(row: Row) -> TimeCase | str:
    """A row of torchtitan on H100 or A100."""
    if not ("H100" in row["hardware"] or "A100" in row["hardware"]):
        return "a device without a calibration"
    precision = TITAN_PRECISIONS[row["precision"]]
    if row["id"] == "R1109":
        return "throughput unchanged from the row before, no number of its own"
    if (row["model_family"] == "Llama3-405B" and row["pp"] != "1") or row["cp"] not in ("", "1"):
        known = titan_case(row)
        layout, batch, total = known.run.layout, known.run.device_batch, known.run.recipe.global_batch
    else:
        tensor = number(row, "tp")
        if not row["micro_batch_per_device"]:
            return "no batch is stated"
        layout = Layout(shard=int(row["n_devices"]) // tensor, tensor=tensor, sequence_parallel=tensor > 1)
        batch, total = int(row["micro_batch_per_device"]), int(row["global_batch_seqs"])
    every = 2 if "selective layer" in row["notes"] else 1
    kept = {"activation_checkpointing": "full", "activation_checkpointing.every": 2} if every > 1 else {}
    if "async TP" in row["notes"] or "AsyncTP" in row["notes"]:
        layout = replace(layout, overlap=("gradients", "tensor"))
    recipe = _recipe(row, batch, total, precision=precision, **kept)
    if "H100" in row["hardware"]:
        return case(row, TITAN_H100, "h100-sxm-96gb-500w", llama(row), recipe, layout, from_tokens, **_meta_device())
    return case(row, TITAN_A100, "a100-sxm-80gb", llama(row), recipe, layout, from_tokens)


def fms_case(row: Row) -> TimeCase | str:
    if not row["global_batch_seqs"]:
        return "a whole run, listed with the other whole runs"
    devices = int(row["n_devices"])
    split: dict[str, Any] = {"replicate": devices // 8, "shard": 8} if row["sharding"] == "hsdp" else {"shard": devices}
    kept = {}
    if row["activation_ckpt"] == "selective":
        kept = {
            "activation_checkpointing": "full",
            "activation_checkpointing.every": 3 if "A100" in row["hardware"] else 4,
        }
    recipe = _recipe(row, int(row["micro_batch_per_device"]), int(row["global_batch_seqs"]), **kept)
    return case(row, FMS, _device(row), llama(row), recipe, Layout(**split), from_tokens)


FUSED_SOFTMAX_KEYS = 2048  # Megatron-LM's megatron/model/fused_softmax.py of 2021 and 2022: beyond, one by one


def flash_case(row: Row) -> TimeCase:
    family, length = row["model_family"], int(row["seq_len"])
    kernel = "efficient" if "(FlashAttention)" in family else "flash" if "-2)" in family else "math"
    recipe = _recipe(
        row, 16384 // length, 2**20 // length, precision="fp16", attention=kernel,
        compile=kernel != "math" or length <= FUSED_SOFTMAX_KEYS, **{"precision.master_weights": True},
    )  # fmt: skip
    return case(row, FLASH, _device(row), gpt(row, vocab_multiple=8), recipe, Layout(replicate=8), from_palm_flops)


def azure_case(row: Row) -> TimeCase:
    recipe = _recipe(
        row, int(row["micro_batch_per_device"]), int(row["global_batch_seqs"]), precision="fp16", attention="math",
        compile=True, dropout=0.1, attention_dropout=0.1, **{"precision.master_weights": True},
    )  # fmt: skip
    layout = Layout(shard=int(row["n_devices"]))
    return case(row, AZURE, _device(row), gpt(row), recipe, layout, from_hardware_flops)


def nano_case(row: Row) -> TimeCase:
    devices = int(row["n_devices"])
    total = int(row["global_batch_seqs"] or 12)
    model = gpt(row, **{"feed_forward.bias": False, "attention.bias": False, "norm.bias": False})
    recipe = _recipe(
        row, int(row["micro_batch_per_device"]), total, precision="bf16-mixed",
        attention="math" if devices == 1 else "flash",
    )  # fmt: skip
    return case(row, NANO, "a100-sxm-40gb", model, recipe, Layout(replicate=devices), from_step)


def qwen_full_case(row: Row) -> TimeCase | str:
    if "Full" not in row["model_family"]:
        return "adapters over frozen weights: listed with fine-tuning"
    model = llama(row, **{"attention.bias": True, "attention.output_bias": False})
    recipe = _recipe(row, 1, int(row["global_batch_seqs"]), precision="bf16", **{"precision.master_weights": True})
    layout = Layout(shard=int(row["n_devices"]), zero=3)
    return case(row, QWEN_FULL, _device(row), model, recipe, layout, from_step)


def maxtext_gpu_case(row: Row) -> TimeCase:
    nodes = int(row["n_devices"]) // 8
    recipe = _recipe(row, 4, 32 * nodes, activation_checkpointing="none", attention="cudnn")
    return case(row, MAXTEXT_GPU, "h100-sxm", llama(row), recipe, Layout(replicate=nodes, shard=8), from_palm_flops)


def jax_case(row: Row) -> TimeCase:
    recipe = _recipe(
        row, int(row["micro_batch_per_device"]), int(row["global_batch_seqs"]), activation_checkpointing="none",
        compile=True, attention="cudnn",
    )  # fmt: skip
    layout = Layout(shard=int(row["n_devices"]))
    return case(row, JAX_TOOLBOX, "h100-sxm", llama(row), recipe, layout, from_step)


# The repository's models/*.yml: sequences of a micro-batch and tensor ranks, by layers and width.
_PYTHIA_RUNS = {
    (6, 512): (32, 1), (12, 768): (32, 1), (24, 1024): (32, 1), (16, 2048): (16, 1), (24, 2048): (16, 1),
    (32, 2560): (16, 1), (32, 4096): (8, 2), (36, 5120): (8, 4),
}  # fmt: skip


def pythia_case(row: Row) -> TimeCase:
    size = int(row["n_layers"]), int(row["d_model"])
    batch, tensor = _PYTHIA_RUNS[size]
    heads = size[1] // int(row["n_heads"])
    model = gpt(row, block="parallel", positions="rope", tie_embeddings=False, **{"positions.dim": heads // 4})
    written_out = size in ((6, 512), (16, 2048))
    recipe = _recipe(
        row, batch, int(row["global_batch_seqs"]), precision="fp16", compile=written_out,
        activation_checkpointing="full", attention="math" if written_out else "efficient",
        **{"precision.master_weights": True},
    )  # fmt: skip
    layout = Layout(shard=int(row["n_devices"]) // tensor, zero=1, tensor=tensor)
    return case(row, PYTHIA, "a100-sxm-40gb", model, recipe, layout, from_tokens)


def sharded_time_case(row: Row) -> TimeCase | str:
    """A row of any of these sources."""
    source = row["source"]
    for beginning, tell in _TOLD.items():
        if beginning in source:
            return tell(row)
    return "not predicted"


_TOLD = {
    "llm-foundry": foundry_case, "torchtitan": titan_time_case, "fms-fsdp": fms_case, "FlashAttention-2": flash_case,
    "deepspeed-azure": azure_case, "nanoGPT:README": nano_case, "nanoGPT/issues/110": nano_case,
    "QwenLM": qwen_full_case, "gpu/a3/llama_2_7b": maxtext_gpu_case, "JAX-Toolbox": jax_case,
    "Pythia paper": pythia_case,
}  # fmt: skip
