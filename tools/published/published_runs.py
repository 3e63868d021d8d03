"""How published runs are modelled: BigScience (Megatron-DeepSpeed, early 2022), torchtitan (FSDP2), litgpt and Qwen.

What is assumed of each source is in ``sources.toml``; fine-tuning is reported beside pretraining.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from published_case import Case, Row, ran_out
from published_sources import MEMORY, reason_left_out

from trainledger import catalog
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.precision import BF16, BF16Sharded
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.savings import ChunkedLoss, Lora, Selective
from trainledger.spec.units import GIB


def _stage_layers(row: Row) -> tuple[int, ...] | None:
    layers, stages = int(row["n_layers"]), int(row["pp"])
    if layers % stages == 0:
        return None
    if (layers + 2) % stages == 0 and layers != 78:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    most = -(-layers // stages)
    return tuple(min(most, max(0, layers - most * stage)) for stage in range(stages))


def megatron_case(row: Row) -> Case:
    chronicles = "chronicles" in row["source"]
    tensor, stages = int(row["tp"]), int(row["pp"])
    data = int(row["n_devices"]) // (tensor * stages)
    batch = int(row["micro_batch_per_device"])
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": int(row["vocab"]),
            "vocab_multiple": 1 if chronicles else 128 * tensor,
            "d_model": int(row["d_model"]),
            "n_layers": int(row["n_layers"]),
            "attention.n_heads": int(row["n_heads"]),
            "feed_forward.d_ff": int(row["d_ff"]),
            "max_seq_len": 2048,
            "norm": "layernorm",
            "norm.bias": True,
            "feed_forward.activation": "gelu_tanh",
            "feed_forward.gated": False,
            "feed_forward.bias": True,
            "attention.bias": True,
            "positions": "none" if chronicles else "learned",
            "tie_embeddings": True,
            "embedding_norm": True,
        },
    )
    wide = row["precision"] == "bf16" and "02-28" in row["notes"]
    recipe = from_fields(Recipe, {
        "seq_len": 2048, "micro_batch": batch, "steps": 1, "precision": row["precision"],
        "precision.master_weights": True,
        "global_batch": max(1, int(row["global_batch_seqs"]) // (batch * data)) * batch * data,
        "framework": "deepspeed",
        "precision.gradient_dtype": "fp32" if wide else None, "attention": "math", "dropout": 0.1,
        "attention_dropout": 0.1, "activation_checkpointing": row["activation_ckpt"],
    })  # fmt: skip
    layout = Layout(shard=data, zero=1, tensor=tensor, pipeline=stages, stage_layers=_stage_layers(row))
    device = {"A100 SXM 80GB": "a100-sxm-80gb", "V100 SXM 32GB": "v100-sxm-32gb", "V100 SXM 16GB": "v100-sxm-16gb"}
    name = device[row["hardware"]]
    run = Run(model=model, recipe=recipe, layout=layout, cluster=Cluster(device=name, count=layout.devices))
    source = MEMORY["CHRONICLES"] if chronicles else MEMORY["TR3M"]
    return Case(row, source, run, catalog.device(name))


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
    source = MEMORY["TITAN"] if precision == "bf16-sharded" else MEMORY["TITAN_FP8"]
    return Case(row, source, run, device)


CHUNK = 128


def _chunks(tokens: int) -> int:
    """As many chunks as come nearest to litgpt's size and divide the tokens."""
    return min(
        (each for each in range(1, tokens + 1) if tokens % each == 0), key=lambda each: abs(tokens / each - CHUNK)
    )


