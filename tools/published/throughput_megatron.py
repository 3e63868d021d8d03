"""Megatron-LM and Megatron-DeepSpeed: Narayanan 2021, MT-NLG, vTrain, BigScience, and Megatron Core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_deepspeed import megatron_case
from published_case import Row
from throughput_case import (
    TimeCase,
    TimeSource,
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

HDR_8 = (("network", "hdr"),)  # a 200 Gb/s adapter for each GPU
HDR_4 = (("network", "hdr"), ("network_bytes_per_second", 12_500_000_000))  # four 200 Gb/s adapters for eight GPUs
# Jean Zay has Omni-Path, modelled as InfiniBand of 100 Gb/s that reaches what the project's benchmark of all-reduces of
# 4 GB over four nodes measured: 40.5 Gb/s through one adapter of eight A100, which have four, and 84.7 Gb/s for a node
# of four V100 (bigscience-workshop/bigscience: experiments/bandwidth, all_reduce_bench-a100-n4.txt and -32gb-4n.txt).
OMNIPATH_4 = (("network", "edr-half"), ("network_reached_bytes_per_second", 40_500_000_000 // 8 * 4 // 8))
OMNIPATH_V100 = (
    ("network", "edr"), ("devices_per_node", 4), ("network_reached_bytes_per_second", 84_700_000_000 // 8 // 4),
)  # fmt: skip
NDR_8 = (("network", "ndr"),)

_MEGATRON = (
    "unfused attention; scale, mask and softmax are one kernel; bias and GELU, bias, dropout and residual are one "
    "each (the repository's fused kernels): modelled as compile = true",
    "dropout 0.1 everywhere (the defaults); fp16 with a master copy in fp32, Adam; every block run again in backward",
    "tensor parallelism without sequence parallelism; gradients are summed over data ranks after the last backward",
)  # fmt: skip
SPLIT_SENDS = (
    "each tensor rank sends its part of an activation to the next stage, where they gather it (Narayanan 2021, section "
    "4.1, the default of Megatron-LM; DeepSpeed's is_pipe_partitioned)"
)
SELENE = "Selene: DGX A100 with eight 200 Gb/s HDR adapters"
SC21 = TimeSource(
    name="NVIDIA/Megatron-LM:images/cases_april2021.png (Narayanan et al. 2021 Table 1, arXiv 2104.04473)",
    title="Narayanan 2021, weak scaling, A100",
    convention="hardware TFLOP/s by the paper's formula, recomputation in it",
    network=HDR_8,
    assumed=(
        *_MEGATRON,
        "micro-batches, layers of a virtual stage and overlapped gradients (DDP=torch, with one stage) as "
        "examples/sc21/run_table_1.sh of the repository has them",
        SPLIT_SENDS,
        SELENE,
    ),
)
TABLE_2 = TimeSource(
    name="cli99/llm-analysis:figures/megatron-lm-2nd-table-2.png (Narayanan 2021 Table 2)",
    title="Narayanan 2021, against ZeRO-3, A100",
    convention="hardware TFLOP/s by the paper's formula, recomputation in it",
    network=HDR_8,
    assumed=(
        *_MEGATRON,
        "pipelines run 1F1B without virtual stages; ZeRO-3 (DeepSpeed of early 2021) gathers one parameter after the "
        "other in 16 bits, nothing overlapped (overlap_comm was off by default)",
        SPLIT_SENDS,
        SELENE,
    ),
    reason="ZeRO-3 of early 2021 on 640 to 2,240 devices is predicted at half to four fifths of its time: each of its "
    "gathers waits for a ring through all of them, and more than the links' own latency was lost there; its rows with "
    "pipelines are all within 15 %",
)
TABLES = TimeSource(
    name="NVIDIA/Megatron-LM:images/tables.tex @ 5281919420",
    title="Megatron-LM 2020, one node and data parallel, A100 and V100",
    convention="printed seconds of a step",
    network=HDR_8,
    assumed=(*_MEGATRON, "1,024 tokens; one micro-batch in a step, gradients summed after it (local DDP)"),
)
MT_NLG = TimeSource(
    name="Megatron-Turing NLG (arXiv 2201.11990) via cli99/llm-analysis:examples/MT-NLG/README.md",
    title="Megatron-Turing 530B, A100",
    convention="printed seconds of a step",
    network=HDR_8,
    assumed=(*_MEGATRON, "1F1B without virtual stages", SPLIT_SENDS, SELENE),
)
VTRAIN_SINGLE = TimeSource(
    name="VIA-Research/vTrain:data (arXiv 2312.12391) gt_single.csv",
    title="vTrain, one node, A100",
    convention="printed seconds of a step",
    assumed=(*_MEGATRON, "1F1B; data parallel ranks sum gradients after the last micro-batch", SPLIT_SENDS),
)
VTRAIN_MULTI = TimeSource(
    name="VIA-Research/vTrain:data (arXiv 2312.12391) gt_multi.csv",
    title="vTrain, up to 512 A100",
    convention="printed seconds of a step",
    network=HDR_4,
    assumed=(
        *_MEGATRON,
        "1F1B; data parallel ranks sum gradients after the last micro-batch",
        SPLIT_SENDS,
        "nodes of eight GPUs with 800 Gb/s (the repository's config/validation/multi), modelled as four adapters of "
        "HDR",
    ),
)
CHRONICLES = TimeSource(
    name="bigscience-workshop/bigscience:train/tr11-176B-ml/chronicles-prequel.md",
    title="BigScience 176B trials, A100",
    convention="printed seconds of a step",
    network=OMNIPATH_4,
    assumed=(
        *_MEGATRON,
        "ZeRO-1: gradients reduced once for a step, parameters gathered after the update; layers over stages as in "
        "docs/published_memory.md",
        SPLIT_SENDS,
        "on 320 and more devices CUDA_LAUNCH_BLOCKING=1: without it they always hung (the page, `dealing with JZ "
        "hanging`)",
        "Jean Zay: nodes of eight A100 with four 100 Gb/s Omni-Path adapters that reach 40.5 Gb/s each (the project's "
        "benchmark of all-reduces, experiments/bandwidth)",
    ),
)
TR3M = TimeSource(
    name="bigscience-workshop/bigscience:experiments/tr3m-1B3.md",
    title="BigScience 1.3B, V100",
    convention="printed seconds of a step",
    network=OMNIPATH_V100,
    assumed=(
        *_MEGATRON,
        "ZeRO-1; Jean Zay: nodes of four V100 whose four 100 Gb/s Omni-Path adapters reach 84.7 Gb/s together (the "
        "project's benchmark of all-reduces, experiments/bandwidth)",
    ),
)
CORE = TimeSource(
    name="NVIDIA/Megatron-LM:images/model_table.png (Megatron-Core r0.8)",
    title="Megatron Core 0.8, H100",
    convention="model TFLOP/s by the formula of the code (72 B s l h^2 ...), causality not halved",
    network=NDR_8,
    assumed=(
        "cuDNN's attention (what Transformer Engine takes on H100), fused kernels modelled as compile = true, no "
        "dropout, "
        "bf16 with a master "
        "copy and gradients in fp32, distributed optimizer with overlapped gradients and parameters",
        "tensor parallelism with sequence parallelism, overlapped (the README), inputs of matmuls gathered again in "
        "backward (core/tensor_parallel/layers.py); no recomputation",
        "micro-batches of one sequence in pipelines, else of the four of a data rank; pipelines are interleaved with "
        "two layers to a virtual stage, or as few as divide",
    ),
)
LLAMA_FP8 = TimeSource(
    name="NVIDIA/Megatron-LM:examples/llama/README.md",
    title="Megatron Core Llama 3 in fp8, H100",
    convention="tokens/s and device",
    network=NDR_8,
    assumed=(
        "as Megatron Core 0.8, linear layers in fp8 with a scale per tensor; virtual stages as the page says (VP)",
        "weights are cast to 8 bits once a step and kept (Transformer Engine), modelled as precision.weight_caching; "
        "gradients in bf16 (--grad-reduce-in-bf16 of the repository's train_llama3_8b_h100_fp8.sh); parameters are "
        "gathered in bf16, not in 8 bits (--fp8-param-gather)",
        "the 70B has 128 sequences in a step (the page)",
    ),
)
SOURCES = (SC21, TABLE_2, TABLES, MT_NLG, VTRAIN_SINGLE, VTRAIN_MULTI, CHRONICLES, TR3M, CORE, LLAMA_FP8)
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
    return case(row, SC21, A100_80, gpt(row), _recipe(row, batch), _splitting(layout), from_hardware_flops)


def table_2_case(row: Row) -> TimeCase:
    tensor, stages, data = _ranks(row)
    split: dict[str, Any] = {"shard": data} if row["sharding"] == "zero3" else {"replicate": data}
    layout = _splitting(Layout(tensor=tensor, pipeline=stages, overlap=None, gather="tensor", **split))
    recipe = _recipe(row, int(row["micro_batch_per_device"]))
    found = case(row, TABLE_2, A100_80, gpt(row), recipe, layout, from_hardware_flops)
    return replace(found, fitted=row["sharding"] != "zero3")  # what its gathers lost would be taken for the network's


def pipeline_case(row: Row, source: TimeSource, device: str) -> TimeCase:
    """1F1B, data parallel ranks with whole copies, a printed step time."""
    tensor, stages, data = _ranks(row)
    layout = _splitting(Layout(replicate=data, tensor=tensor, pipeline=stages, overlap=None))
    return case(row, source, device, gpt(row), _recipe(row, int(row["micro_batch_per_device"])), layout, from_step)


BLOCKING_DEVICES = 320  # of Jean Zay: from so many on nothing ran without CUDA_LAUNCH_BLOCKING=1 (see CHRONICLES)


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
    source = CHRONICLES if "tr11" in row["source"] else TR3M
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
    return case(row, CORE, "h100-sxm", model, recipe, layout, from_model_gpt_flops)


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
    return case(row, LLAMA_FP8, "h100-sxm", llama(row), recipe, layout, from_tokens)


def megatron_time_case(row: Row) -> TimeCase | str:
    """A row of any of these sources."""
    source, device = row["source"], A100_80
    if "cases_april2021" in source:
        return sc21_case(row)
    if "2nd-table-2" in source:
        return table_2_case(row)
    if "tables.tex" in source:
        return pipeline_case(row, TABLES, "v100-sxm-32gb" if "V100" in row["hardware"] else A100_40)
    if "Megatron-Turing" in source:
        return pipeline_case(row, MT_NLG, device)
    if "vTrain" in source:
        return pipeline_case(row, VTRAIN_SINGLE if "gt_single" in source else VTRAIN_MULTI, device)
    if "bigscience" in source:
        return bigscience_case(row)
    if "model_table" in source:
        return core_case(row)
    return llama_fp8_case(row)
