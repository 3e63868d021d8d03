"""Which published throughputs are modelled as runs, and why others are not."""

from __future__ import annotations

from published_case import Row, read_rows
from published_sources import reason_left_out
from throughput_case import TimeCase
from throughput_megatron import megatron_time_case
from throughput_nemo import blackwell_cases, fitted_nemo
from throughput_sharded import sharded_time_case, tpu_case

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


def time_case_of(row: Row) -> TimeCase | str:
    """A row as a run with the seconds of its step, or why it is left out."""
    source = row["source"]
    if not any(row[each] for each in FIGURES):
        return NO_FIGURE
    for names, tell in ((_MEGATRON, megatron_time_case), (_SHARDED, sharded_time_case), (_TPU, tpu_case)):
        if any(each in source for each in names):
            return tell(row)
    return reason_left_out("time", source)


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
