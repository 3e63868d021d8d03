"""torchtitan's runs: FSDP2 and what it holds in streams of its own."""

from __future__ import annotations

from dataclasses import replace

from published_case import Case, Row, Source

from trainledger import catalog
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.units import GIB

_TITAN = (
    "FSDP2: fp32 shards gathered in bf16 block by block, gradients reduced in fp32; AdamW in fp32 on the shards",
    "flash attention; logits upcast to fp32 for the loss; selective = per operation, attention and every second matmul",
    "max reserved memory, as torchtitan's log prints it",
)  # fmt: skip
TITAN = Source(
    name="pytorch/torchtitan (bf16)",
    title="torchtitan Llama 3 8B, H100",
    group="dense pretraining, 16 bit",
    figure="reserved",
    unit=GIB,
    unit_why="printed as GiB",
    assumed=(
        *_TITAN,
        "both compiled rows are recomputed selectively: the checkpoint is inside of the compiled block",
        "R1108 and R1109: 8 devices, one sequence, selective (the configuration's defaults, not in the excerpt)",
    ),
)
TITAN_FP8 = Source(
    name="pytorch/torchtitan (fp8)",
    title="torchtitan Llama 3 in fp8",
    group="dense pretraining, fp8",
    figure="reserved",
    unit=GIB,
    unit_why="printed as GiB (mxfp8.md says GB of the same log line)",
    assumed=(
        *_TITAN,
        "fp8: torchao's Float8Linear over the parameters gathered in bf16, a scale per tensor (the default of the "
        "`float8` converter); it keeps its bf16 input for backward, and 8-bit copies come and go",
        "compiled blocks on tensor and context ranks are predicted like eager ones, the others as compiled",
        "R0032 gathers the weights of blocks in 8 bits (enable_fsdp_float8_all_gather), which is not modelled",
        "405B: a local batch goes in as many micro-batches as stages (torchtitan's default), 126 layers as evenly as "
        "they go, interleaved with two chunks on a rank; sequence parallelism; parameters gathered once for a step",
        "context parallelism is a ring",
        "R0032 and R0036, of mid 2025: the loss is compiled too (recipe.loss = compiled)",
    ),
)  # fmt: skip


# FSDP2 gathers in bf16 and reduces in fp32; the `float8` converter scales by tensor where no recipe is named.
TITAN_PRECISIONS = {
    "bf16": "bf16-sharded", "fp8": "fp8-tensorwise-sharded", "fp8 tensorwise": "fp8-tensorwise-sharded",
    "fp8 rowwise": "fp8-rowwise-sharded",
}  # fmt: skip


# `--compile` has the loss compiled as well since mid 2025; the rows of 2024 ran before.
LOSS_COMPILED = ("R0032", "R0036")


def titan_case(row: Row) -> Case:
    precision = TITAN_PRECISIONS[row["precision"]]
    tensor, stages, context = int(row["tp"]), int(row["pp"]), int(row["cp"])
    data = int(row["n_devices"]) // (tensor * stages * context)
    local = int(row["micro_batch_per_device"])
    batch = local // stages if stages > 1 else local
    name = {"Llama3-8B": "llama-3-8b", "Llama3-405B": "llama-3.1-405b"}[row["model_family"]]
    length = int(row["seq_len"])
    model = from_fields(ModelSpec, {**catalog.model(name), "max_seq_len": max(length, 8192)})
    interleaved = "Interleaved" in row["notes"]
    chunks = 2 * stages if interleaved else stages
    uneven = stages > 1
    layers = tuple(
        model.n_layers // chunks + (each < model.n_layers % chunks) for each in range(chunks)
    )  # fmt: skip
    layout = Layout(
        shard=data, context=context, tensor=tensor, sequence_parallel=tensor > 1, pipeline=stages,
        schedule="interleaved" if interleaved else "1f1b", virtual_stages=2 if interleaved else 1,
        stage_layers=layers if uneven else None,
    )  # fmt: skip
    loss = "compiled" if row["id"] in LOSS_COMPILED else "full"
    recipe = from_fields(Recipe, {
        "seq_len": length, "micro_batch": batch, "global_batch": local * data, "steps": 1, "precision": precision,
        "attention": "flash", "activation_checkpointing": row["activation_ckpt"], "compile": row["compile"] == "1",
        "loss": "chunked" if "chunked cross entropy" in row["notes"] else loss,
    })  # fmt: skip
    named = [name for name in ("h200", "b200") if name.upper() in row["hardware"]]
    device = catalog.device(named[0] if named else "h100-sxm")
    if "96GB" in row["hardware"]:
        device = replace(device, memory_nbytes=96 * 10**9, usable_nbytes=round(94.98 * GIB),
                         usable_source="torchtitan's percentages (pull 996)")  # fmt: skip
    run = Run(model=model, recipe=recipe, layout=layout, cluster=Cluster(device=device.name, count=layout.devices))
    source = TITAN if precision == "bf16-sharded" else TITAN_FP8
    return Case(row, source, run, device)
