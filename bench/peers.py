"""Ours beside other estimators of training memory and time, on the same measured rows: writes docs/tables/peers.csv.

    python bench/peers.py --simumax DIR --calculon DIR --megatron FILE --python PYTHON --accelerate PYTHON

Each is asked in its own way, at the versions below, and none is kept here: DIR are unpacked snapshots of SimuMax
(4dcaae5) and Calculon, FILE is Megatron-LM's megatron/training/theoretical_memory_usage.py (d98e8a64), PYTHON an
interpreter with llm-analysis (0.2.2), and with pandas and psutil for Calculon, or one with accelerate (1.15.0). Rows of
who is not asked stay as they are. Seconds are those of one case.

Rows: SimuMax's 43 cases on 8 B200 (Megatron-LM 23e00ed), of which it prints its own predictions, and eight steps on
A100 (Korthikanti et al. 2022, arXiv 2205.05198, table 5), which Calculon has with its tests. Ours are made without any
constant fitted on either. accelerate's estimate-memory asks for no layout, batch or length: its rows are those of all
weights trained on one device, six of Qwen's page.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "tables" / "peers.csv"
sys.path[:0] = [str(ROOT / "tools" / "published")]

from error_rows import memory_rows  # noqa: E402
from later_predictions import predictions  # noqa: E402
from later_runs import ALLOCATED, later_runs  # noqa: E402
from published_case import read_rows  # noqa: E402

from trainledger import catalog  # noqa: E402
from trainledger.answers.load import load  # noqa: E402
from trainledger.forecast.predict.parallel_step import layout_time  # noqa: E402
from trainledger.ledger.ranks import accounts  # noqa: E402

# Table 5 of arXiv 2205.05198: seconds of a step with full recomputation, and with selective and sequence parallelism.
TABLE_5 = {
    "megatron-22B": (1.42, 1.10),
    "gpt3-175B": (18.13, 13.75),
    "turing-530B": (49.05, 37.83),
    "megatron-1T": (94.42, 71.49),
}
VOCABULARY = 51200
Errors = dict[tuple[str, str], list[tuple[float, float]]]  # of rows and a tool: relative error, seconds it took


def simumax_rows(snapshot: Path | None, errors: Errors) -> None:
    """Ours, and what SimuMax prints of its own cases."""
    printed: dict[str, dict[str, Any]] = {}
    if snapshot is not None:
        text = (snapshot / "docs" / "b200" / "b200_release_v1.2_summary.json").read_text(encoding="utf-8")
        printed = {row["case"]: row for row in json.loads(text)["rows"]}
    spent: dict[object, float] = defaultdict(float)  # figures of one run share its account
    started = time.perf_counter()
    for prediction in predictions(lambda case: case.name.startswith("SX")):
        spent[prediction.case.run] += time.perf_counter() - started
        took = spent[prediction.case.run]
        case = prediction.case
        kind = "experts" if "deepseek" in case.row["model"] else "dense"
        rows = f"B200, {kind}, " + ("peak allocated" if case.figure == ALLOCATED else case.figure)
        errors[rows, "trainledger"].append((prediction.error, took))
        started = time.perf_counter()
        named = printed.get(case.row["notes"].removeprefix("case ").partition(";")[0].strip())
        if named is None:
            continue
        if case.figure == ALLOCATED:
            errors[rows, "SimuMax, as printed"].append((named["perf_alloc_gib"] * 2**30 / case.measured - 1, 0.0))
        elif case.figure == "step":
            errors[rows, "SimuMax, as printed"].append((named["perf_ms"] / 1e3 / case.measured - 1, 0.0))


def megatron_rows(file: Path, errors: Errors) -> None:
    """Megatron-LM's own estimate of the dense cases: weights, optimizer and activations of the most loaded rank."""
    estimator = _module_of(file)
    for case in later_runs()[0]:
        run = case.run
        if not case.name.startswith("SX") or case.figure != ALLOCATED or run.model.experts is not None:
            continue
        layout, spec, recipe = run.layout, run.model, run.recipe
        arguments = types.SimpleNamespace(
            kv_channels=spec.head_size, num_attention_heads=spec.attention.n_heads, hidden_size=spec.d_model,
            group_query_attention=True, num_query_groups=spec.kv_heads, num_experts=None, swiglu=True,
            moe_shared_expert_intermediate_size=None, num_layers=spec.n_layers, mtp_num_layers=None,
            ffn_hidden_size=spec.feed_forward.d_ff, multi_latent_attention=False, normalization="RMSNorm",
            padded_vocab_size=spec.padded_vocab, untie_embeddings_and_output_weights=True,
            pipeline_model_parallel_size=layout.pipeline, tensor_model_parallel_size=layout.tensor,
            context_parallel_size=layout.context, data_parallel_size=layout.shard, use_distributed_optimizer=True,
            virtual_pipeline_model_parallel_size=None, sequence_parallel=layout.tensor > 1, seq_length=recipe.seq_len,
            micro_batch_size=recipe.micro_batch, recompute_granularity=None, moe_layer_freq=1, moe_latent_size=None,
            moe_ffn_hidden_size=None, q_lora_rank=None,
            expert_tensor_parallel_size=layout.tensor, expert_model_parallel_size=1, world_size=layout.devices,
        )  # fmt: skip
        started = time.perf_counter()
        of_states, of_activations, _ = estimator.report_theoretical_memory(arguments, num_microbatches=run.grad_accum)
        took = time.perf_counter() - started
        error = (of_states + of_activations) * 2**20 / case.measured - 1
        errors["B200, dense, peak allocated", "Megatron-LM's estimate"].append((error, took))