def litgpt_case(row: Row) -> Case:
    llama = "Llama2" in row["model_family"]
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": int(row["vocab"]),
            "d_model": int(row["d_model"]),
            "n_layers": int(row["n_layers"]),
            "attention.n_heads": int(row["n_heads"]),
            "feed_forward.d_ff": int(row["d_ff"]),
            "max_seq_len": 4096,
        },
    )
    if not llama:
        model = with_fields(
            model,
            {
                "norm": "layernorm",
                "norm.bias": True,
                "feed_forward.activation": "gelu_tanh",
                "feed_forward.gated": False,
                "feed_forward.bias": True,
                "attention.bias": True,
                "block": "parallel",
                "positions.dim": 32,
                "head_bias": True,
            },
        )
    length, batch = int(row["seq_len"]), int(row["micro_batch_per_device"])
    recipe = Recipe(
        seq_len=length, micro_batch=batch, global_batch=int(row["global_batch_seqs"]), steps=1, precision=BF16(),
        attention="flash", loss=ChunkedLoss(chunks=_chunks(length * batch)),
        lora=Lora(rank=8, dropout=0.05, targets=("q_proj", "v_proj"),
        base_format="nf4" if "nf4" in row["model_family"] else None),
        grad_clip=None,
    )  # fmt: skip
    run = Run(model=model, recipe=recipe, cluster=Cluster(device="a100-sxm-40gb"))
    return Case(row, MEMORY["LITGPT"], run, catalog.device("a100-sxm-40gb"))


def qwen_case(row: Row) -> Case:
    devices, full = int(row["n_devices"]), "Full" in row["model_family"]
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": int(row["vocab"]),
            "d_model": int(row["d_model"]),
            "n_layers": int(row["n_layers"]),
            "attention.n_heads": int(row["n_heads"]),
            "feed_forward.d_ff": int(row["d_ff"]),
            "max_seq_len": 8192,
            "attention.bias": True,
            "attention.output_bias": False,
        },
    )
    base = "nf4" if "Q-LoRA" in row["model_family"] else None
    method = (
        {"precision.master_weights": True, "framework": "deepspeed"}
        if full
        else {"lora.rank": 64, "lora.dropout": 0.05, "lora.base_format": base}
    )
    recipe = from_fields(Recipe, {
        "seq_len": int(row["seq_len"]), "micro_batch": 1, "global_batch": int(row["global_batch_seqs"]), "steps": 1,
        "precision": "bf16", "attention": "flash", "activation_checkpointing": "full", **method,
    })  # fmt: skip
    layout = Layout(shard=devices, zero=2 if row["sharding"] == "zero2" else 3)
    run = Run(model=model, recipe=recipe, layout=layout, cluster=Cluster(device="a100-sxm-80gb", count=devices))
    return Case(row, MEMORY["QWEN"], run, catalog.device("a100-sxm-80gb"))


def case_of(row: Row) -> Case | str:
    """A row as a run, or why it is left out."""
    source, family = row["source"], row["model_family"]
    if not row["measured_peak_mem_gib"] and not ran_out(row):
        return "no memory figure"
    if "bigscience" in source:
        return megatron_case(row)
    why = reason_left_out("memory", source)
    if why != "not predicted":
        return why
    if "torchtitan" in source:
        if row["precision"] in TITAN_PRECISIONS:
            return titan_case(row)
        return f"no recipe has {row['precision'].split()[0]} linear layers"
    if "litgpt" in source:
        if not row["n_layers"]:
            return "the sizes of the model are not stated"
        # W (1 + 1 / ranks) and a tenth, W the bytes of the weights: 22.2 GB of 13.5 over 2, 35.6 GB of 26 over 4.
        return "the peak of loading: whole weights beside their shards" if row["n_devices"] != "1" else litgpt_case(row)
    if "QwenLM" in source:
        if "(emb)" in family:
            return "trains embedding and head in addition to the adapters, which no recipe has"
        return qwen_case(row)
    return "not predicted"


def labels_beside(rows: list[Row]) -> Iterator[Case]:
    """Runs that a row's notes say did not fit, beside the row's own run, and that run, which did."""
    row = next(each for each in rows if each["id"] == "R0051")
    labels = ("1", "", "R0051"), ("2", "OOM, by the notes of R0051", "R0051 with 2 sequences")
    for batch, notes, title in labels:
        model = from_fields(ModelSpec, catalog.model("llama-2-70b"))
        recipe = Recipe(
            seq_len=4096, micro_batch=int(batch), global_batch=64 * int(batch), steps=1, precision=BF16Sharded(),
            attention="flash", activation_checkpointing=Selective(),
        )  # fmt: skip
        cluster = Cluster(device="a100-sxm-80gb", count=64)
        run = Run(model=model, recipe=recipe, layout=Layout(shard=64), cluster=cluster)

        changed = {**row, "notes": notes, "micro_batch_per_device": batch}
        yield Case(changed, MEMORY["TITAN"], run, catalog.device("a100-sxm-80gb"), title=title)
