"""NVIDIA's own figures of NeMo and Megatron Bridge on H100, GB200 and B200.

Rows are in ``nemo_runs.csv``. What a table leaves open follows NVIDIA's recipe of that container. Constants
are fitted on the containers of 2024, each layout on the fewest devices that it was run on; the same layouts on more
devices, and all later containers, are among the steps that nothing was fitted on (`unseen_runs`).
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from published_case import Row
from published_sources import TIME, TimeSource
from throughput_case import TimeCase, case
from throughput_megatron import sequence_parallel

from trainledger import catalog
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

_BY_COLUMN = {"nemo": TIME["NEMO"], "nemo-long": TIME["NEMO_LONG"], "bridge": TIME["BRIDGE"], "dgxc": TIME["DGX_CLOUD"]}

_OF_A_LAYOUT = ("source", "container", "model", "layers", "precision", "tp", "pp", "cp", "vp", "mbs")


_LLAMAS = {
    "LLAMA2-7B": "llama-2-7b", "LLAMA2-13B": "llama-2-13b", "LLAMA2-70B": "llama-2-70b", "LLAMA3-8B": "llama-3-8b",
    "LLAMA3-70B": "llama-3-70b", "LLAMA3.1-8B": "llama-3.1-8b", "LLAMA3.1-70B": "llama-3.1-70b",
    "LLAMA3.1-405B": "llama-3.1-405b",
}  # fmt: skip
# Width, heads, key-value heads.
_OTHERS = {
    "GPT3-5B": (4096, 32, 32), "GPT3-20B": (6144, 48, 48), "GPT3-175B": (12288, 96, 96), "Nemotron-8B": (4096, 32, 32),
    "Nemotron-15B": (6144, 48, 8), "Nemotron-22B": (6144, 48, 48), "Nemotron-340B": (18432, 96, 8),
}  # fmt: skip
_GPT: dict[str, Any] = {
    "vocab_size": 50257,
    "norm.bias": True,
    "feed_forward.activation": "gelu_tanh",
    "feed_forward.bias": True,
    "attention.bias": True,
    "positions": "learned",
    "tie_embeddings": True,
}
_GPT2_TOKENS = 50257


def _model(row: Row) -> ModelSpec:
    family, length = row["model"], int(row["seq_len"])
    changed: dict[str, Any] = {
        "n_layers": int(row["layers"]), "max_seq_len": length, "vocab_multiple": 128 * int(row["tp"]),
    }  # fmt: skip
    if family in _LLAMAS:
        if family == "LLAMA3.1-405B" and row["container"] == "24.09":
            changed["vocab_size"] = _GPT2_TOKENS
        return from_fields(ModelSpec, {**catalog.model(_LLAMAS[family]), **changed})
    width, heads, pairs = _OTHERS[family]
    sizes: dict[str, Any] = {
        "d_model": width,
        "attention.n_heads": heads,
        "attention.n_kv_heads": pairs,
        "feed_forward.d_ff": 4 * width,
        "norm": "layernorm",
    }
    if family.startswith("GPT3"):
        return from_fields(ModelSpec, {**sizes, **_GPT, "feed_forward.gated": False, **changed})
    return from_fields(
        ModelSpec,
        {
            **sizes,
            "vocab_size": 256000,
            "norm.bias": True,
            "feed_forward.activation": "relu2",
            "feed_forward.gated": False,
            "positions.dim": width // heads // 2,
            **changed,
        },
    )


def _recipe(row: Row) -> Recipe:
    family, container, eight_bits = row["model"], row["container"], row["precision"] == "fp8"
    dropout = 0.1 if family in ("GPT3-5B", "GPT3-175B") and container.startswith("24") else 0.0
    wide = family in ("Nemotron-8B", "Nemotron-22B") or (family == "Nemotron-15B" and container == "24.12")
    early_340b = family == "Nemotron-340B" and container.startswith("24")
    long = row["source"] == "nemo-long" and container.startswith("24")
    flash = early_340b or long or (family == "GPT3-175B" and row["source"] == "dgxc")
    return from_fields(Recipe, {
        "seq_len": int(row["seq_len"]), "micro_batch": int(row["mbs"]), "global_batch": int(row["gbs"]), "steps": 1,
        "precision": "fp8-tensorwise" if eight_bits else "bf16", "precision.master_weights": True,
        "precision.weight_caching": eight_bits and row["fsdp"] == "0",
        "precision.gradient_dtype": "fp32" if wide else None, "dropout": dropout, "attention_dropout": dropout,
        "attention": "flash" if flash else "cudnn", "compile": True,
        "activation_checkpointing": "attention" if early_340b and row["source"] == "dgxc" else "none",
    })  # fmt: skip


def _layout(row: Row) -> Layout:
    tensor, stages, context, virtual = (int(row[each]) for each in ("tp", "pp", "cp", "vp"))
    data = int(row["gpus"]) // (tensor * stages * context)
    if row["fsdp"] != "0":
        return Layout(shard=data)
    layers, chunks = int(row["layers"]), stages * virtual
    ends_less = None  # as account_for_embedding_in_pipeline_split and its sister for the loss leave it
    if layers % chunks:
        inner = (layers + 2) // chunks
        ends_less = (inner - 1, *(inner for _ in range(chunks - 2)), inner - 1)
    overlapped = tensor > 1 and not row["model"].startswith("LLAMA2") and row["model"] != "GPT3-20B"
    return Layout(
        shard=data, zero=1, tensor=tensor, pipeline=stages, context=context, stage_layers=ends_less,
        schedule="interleaved" if virtual > 1 else "1f1b", virtual_stages=virtual, **sequence_parallel(tensor),
        overlap=("gradients", "parameters", "tensor") if overlapped else ("gradients", "parameters"),
    )  # fmt: skip


def _seconds(row: Row, run: Run) -> float:
    """The printed seconds of a step, or those of its tokens at the printed tokens per second and device."""
    if row["step_s"]:
        return float(row["step_s"])
    return run.recipe.tokens_per_step / (float(row["tokens_per_s"]) * int(row["gpus"]))


def nemo_case(row: Row) -> TimeCase:
    """A row of ``nemo_runs.csv`` as a run."""
    return case_of(row, _BY_COLUMN[row["source"]], "h100-sxm")


def case_of(row: Row, source: TimeSource, device: str) -> TimeCase:
    """A row with these columns as a run on a device."""
    named = {**row, "model_family": f"{row['model']}, {row['container']}, {row['precision']}", "n_devices": row["gpus"]}
    return case(named, source, device, _model(row), _recipe(row), _layout(row), _seconds)


def nemo_cases() -> tuple[TimeCase, ...]:
    """Every row as a run."""
    return tuple(nemo_case(row) for row in rows_of("nemo_runs.csv"))


def rows_of(name: str) -> list[Row]:
    """The rows of a file beside this one."""
    with open(Path(__file__).parent / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fitted_nemo() -> tuple[TimeCase, ...]:
    """Of the containers of 2024, each layout on its fewest devices."""
    cases = nemo_cases()
    fewest: dict[tuple[str, ...], str] = {}
    for each in sorted(cases, key=lambda case: int(case.row["gpus"])):
        if each.row["container"].startswith("24."):
            fewest.setdefault(tuple(each.row[name] for name in _OF_A_LAYOUT), each.name)
    return tuple(each for each in cases if each.name in fewest.values())


def unseen_nemo() -> tuple[TimeCase, ...]:
    """All others."""
    fitted = {each.name for each in fitted_nemo()}
    return tuple(each for each in nemo_cases() if each.name not in fitted)


# NVIDIA's own figures of GB200 and B200: ``blackwell_runs.csv`` has the columns of ``nemo_runs.csv`` and the device,
# and is modelled like it. A rack joins 72 GB200; its programs run in blocks of 64.
_OF_BLACKWELL = {
    ("dgxc", "gb200"): "GB200_RECIPES",
    ("bridge", "gb200"): "GB200_BRIDGE",
    ("bridge", "b200"): "B200_BRIDGE",
    ("nemo-long", "b200"): "B200_LONG",
}


def blackwell_cases() -> tuple[TimeCase, ...]:
    """Every row as a run."""
    return tuple(
        case_of(row, TIME[_OF_BLACKWELL[row["source"], row["device"]]], row["device"])
        for row in rows_of("blackwell_runs.csv")
    )