def one_device(interpreter: str, errors: Errors) -> None:
    """Ours, and what accelerate's estimate-memory prints of a model's weights, trained by Adam in bf16 (2026-11-30)."""
    measured = {row.name: row for row in memory_rows() if row.devices == 1 and "adapters" not in row.kinds}
    for row in read_rows():
        if (known := measured.get(row["id"])) is None or known.measured is None:
            continue
        rows = "A100, Qwen-1.8B on one device, driver's peak"
        errors[rows, "trainledger"].append((known.predicted / known.measured - 1, 0.0))
        asked = [interpreter, "-c", _ACCELERATE, row["params"]]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        nbytes, took = json.loads(done.stdout.strip().splitlines()[-1])
        errors[rows, "accelerate estimate-memory"].append((nbytes / known.measured - 1, took))


def _module_of(file: Path) -> Any:
    """The estimator alone, whose relative import of the rest of Megatron-LM is replaced by what it takes from there."""
    text = file.read_text(encoding="utf-8").replace("from .utils import is_hybrid_model, print_rank_0", "")
    module = types.ModuleType("theoretical_memory_usage")
    silent: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    vars(module).update(is_hybrid_model=lambda _: False, print_rank_0=silent, print=silent)
    exec(compile(text, str(file), "exec"), vars(module))
    return module


def table_5(calculon: Path, interpreter: str, errors: Errors) -> None:
    """Ours, Calculon and llm-analysis on the eight steps; the cases are Calculon's files."""
    rows = "A100, table 5, step"
    for model, times in TABLE_5.items():
        sizes = json.loads((calculon / "models" / f"{model}.json").read_text(encoding="utf-8"))
        for mode, measured in zip(("full", "seqsel"), times, strict=True):
            file = calculon / "validation" / "seqsel" / "tab5" / f"{model}_{mode}.json"
            execution = json.loads(file.read_text(encoding="utf-8"))
            started = time.perf_counter()
            seconds = _ours(sizes, execution)
            errors[rows, "trainledger"].append((seconds / measured - 1, time.perf_counter() - started))
            for tool, program in (("Calculon", _CALCULON), ("llm-analysis, its defaults", _LLM_ANALYSIS)):
                asked = json.dumps([sizes, execution, VOCABULARY, str(calculon)])
                done = subprocess.run([interpreter, "-c", program, asked], capture_output=True, text=True, check=True)
                seconds, took = json.loads(done.stdout.strip().splitlines()[-1])
                errors[rows, tool].append((seconds / measured - 1, took))


