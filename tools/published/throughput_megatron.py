"""Megatron-LM and Megatron-DeepSpeed: Narayanan 2021, MT-NLG, vTrain, BigScience, and Megatron Core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from published_case import Row
from published_runs import megatron_case
from published_sources import TIME, TimeSource
from throughput_case import (
    TimeCase,
    case,
    from_hardware_flops,
    from_model_gpt_flops,
    from_step,
    from_tokens,
    gpt,
    llama,
    number,
)

from trainledger.spec.layout import Layout
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe

A100_80, A100_40 = "a100-sxm-80gb", "a100-sxm-40gb"

# --overlap-grad-reduce, --overlap-param-gather, --tp-comm-overlap
_OVERLAPPED = ("gradients", "parameters", "tensor")
# examples/sc21/run_table_1.sh: sequences of a micro-batch and layers of a virtual stage, by layers and stages.
_SC21_RUNS = {
    (24, 1): (16, 0), (30, 1): (16, 0), (36, 1): (16, 0), (40, 1): (8, 0), (48, 2): (4, 0), (60, 4): (2, 5),
    (80, 8): (2, 5), (96, 16): (1, 3), (105, 35): (1, 1), (128, 64): (1, 0),
}  # fmt: skip


def _recipe(row: Row, micro_batch: int, **others: object) -> Recipe:
    fields = {
        "seq_len": int(row["seq_len"]), "micro_batch": micro_batch, "global_batch": int(row["global_batch_seqs"]),
        "steps": 1, "precision": row["precision"], "precision.master_weights": True, "attention": "math",
        "dropout": 0.1,
        "attention_dropout": 0.1, "activation_checkpointing": "full", "compile": True,
    }  # fmt: skip
    return from_fields(Recipe, {**fields, **others})  # type: ignore[arg-type]


def _ranks(row: Row) -> tuple[int, int, int]:
    """Tensor ranks, stages, and what is left for data."""
    tensor, stages = number(row, "tp"), number(row, "pp")
    return tensor, stages, int(row["n_devices"]) // (tensor * stages * number(row, "cp"))


def _interleaved(layers: int, stages: int, each: int) -> dict[str, Any]:
    if not each or stages == 1 or layers // stages == each:
        return {}
    return {"schedule": "interleaved", "virtual_stages": layers // (stages * each)}


def _splitting(layout: Layout) -> Layout:
    """The layout with sends in parts, where tensor ranks have whole ones."""
    return replace(layout, split_sends=layout.sends_whole)


def sc21_case(row: Row) -> TimeCase:
    tensor, stages, data = _ranks(row)
    layers = int(row["n_layers"])
    batch, each = _SC21_RUNS[layers, stages]
    overlap = ("gradients",) if stages == 1 else None  # DDP=torch there, DDP=local with more stages
    layout = Layout(
        replicate=data, tensor=tensor, pipeline=stages, overlap=overlap, **_interleaved(layers, stages, each)
    )
    return case(row, TIME["SC21"], A100_80, gpt(row), _recipe(row, batch), _splitting(layout), from_hardware_flops)


def table_2_case(row: Row) -> TimeCase:
    tensor, stages, data = _ranks(row)
    split: dict[str, Any] = {"shard": data} if row["sharding"] == "zero3" else {"replicate": data}
    layout = _splitting(Layout(tensor=tensor, pipeline=stages, overlap=None, gather="tensor", **split))
    recipe = _recipe(row, int(row["micro_batch_per_device"]))
    found = case(row, TIME["TABLE_2"], A100_80, gpt(row), recipe, layout, from_hardware_flops)
    return replace(found, fitted=row["sharding"] != "zero3")  # what its gathers lost would be taken for the network's


def pipeline_case(row: Row, source: TimeSource, device: str) -> TimeCase:
    """1F1B, data parallel ranks with whole copies, a printed step time."""
    tensor, stages, data = _ranks(row)
    layout = _splitting(Layout(replicate=data, tensor=tensor, pipeline=stages, overlap=None))
    return case(row, source, device, gpt(row), _recipe(row, int(row["micro_batch_per_device"])), layout, from_step)


BLOCKING_DEVICES = 320  # of Jean Zay: from so many on nothing ran without CUDA_LAUNCH_BLOCKING=1 (CHRONICLES)


def bigscience_case(row: Row) -> TimeCase | str:
    """The run of the memory side, with the whole global batch and the fused kernels."""
    if not row["measured_step_time_s"]:
        return "out of memory: no time"
    final = "final log" in row["source"]  # of BLOOM itself: the trials' code, and the optimizer of the last of them
    known = megatron_case({**row, "source": "chronicles", "notes": "02-28"} if final else row)
    data, batch = known.run.layout.data_ranks, known.run.device_batch
    printed = int(row["global_batch_seqs"])
    if printed % (data * batch):
        printed = round(printed / (data * batch)) * data * batch
    layout = _splitting(replace(known.run.layout, overlap=None))
    blocking = layout.devices >= BLOCKING_DEVICES
    recipe = replace(known.run.recipe, compile=True, launch_blocking=blocking, global_batch=printed)
    source = TIME["CHRONICLES"] if "tr11" in row["source"] else TIME["TR3M"]
    found = case(row, source, known.run.cluster.device, known.run.model, recipe, layout, from_step)
    # A batch that is no whole number of micro-batches is modelled as the nearest one that is, its time in proportion.
    return replace(found, seconds=found.seconds * printed / int(row["global_batch_seqs"]))


def _core_recipe(row: Row, micro_batch: int, **others: object) -> Recipe:
    plain = {"attention": "cudnn", "dropout": 0.0, "attention_dropout": 0.0, "activation_checkpointing": "none",
             "precision.gradient_dtype": "fp32"}  # fmt: skip
    return _recipe(row, micro_batch, **{**plain, **others})


def sequence_parallel(tensor: int) -> dict[str, Any]:
    """Fields of tensor ranks that split the stream too and gather the inputs of matmuls again in backward."""
    if tensor == 1:
        return {}
    return {"sequence_parallel": True, "sequence_gather": "again"}


def core_case(row: Row) -> TimeCase:
    tensor, stages, data = _ranks(row)
    layers = int(row["n_layers"])
    each = next(size for size in (2, 3, 1) if layers % (stages * size) == 0)
    layout = Layout(
        shard=data, zero=1, tensor=tensor, pipeline=stages, **sequence_parallel(tensor),
        overlap=_OVERLAPPED if tensor > 1 else _OVERLAPPED[:2],
        **_interleaved(layers, stages, each if stages > 1 else 0),
    )  # fmt: skip
    recipe = _core_recipe(row, 4 if stages == 1 else 1)
    model = gpt(row, tie_embeddings=False)
    return case(row, TIME["CORE"], "h100-sxm", model, recipe, layout, from_model_gpt_flops)


def llama_fp8_case(row: Row) -> TimeCase:
    tensor, stages, data = _ranks(row)
    context, layers = number(row, "cp"), int(row["n_layers"])
    chunks = {32: 1, 80: 5, 126: 8}[layers] * stages
    uneven = layers % chunks != 0
    split = tuple(layers // chunks + (each < layers % chunks) for each in range(chunks))
    layout = Layout(
        shard=data, zero=1, tensor=tensor, pipeline=stages, context=context, **sequence_parallel(tensor),
        schedule="interleaved" if stages > 1 else "1f1b", virtual_stages=chunks // stages,
        stage_layers=split if uneven else None, overlap=_OVERLAPPED if tensor > 1 else _OVERLAPPED[:2],
    )  # fmt: skip
    fields = {**row, "global_batch_seqs": row["global_batch_seqs"] or "128"}
    recipe = _core_recipe(
        fields, 1, precision="fp8-tensorwise", **{"precision.gradient_dtype": None, "precision.weight_caching": True}
    )
    return case(row, TIME["LLAMA_FP8"], "h100-sxm", llama(row), recipe, layout, from_tokens)


def megatron_time_case(row: Row) -> TimeCase | str:
    """A row of any of these sources."""
    source, device = row["source"], A100_80
    if "cases_april2021" in source:
        return sc21_case(row)
    if "2nd-table-2" in source:
        return table_2_case(row)
    if "tables.tex" in source:
        return pipeline_case(row, TIME["TABLES"], "v100-sxm-32gb" if "V100" in row["hardware"] else A100_40)
    if "Megatron-Turing" in source:
        return pipeline_case(row, TIME["MT_NLG"], device)
    if "vTrain" in source:
        return pipeline_case(row, TIME["VTRAIN_SINGLE"] if "gt_single" in source else TIME["VTRAIN_MULTI"], device)
    if "bigscience" in source:
        return bigscience_case(row)
    if "model_table" in source:
        return core_case(row)
    return llama_fp8_case(row)
