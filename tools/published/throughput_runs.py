"""Which published throughputs are modelled as runs, and why others are not."""

from __future__ import annotations

import throughput_blackwell
import throughput_megatron
import throughput_nemo
import throughput_sharded
import throughput_tpu
from published_case import Row, read_rows
from throughput_blackwell import blackwell_cases
from throughput_case import TimeCase, TimeSource
from throughput_megatron import megatron_time_case
from throughput_nemo import fitted_nemo
from throughput_sharded import sharded_time_case
from throughput_tpu import tpu_case

SOURCES: tuple[TimeSource, ...] = (
    *throughput_megatron.SOURCES, *throughput_nemo.SOURCES, *throughput_blackwell.SOURCES, *throughput_sharded.SOURCES,
    *throughput_tpu.SOURCES,
)  # fmt: skip
_MEGATRON = (
    "cases_april2021", "2nd-table-2", "tables.tex", "Megatron-Turing", "vTrain", "bigscience-workshop", "model_table",
    "Megatron-LM:examples/llama",
)  # fmt: skip
_SHARDED = (
    "llm-foundry", "torchtitan", "fms-fsdp", "FlashAttention-2", "deepspeed-azure", "nanoGPT:README",
    "nanoGPT/issues/110", "QwenLM", "gpu/a3/llama_2_7b", "JAX-Toolbox:docs", "Pythia paper",
)  # fmt: skip
_TPU = ("configs/tpu",)
FIGURES = (
    "measured_tokens_per_s_per_device", "measured_tflops_per_device", "measured_mfu", "measured_hfu",
    "measured_step_time_s", "measured_total_hours_or_gpu_hours",
)  # fmt: skip
NO_FIGURE = "no throughput figure"
LEFT_OUT = (
    ("huggingface/peft", "a device without a calibration, and the tokens of a batch are not stated"),
    ("litgpt", "steps take the mean over batches whose lengths are not stated (the longest is)"),
    ("Megatron-LM:README.md strong", "stages and micro-batches are not stated"),
    ("LLaMA paper", "a whole run without its layout: with the device-hours"),
    ("MODEL_CARD", "a whole run without its layout: with the device-hours"),
    ("secondary dataset", "a whole run: with the device-hours"),
    ("Microsoft phi-2", "a whole run: with the device-hours"),
    ("open_llama", "a whole run: with the device-hours"),
    ("modded-nanogpt:README", "a whole run of another program (llm.c), its batches not stated"),
    ("modded-nanogpt:records", "the model has value residuals and other norms, and Muon of five matmuls for each step "
     "over ranks, which no layout says"),
    ("PaLM paper", "no sizes, no batch and no layout"),
    ("tiering.md", "no calibration of this device, or no batch"),
    ("mesh-transformer", "no calibration of TPU v3"),
    ("zero3-offload", "no sizes: a headline"),
    ("aws-neuron", "no calibration of Trainium"),
    ("model_memory_anatomy", "an encoder (BERT) in fp32"),
    ("xla/issues/8210", "neither attention, recomputation nor sharding is stated"),
    ("nanoGPT/issues", "no calibration of this device"),
    ("nanochat", "no calibration of this device"),
    ("autoresearch", "the model has value embeddings and gated residuals, which the spec cannot say"),
    ("llm.c", "no calibration of this device"),
    ("mlx-examples", "no calibration of Apple's devices"),
    ("NVIDIA/Megatron-LM/issues/756", "experts, and neither sequence length nor parallelism is stated"),
    ("swiss-ai", "GH200: no calibration of this device"),
    ("ROCm/TransformerEngine", "a user's script: neither its FLOPs nor its layers are known"),
    ("gpt-neox/pull/424", "no calibration of this device"),
    ("Primus", "no calibration of this device"),
    ("arXiv 2412.19437", "a whole run: with the device-hours"),
    ("techmaggie", "time to a loss, the tokens not stated"),
)  # fmt: skip


def time_case_of(row: Row) -> TimeCase | str:
    """A row as a run with the seconds of its step, or why it is left out."""
    source = row["source"]
    if not any(row[each] for each in FIGURES):
        return NO_FIGURE
    for names, tell in ((_MEGATRON, megatron_time_case), (_SHARDED, sharded_time_case), (_TPU, tpu_case)):
        if any(each in source for each in names):
            return tell(row)
    return next((why for beginning, why in LEFT_OUT if beginning in source), "not predicted")


def time_cases() -> tuple[tuple[TimeCase, ...], tuple[tuple[Row, str], ...]]:
    """Every row that can be modelled, in the order of the files, and the others of ``runs.csv`` with their reason."""
    cases: list[TimeCase] = [*fitted_nemo(), *blackwell_cases()]
    left_out: list[tuple[Row, str]] = []
    for row in read_rows():
        found = time_case_of(row)
        if isinstance(found, str):
            left_out.append((row, found))
        else:
            cases.append(found)
    return tuple(cases), tuple(left_out)