def _ours(sizes: dict[str, Any], execution: dict[str, Any]) -> float:
    """Seconds of a step of Calculon's case, with the options of the paper's runs."""
    selective = execution["activation_recompute"] == "attn_only"
    chunks = execution["pipeline_interleaving"]
    layout: dict[str, Any] = {
        "tensor": execution["tensor_par"], "pipeline": execution["pipeline_par"], "replicate": execution["data_par"],
        "split_sends": execution["pipeline_par"] > 1 and not selective,
    }  # fmt: skip
    if selective:
        layout |= {"sequence_parallel": True, "sequence_gather": "again"}
    if chunks > 1:
        layout |= {"schedule": "interleaved", "virtual_stages": chunks}
    run = load({
        "model": {
            "vocab_size": VOCABULARY, "d_model": sizes["hidden"], "n_layers": sizes["num_blocks"],
            "max_seq_len": sizes["seq_size"], "norm": {"kind": "layernorm", "bias": True},
            "positions": {"kind": "learned"}, "tie_embeddings": True,
            "attention": {"n_heads": sizes["attn_heads"], "bias": True},
            "feed_forward": {"d_ff": sizes["feedforward"], "gated": False, "activation": "gelu_tanh", "bias": True},
        },
        "recipe": {
            "seq_len": sizes["seq_size"], "micro_batch": execution["microbatch_size"], "steps": 1,
            "global_batch": execution["batch_size"], "framework": "megatron-local", "attention": "math",
            "dropout": 0.1, "attention_dropout": 0.1, "activation_checkpointing": "attention" if selective else "full",
            "precision": {"kind": "bf16", "master_weights": True, "gradient_dtype": "fp32"},
        },
        "layout": layout,
        "cluster": {"device": "a100-sxm-80gb", "count": execution["num_procs"]},
    })  # fmt: skip
    seconds = layout_time(accounts(run, backend="cuda"), catalog.placed(catalog.device("a100-sxm-80gb"), run.cluster))
    return float(seconds.seconds)  # type: ignore[arg-type]


_ACCELERATE = """
import json, sys, time
from accelerate.commands.estimate import estimate_training_usage
started = time.perf_counter()
told = estimate_training_usage(4 * int(sys.argv[1]), "bfloat16")
print("\\n" + json.dumps([max(told.values()), time.perf_counter() - started]))
"""
_CALCULON = """
import json, logging, sys, time
sizes, run, vocabulary, calculon = json.loads(sys.argv[1])
sys.path.insert(0, calculon)
from calculon.llm import Llm
from calculon.system import System
system = System(json.load(open(calculon + "/systems/a100_80g.json")))
started = time.perf_counter()
model = Llm(Llm.Application(sizes), logging.getLogger())
model.compile(system, Llm.Execution.from_json(run))
model.run(system)
print("\\n" + json.dumps([model.get_stats_json(False)["total_time"], time.perf_counter() - started]))
"""
_LLM_ANALYSIS = """
import json, sys, time
from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
from llm_analysis.config import DtypeConfig, ModelConfig, ParallelismConfig, get_gpu_config_by_name
sizes, run, vocabulary, _ = json.loads(sys.argv[1])
started = time.perf_counter()
model = ModelConfig(name="model", num_layers=sizes["num_blocks"], n_head=sizes["attn_heads"],
    hidden_dim=sizes["hidden"], vocab_size=vocabulary, max_seq_len=sizes["seq_size"],
    ffn_embed_dim=sizes["feedforward"])
ways = ParallelismConfig(tp_size=run["tensor_par"], pp_size=run["pipeline_par"], dp_size=run["data_par"],
    sp_size=run["tensor_par"] if run["activation_recompute"] == "attn_only" else 1)
analysis = LLMAnalysis(model, get_gpu_config_by_name("a100-sxm-80gb"), DtypeConfig(), ways)
again = ActivationRecomputation["SELECTIVE" if run["activation_recompute"] == "attn_only" else "FULL"]
told = analysis.training(batch_size_per_gpu=run["microbatch_size"], global_batch_size=run["batch_size"],
    seq_len=sizes["seq_size"], activation_recomputation=again, total_num_tokens=run["batch_size"] * sizes["seq_size"])
print("\\n" + json.dumps([told["latency_per_iter"], time.perf_counter() - started]))
"""


def table(errors: Errors) -> Iterator[tuple[object, ...]]:
    with open(TABLE, newline="", encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    known: dict[tuple[str, str], tuple[object, ...]] = {(line[0], line[1]): tuple(line) for line in lines}
    for (rows, tool), found in errors.items():
        off = [100 * error for error, _ in found]
        took = median(seconds for _, seconds in found)
        figures = (f"{figure:.2f}" for figure in (median(map(abs, off)), median(off), max(map(abs, off))))
        known[rows, tool] = rows, tool, len(off), *figures, f"{took:.2g}" if took else "as printed"
    yield tuple(head)
    yield from (known[key] for key in sorted(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("simumax", "calculon", "megatron"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--accelerate", metavar="PYTHON")
    given = parser.parse_args()
    errors: Errors = defaultdict(list)
    if given.calculon is not None:
        table_5(given.calculon, given.python, errors)
    if given.megatron is not None:
        megatron_rows(given.megatron, errors)
    if given.accelerate is not None:
        one_device(given.accelerate, errors)
    simumax_rows(given.simumax, errors)
    text = list(table(errors))
    with open(TABLE, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(text)
    print(TABLE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
