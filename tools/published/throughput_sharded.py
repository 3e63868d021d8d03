"""FSDP, ZeRO and data parallelism: llm-foundry, torchtitan, FlashAttention-2, nanoGPT, ..., and maxtext on TPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from published_case import Row
from published_runs import TITAN_PRECISIONS, titan_case
from published_sources import TIME
from throughput_case import (
    TimeCase,
    case,
    from_hardware_flops,
    from_palm_flops,
    from_step,
    from_tokens,
    gpt,
    llama,
    number,
)

from trainledger import catalog
from trainledger.spec.device import clock_share
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe


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
    source = TIME["FOUNDRY_H100"] if "H100" in row["hardware"] else TIME["FOUNDRY_A100"]
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
        return case(
            row, TIME["TITAN_H100"], "h100-sxm-96gb-500w", llama(row), recipe, layout, from_tokens, **_meta_device()
        )
    return case(row, TIME["TITAN_A100"], "a100-sxm-80gb", llama(row), recipe, layout, from_tokens)


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
    return case(row, TIME["FMS"], _device(row), llama(row), recipe, Layout(**split), from_tokens)


FUSED_SOFTMAX_KEYS = 2048  # Megatron-LM's megatron/model/fused_softmax.py of 2021 and 2022: beyond, one by one


def flash_case(row: Row) -> TimeCase:
    family, length = row["model_family"], int(row["seq_len"])
    kernel = "efficient" if "(FlashAttention)" in family else "flash" if "-2)" in family else "math"
    recipe = _recipe(
        row, 16384 // length, 2**20 // length, precision="fp16", attention=kernel,
        compile=kernel != "math" or length <= FUSED_SOFTMAX_KEYS, **{"precision.master_weights": True},
    )  # fmt: skip
    return case(
        row, TIME["FLASH"], _device(row), gpt(row, vocab_multiple=8), recipe, Layout(replicate=8), from_palm_flops
    )


def azure_case(row: Row) -> TimeCase:
    recipe = _recipe(
        row, int(row["micro_batch_per_device"]), int(row["global_batch_seqs"]), precision="fp16", attention="math",
        compile=True, dropout=0.1, attention_dropout=0.1, **{"precision.master_weights": True},
    )  # fmt: skip
    layout = Layout(shard=int(row["n_devices"]))
    return case(row, TIME["AZURE"], _device(row), gpt(row), recipe, layout, from_hardware_flops)


def nano_case(row: Row) -> TimeCase:
    devices = int(row["n_devices"])
    total = int(row["global_batch_seqs"] or 12)
    model = gpt(row, **{"feed_forward.bias": False, "attention.bias": False, "norm.bias": False})
    recipe = _recipe(
        row, int(row["micro_batch_per_device"]), total, precision="bf16-mixed",
        attention="math" if devices == 1 else "flash",
    )  # fmt: skip
    return case(row, TIME["NANO"], "a100-sxm-40gb", model, recipe, Layout(replicate=devices), from_step)


def qwen_full_case(row: Row) -> TimeCase | str:
    if "Full" not in row["model_family"]:
        return "adapters over frozen weights: listed with fine-tuning"
    model = llama(row, **{"attention.bias": True, "attention.output_bias": False})
    recipe = _recipe(row, 1, int(row["global_batch_seqs"]), precision="bf16", **{"precision.master_weights": True})
    layout = Layout(shard=int(row["n_devices"]), zero=3)
    return case(row, TIME["QWEN_FULL"], _device(row), model, recipe, layout, from_step)


def maxtext_gpu_case(row: Row) -> TimeCase:
    nodes = int(row["n_devices"]) // 8
    recipe = _recipe(row, 4, 32 * nodes, activation_checkpointing="none", attention="cudnn")
    return case(
        row, TIME["MAXTEXT_GPU"], "h100-sxm", llama(row), recipe, Layout(replicate=nodes, shard=8), from_palm_flops
    )


def jax_case(row: Row) -> TimeCase:
    recipe = _recipe(
        row, int(row["micro_batch_per_device"]), int(row["global_batch_seqs"]), activation_checkpointing="none",
        compile=True, attention="cudnn",
    )  # fmt: skip
    layout = Layout(shard=int(row["n_devices"]))
    return case(row, TIME["JAX_TOOLBOX"], "h100-sxm", llama(row), recipe, layout, from_step)


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
    return case(row, TIME["PYTHIA"], "a100-sxm-40gb", model, recipe, layout, from_tokens)


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


# MaxText/configs/v5p/*.sh: batch of a chip, tensor ranks, whether every block is run again.
_V5P = {32: (7, 4, False), 64: (3, 4, False), 128: (1, 8, False), 256: (1, 8, False), 512: (2, 8, True),
        1024: (2, 8, True)}  # fmt: skip


def scaled_model(billions: int) -> ModelSpec:
    """The model of a global_parameter_scale: powers of two go to heads and MLP first, then to the width, then to layers
    (MaxText/pyconfig.py, from base.yml's width of 2,048, 16 heads of 128, MLP of 7,168 and 16 layers)."""
    thirds, rest = divmod(int(math.log2(billions)), 3)
    heads, width, layers = thirds + (rest > 0), thirds + (rest > 1), thirds
    return from_fields(
        ModelSpec,
        {
            "vocab_size": 32000,
            "d_model": 2048 * 2**width,
            "n_layers": 16 * 2**layers,
            "attention.n_heads": 16 * 2**heads,
            "attention.head_dim": 128,
            "feed_forward.d_ff": 7168 * 2**heads,
            "max_seq_len": 2048,
        },
    )


def tpu_case(row: Row) -> TimeCase | str:
    """A row of any of the three."""
    chips, billions = int(row["n_devices"]), int(row["model_family"].split("-")[1][:-1])
    tensor, again, batch = 1, True, int(row["micro_batch_per_device"] or 0)
    if "v4" in row["source"]:
        source, device = TIME["V4"], "tpu-v4"
        slice_chips = 64 if billions == 22 else 192
        model = from_fields(
            ModelSpec,
            {
                "vocab_size": 32000,
                "d_model": int(row["d_model"]),
                "n_layers": int(row["n_layers"]),
                "attention.n_heads": int(row["n_heads"]),
                "attention.head_dim": 256,
                "feed_forward.d_ff": int(row["d_ff"]),
                "max_seq_len": 2048,
                "feed_forward.gated": False,
                "feed_forward.activation": "relu",
            },
        )
    elif "v5e" in row["source"]:
        source, device, slice_chips, model = TIME["V5E"], "tpu-v5e", 256, scaled_model(billions)
        if billions == 128:
            tensor, again = 16, False
    else:
        source, device, model = TIME["V5P"], "tpu-v5p", scaled_model(billions)
        batch, tensor, again = _V5P[billions]
        slices = 1 if int(row["id"][1:]) % 2 else 2
        slice_chips = chips // slices
    slices = chips // slice_chips
    layout = Layout(replicate=slices, shard=slice_chips // tensor, tensor=tensor)
    recipe = from_fields(Recipe, {
        "seq_len": 2048, "micro_batch": batch * tensor, "global_batch": batch * chips, "steps": 1,
        "precision": "bf16-sharded", "attention": "flash", "activation_checkpointing": "full" if again else "none",
        "compile": True,
    })  # fmt: skip
    return case(row, source, device, model, recipe, layout, from_palm_flops, devices_per_node=slice_chips)
