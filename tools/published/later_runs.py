"""The facts of November 2026 as runs: rows of `facts_2026_11.csv` that no constant of the catalog was fitted on.

What a row leaves open is assumed for all rows of its source alike, in words, in the table `later` of ``sources.toml``.
A row that cannot be modelled has a reason. Nothing here is fitted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from published_case import Row
from published_sources import LATER, LaterSource

from trainledger import catalog
from trainledger.answers.load import load
from trainledger.spec.convert import trainers
from trainledger.spec.convert.megatron import from_arguments, from_values
from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run
from trainledger.spec.units import GIB

FACTS = Path(__file__).parent / "facts_2026_11.csv"
STEP, ALLOCATED, RESERVED = "step", "allocated", "reserved"
Table = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class LaterRun:
    """A row as a run on its device; ``measured`` is in seconds of a step, or in bytes where ``figure`` is of memory."""

    row: Row
    source: LaterSource
    run: Run
    device: Device
    figure: str
    measured: float

    @property
    def name(self) -> str:
        return self.row["id"]


class NotModelledError(Exception):
    """Why a row is not modelled."""


# By the beginning of a device's name.
_DEVICES = {
    "A100": "a100-sxm-80gb", "B200": "b200", "B300": "b300", "GB200": "gb200", "GB300": "gb300", "H100": "h100-sxm",
    "H200": "h200", "MI300X": "mi300x", "MI325X": "mi325x", "MI350X": "mi350x", "MI355X": "mi355x",
    "TPU v5p": "tpu-v5p", "TPU v6e": "tpu-v6e", "TPU v7x": "tpu-v7x",
}  # fmt: skip
_QWEN3_235B = {
    "preset": "qwen3-30b-a3b", "d_model": 4096, "n_layers": 94, "attention.n_heads": 64, "feed_forward.d_ff": 12288,
    "feed_forward.expert_d_ff": 1536,
}  # fmt: skip
_GPT3 = {
    "vocab_size": 50304, "d_model": 12288, "n_layers": 96, "norm": "layernorm", "norm.bias": True,
    "attention.n_heads": 96, "attention.bias": True, "feed_forward.d_ff": 49152, "feed_forward.gated": False,
    "feed_forward.activation": "gelu_tanh", "feed_forward.bias": True, "positions": "learned", "max_seq_len": 2048,
    "tie_embeddings": True,
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "qwen3-235b-a22b": _QWEN3_235B, "gpt3-175b": _GPT3, "gemma3-12b": {"preset": "gemma-3-12b"},
    "deepseek-v3": {"preset": "deepseek-v3"}, "kimi-k2": {"preset": "kimi-k2"},
    "llama2-70b": {"preset": "llama-2-70b"}, "llama3-8b": {"preset": "llama-3.1-8b"},
    "llama3-70b": {"preset": "llama-3.1-70b"}, "llama3.1-405b": {"preset": "llama-3.1-405b"},
    **{name: {"preset": name} for name in ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "mixtral-8x7b",
                                           "mixtral-8x22b")},
}  # fmt: skip


def _model(row: Row, **changed: Any) -> dict[str, Any]:
    if row["model"] not in _MODELS:
        raise NotModelledError(f"{row['model']}: the spec or the catalog does not have it")
    length = max(int(row["seq_len"]), 4096)
    return {**_MODELS[row["model"]], "max_seq_len": length, **changed}


def _ways(row: Row, name: str) -> int:
    """The ranks of a kind that a row names, 1 where it names none."""
    named = re.search(rf"(?<!\w){name} (\d+)", row["layout"])
    return max(1, int(named[1])) if named else 1


def _device(row: Row) -> str:
    for chip in ("h20", "h800", "a800"):  # what a script of ms-swift says that it ran on
        if re.search(rf"\b{chip}\b", row["notes"].lower()):
            return {"h800": "h800-sxm", "a800": "a100-sxm-80gb"}.get(chip, chip)
    names = [name for beginning, name in _DEVICES.items() if row["device"].startswith(beginning)]
    if not names or names[-1] not in catalog.device_names():
        raise NotModelledError(f"{row['device']}: the catalog does not have it")
    return names[-1]


def _stated(row: Row, *names: str) -> None:
    absent = [name.replace("_", " ") for name in names if not row[name]]
    if absent:
        raise NotModelledError(f"{', '.join(absent)} not stated")


# Sizes of SimuMax's cases as Megatron-LM's arguments.
_LATENT = {
    "num-attention-heads": 128, "multi-latent-attention": True, "q-lora-rank": 1536, "kv-lora-rank": 512,
    "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128, "qk-layernorm": True, "moe-grouped-gemm": True,
    "moe-token-dispatcher-type": "alltoall", "moe-expert-capacity-factor": 1.0, "moe-permute-fusion": True,
    "moe-pad-expert-input-to-capacity": True, "moe-aux-loss-coeff": 0.001,
}  # fmt: skip
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "llama3-70b": {"ffn-hidden-size": 28672, "num-attention-heads": 64, "num-query-groups": 8, "vocab-size": 128256},
    "llama3.1-405b": {"ffn-hidden-size": 53248, "num-attention-heads": 128, "num-query-groups": 16,
                      "vocab-size": 128256},
    "deepseek-v2": {**_LATENT, "ffn-hidden-size": 12288, "vocab-size": 102400, "num-experts": 160,
                    "moe-router-topk": 6, "moe-ffn-hidden-size": 1536, "moe-shared-expert-intermediate-size": 3072},
    "deepseek-v3": {**_LATENT, "ffn-hidden-size": 18432, "vocab-size": 129280, "num-experts": 256,
                    "moe-router-topk": 8, "moe-ffn-hidden-size": 2048, "moe-shared-expert-intermediate-size": 2048},
}  # fmt: skip
_MEGATRON = {
    "train-iters": 50, "bf16": True, "swiglu": True, "disable-bias-linear": True, "normalization": "RMSNorm",
    "position-embedding-type": "rope", "untie-embeddings-and-output-weights": True, "attention-dropout": 0.0,
    "hidden-dropout": 0.0, "transformer-impl": "transformer_engine", "use-mcore-models": True,
    "use-distributed-optimizer": True, "cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "te",
}  # fmt: skip


def _simumax(row: Row) -> Table:
    sizes, layers = _ARGUMENTS[row["model"]], int(row["layers"])
    arguments = {
        **_MEGATRON, **sizes, "num-layers": layers, "hidden-size": int(row["hidden"]),
        "seq-length": int(row["seq_len"]), "max-position-embeddings": int(row["seq_len"]),
        "micro-batch-size": int(row["micro_batch"]), "global-batch-size": int(row["global_batch"]),
        "tensor-model-parallel-size": _ways(row, "tp"), "sequence-parallel": _ways(row, "tp") > 1,
        "pipeline-model-parallel-size": _ways(row, "pp"), "context-parallel-size": _ways(row, "cp"),
        "cp-comm-type": "a2a",
    }  # fmt: skip
    if "num-experts" in sizes:
        arguments |= {
            "expert-model-parallel-size": _ways(row, "ep"), "moe-layer-freq": f"([0]*1+[1]*{layers - 1})",
        }  # fmt: skip
    else:
        arguments["group-query-attention"] = True
    read = from_values({name: value for name, value in arguments.items() if value is not False}, {},
                       program="pretrain_gpt.py")  # fmt: skip
    return from_arguments(read, devices=int(row["count"])).table


def _precision(row: Row) -> dict[str, Any]:
    printed = row["precision"].lower()
    for name, words in {"mxfp8": ("mxfp8", "fp8-mx"), "nvfp4": ("nvfp4",)}.items():
        if printed.startswith(words):
            return {"kind": name, "weight_caching": True}
    if printed.startswith("fp8"):
        return {"kind": "fp8-tensorwise", "weight_caching": True}
    return {"kind": "bf16"}


def _nemo(row: Row) -> Table:
    """NVIDIA's recipes of Megatron Core, as `throughput_nemo` has those of dense models."""
    _stated(row, "seq_len", "global_batch", "micro_batch")
    tensor, stages, context, sharded = (_ways(row, name) for name in ("tp", "pp", "cp", "fsdp"))
    layers = int(row["layers"] or 1)
    chunks = _ways(row, "vp") * stages
    data = int(row["count"]) // (tensor * stages * context)
    layout: dict[str, Any] = {
        "shard": data, "zero": 3 if sharded > 1 else 1, "tensor": tensor, "pipeline": stages, "context": context,
        "expert": _ways(row, "ep"), "overlap": ["gradients", "parameters", *(["tensor"] if tensor > 1 else [])],
    }  # fmt: skip
    if tensor > 1:
        layout |= {"sequence_parallel": True, "sequence_gather": "again"}
    if chunks > stages:
        layout |= {"schedule": "interleaved", "virtual_stages": chunks // stages}
    if layers % chunks:
        layout["stage_layers"] = _uneven(layers, chunks)
    recipe = {
        "seq_len": int(row["seq_len"]), "micro_batch": int(float(row["micro_batch"])), "steps": 1,
        "global_batch": int(row["global_batch"]), "compile": True,
        "attention": "flash" if "gpt-oss" in row["model"] else "cudnn",  # cuDNN's kernels have no sinks in PyTorch
        "precision": {**_precision(row), "master_weights": True},
    }  # fmt: skip
    if sharded > 1:
        recipe["precision"].pop("weight_caching", None)
    changed: dict[str, Any] = {"vocab_multiple": 128 * tensor}
    if "deepseek" in row["model"] and (layers % chunks or tensor > 1):
        changed["n_mtp_layers"] = 0
    return {"model": _model(row, **changed), "recipe": recipe, "layout": layout}


def _uneven(layers: int, chunks: int) -> list[int]:
    if (layers + 2) % chunks == 0:
        inner = (layers + 2) // chunks
        return [inner - 1, *[inner] * (chunks - 2), inner - 1]
    return [layers // chunks + (place < layers % chunks) for place in range(chunks)]


def _mlperf(row: Row) -> Table:
    _stated(row, "micro_batch")
    if " or " in row["layout"] or " or " in row["precision"]:
        raise NotModelledError("one of several layouts or formats, which its log does not tell")
    if float(row["micro_batch"]) < 1:
        raise NotModelledError("its layout is not that of its batch")
    table = _nemo(row)
    table["recipe"]["cuda_graphs"] = True
    if row["model"] == "llama2-70b":
        table["recipe"]["precision"] = _precision(row)
        table["recipe"]["lora"] = {"rank": 16, "targets": ["attention"], "dropout": 0.1}
    return table


# What the workloads that the pages name set beside the rows (MaxText's benchmarks/maxtext_trillium_model_configs.py and
# configs/tpu/v5p/gpt3_175b at e591f30): num_vocab_tiling of Gemma 3's, places of experts, formats, and layouts.
_TILES = {"gemma3-12b": 16}
_DROPPED = {"kind": "capacity", "factor": 1.25}
_8X22B = {
    "seq_len": "4096", "layout": "fsdp; ep 4",
    "recompute": "custom decoder_layer_input=offload out_proj=offload query_proj=offload key_proj=offload "
                 "value_proj=offload",
}  # fmt: skip


def _maxtext(row: Row) -> Table:
    row = row | _8X22B if row["model"] == "mixtral-8x22b" else row
    row = row | {"precision": "int8"} if row["id"] == "TT022" else row
    _stated(row, "seq_len", "global_batch")
    chips, slices = int(row["count"]), 2 if "2 slices" in row["layout"] else 1
    if not row["precision"].startswith("bf16"):
        raise NotModelledError("matmuls in int8 or fp8 of which a TPU's format is not stated")
    policy, *named = row["recompute"].split() or ["full"]
    keys = {"remat_policy": policy} | dict(each.split("=") for each in named)
    read = trainers.from_values(keys, program="MaxText").table["recipe"]
    # The batch is that of the printed line: Llama 2 70B's workload has three sequences on each chip, its log two.
    printed = re.search(r"([\d.]+) tokens/s per device", row["notes"])
    tokens = (
        float(printed[1]) * float(row["value"]) if printed else int(row["global_batch"]) / chips * int(row["seq_len"])
    )
    micro_batch = round(tokens / int(row["seq_len"]))
    recipe = {
        "seq_len": int(row["seq_len"]), "micro_batch": micro_batch, "steps": 1, "global_batch": micro_batch * chips,
        "precision": "bf16" if row["model"] == "mixtral-8x22b" else "bf16-sharded", "attention": "flash",
        "compile": True, "activation_checkpointing": read["activation_checkpointing"],
    }  # fmt: skip
    if tiles := _TILES.get(row["model"]):
        recipe["loss"] = {"kind": "chunked", "chunks": tiles}
    if row["model"].startswith("mixtral"):
        recipe["expert_dispatch"] = _DROPPED
    layout = {"replicate": slices, "shard": chips // slices, "expert": _ways(row, "ep")}
    return {"model": _model(row), "recipe": recipe, "layout": layout, "cluster": {"devices_per_node": chips // slices}}


def _automodel(row: Row) -> Table:
    sharded, stages = _ways(row, "fsdp"), _ways(row, "pp")
    tensor = _ways(row, "tp")
    recipe: dict[str, Any] = {
        "seq_len": int(row["seq_len"]), "micro_batch": int(row["micro_batch"]), "steps": 1,
        "global_batch": int(row["global_batch"]), "precision": "bf16-sharded", "compile": True, "grad_clip": "none",
        "attention": "flash" if "gpt-oss" in row["model"] else "cudnn",
    }  # fmt: skip
    if "LoRA" in row["notes"]:
        recipe |= {"precision": "bf16", "lora": {"rank": 16}, "compile": False}
    layout: dict[str, Any] = {"shard": sharded, "tensor": tensor, "pipeline": stages, "expert": _ways(row, "ep")}
    if tensor > 1:
        layout["sequence_parallel"] = True
    if stages > 1:
        chunks = stages * _ways(row, "vp")
        layers = int(row["layers"])
        layout |= {"schedule": "interleaved", "virtual_stages": _ways(row, "vp")}
        if layers % chunks:
            layout["stage_layers"] = _uneven(layers, chunks)
    return {"model": _model(row), "recipe": recipe, "layout": layout}


def _swift(row: Row) -> Table:
    notes = row["notes"]
    if "upper bound" in notes:
        raise NotModelledError("the size of the card, an upper bound")
    if "packing true" not in notes:
        raise NotModelledError("samples are not padded, and their lengths are not stated")
    if "; sft" not in notes:
        raise NotModelledError("preference or reinforcement learning: what is kept beside the step is not stated")
    if "optimizer_cpu_offload" in notes:
        raise NotModelledError("the optimizer is on the host, which no recipe has")
    name = row["model"].partition("/")[2].lower().removesuffix("-instruct").removesuffix("-base")
    if "variant 'BF16'" in notes:
        raise NotModelledError("the columns are of the other variant of the script")
    if name not in catalog.model_names():
        raise NotModelledError(f"{row['model']}: the spec or the catalog does not have it")
    megatron, tensor = "Megatron" in row["layout"], _ways(row, "tp")
    data = int(row["count"]) // tensor
    accumulated = re.search(r"gradient_accumulation_steps (\d+)", notes)
    batch = int(row["global_batch"] or data * (int(accumulated[1]) if accumulated else 1) * int(row["micro_batch"]))
    recipe: dict[str, Any] = {
        "seq_len": int(row["seq_len"]), "micro_batch": int(row["micro_batch"]), "steps": 1, "global_batch": batch,
        "attention": "flash", "precision": {"kind": "bf16"},
        "activation_checkpointing": "attention" if row["recompute"] == "selective" else "full",
    }  # fmt: skip
    layout: dict[str, Any] = {"shard": data, "tensor": tensor, "expert": _ways(row, "ep")}
    if megatron:
        recipe |= {"framework": "megatron-core", "compile": True}
        recipe["precision"] = {"kind": "bf16", "master_weights": True, "gradient_dtype": "fp32"}
        layout |= {"zero": 1, "sequence_gather": "again" if tensor > 1 else "kept", "sequence_parallel": tensor > 1}
    else:  # ZeRO updates fp32 copies (DeepSpeed 007cca6a, zero/stage3.py), as files of it are read
        recipe |= {"framework": "deepspeed", "precision": {"kind": "bf16", "master_weights": True}}
    if "use_liger_kernel true" in notes:
        recipe["loss"] = "fused"
    if "lora" in notes:
        rank = re.search(r"lora rank (\d+)", notes)
        recipe["lora"] = {"rank": int(rank[1]) if rank else 8, "dropout": 0.05}
        recipe["precision"] = {"kind": "bf16"}
    return {"model": {"preset": name, "max_seq_len": 32768}, "recipe": recipe, "layout": layout}


def _whole_step_of_rl(row: Row) -> Table:
    raise NotModelledError("a whole step of reinforcement learning: generation is most of it")


def _batch_not_stated(row: Row) -> Table:
    raise NotModelledError("batch and sequence length are not stated")


_MODELLED = {
    "SX": _simumax, "MB": _nemo, "DG": _nemo, "ML": _mlperf, "TI": _maxtext, "TT": _maxtext, "AM": _automodel,
    "SW": _swift, "RL": _whole_step_of_rl, "PR": _batch_not_stated,
}  # fmt: skip


def _figure(row: Row, run: Run) -> tuple[str, float]:
    """What was measured, in seconds or bytes."""
    value, quantity = float(row["value"]), row["measured_quantity"]
    if "memory" in quantity:
        return RESERVED, value * GIB
    if row["unit"] == "MiB":
        return (RESERVED if "reserved" in quantity else ALLOCATED), value * 2**20
    if "tokens" in row["unit"]:
        return STEP, run.recipe.tokens_per_step / value / run.layout.devices
    return STEP, value / 1e3 if row["unit"] == "ms" else value


def later_run(row: Row) -> LaterRun | str:
    """A row as a run, or why it is left out."""
    try:
        table, device = _MODELLED[row["id"][:2]](row), _device(row)
        cluster = {**table.get("cluster", {}), "device": device, "count": int(row["count"])}
        run = load({**table, "cluster": cluster})
    except NotModelledError as reason:
        return str(reason)
    except InvalidInput as error:
        return str(error.problems[0])
    return LaterRun(row, LATER[row["id"][:2]], run, catalog.device(device), *_figure(row, run))


@cache
def later_runs() -> tuple[tuple[LaterRun, ...], tuple[tuple[Row, str], ...]]:
    """Every row that can be modelled, and the others with their reason."""
    runs: list[LaterRun] = []
    left_out: list[tuple[Row, str]] = []
    for row in _rows():
        run = later_run(row)
        if isinstance(run, str):
            left_out.append((row, run))
        else:
            runs.append(run)
    return tuple(runs), tuple(left_out)


def _rows() -> Iterator[Row]:
    with open(FACTS, newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)
