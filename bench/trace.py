"""How long a trace takes and what it holds, beside other tools that count FLOPs or bytes: what each of them misses.

    OMP_NUM_THREADS=1 python bench trace              # our own figures
    OMP_NUM_THREADS=1 python bench trace --beside     # also calflops, fvcore, ptflops, torchinfo, DeepSpeed, torch

Every figure comes from a process of its own; times are CPU time after imports, medians of interleaved samples. The
others are installed into a temporary environment. Their numbers are held against the ledger's of the same model: FLOPs
of matmuls and attention in forward and in the whole step, and the step's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from timing import borrowing, not_installed

HERE = Path(__file__).parent
TOOLS = {
    # tool: what is installed for it; None for torch's own
    "calflops": "calflops", "fvcore": "fvcore", "ptflops": "ptflops", "torchinfo": "torchinfo",
    "deepspeed": "deepspeed", "flop_counter": None, "mem_tracker": None, "runtime_estimator": None,
}  # fmt: skip
SIZES = ((4, 256, 512), (12, 768, 1024))  # layers, width, tokens of a Llama
STEPS = {
    # what is traced: blocks once, in a process of its own
    "8B, engine": ("run", "llama-3-8b"), "70B, engine": ("run", "llama-3-70b"),
    "405B, engine": ("run", "llama-3.1-405b"),
    "8B, transformers": ("hf", "llama-3-8b"), "70B, transformers": ("hf", "llama-3-70b"),
    "405B, transformers": ("hf", "llama-3.1-405b"),
    "8x7B, transformers": ("mixtral", ""),
}  # fmt: skip


def own_step(kind: str, name: str, blocks: str) -> dict[str, Any]:
    """CPU seconds and bytes of one traced step in this process, after imports."""
    import resource
    import time

    import torch

    torch.set_num_threads(1)
    bare = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "run":
        from trainledger.answers.load import load
        from trainledger.observe.measure.step import rehearse

        recipe = {"seq_len": 8192, "global_batch": 1, "steps": 1, "precision": "bf16-mixed"}
        run = load({"model": {"preset": name}, "recipe": recipe})
        imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start, wall = time.process_time(), time.perf_counter()
        ledger = rehearse(run, blocks=blocks)
    else:
        import transformers

        import trainledger as tl
        from trainledger.trace.loss import optimizer_named

        config: Any = transformers.MixtralConfig(use_cache=False)
        if kind == "hf":
            spec = tl.model(name)
            config = transformers.LlamaConfig(
                hidden_size=spec.d_model,
                intermediate_size=spec.feed_forward.d_ff,
                num_hidden_layers=spec.n_layers,
                num_attention_heads=spec.attention.n_heads,
                num_key_value_heads=spec.attention.n_kv_heads,
                vocab_size=spec.vocab_size,
                max_position_embeddings=spec.max_seq_len,
                use_cache=False,
            )
        make = transformers.AutoModelForCausalLM.from_config
        with torch.device("meta"):
            make(type(config)(num_hidden_layers=1, use_cache=False))  # its modules are imported late
        imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start, wall = time.process_time(), time.perf_counter()
        with torch.device("meta"):
            model = make(config, dtype=torch.bfloat16).train()
        tokens = torch.empty((1, min(8192, config.max_position_embeddings)), dtype=torch.int64, device="meta")
        batch = {"input_ids": tokens, "labels": torch.empty_like(tokens)}
        optimizer = optimizer_named("adamw-foreach", model.parameters())
        ledger = tl.trace(model, batch, optimizer=optimizer, blocks=blocks)
    seconds, waited = time.process_time() - start, time.perf_counter() - wall
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": seconds, "wall_seconds": waited, "over_torch_nbytes": (highest - bare) * 1024,
        "over_imports_nbytes": (highest - imported) * 1024,
        "operations": sum(each.times for each in ledger), "flops": ledger.flops, "peak": ledger.peak().nbytes,
        "kept": ledger.kept_nbytes, "partial": ledger.partial,
    }  # fmt: skip


def own_truth(layers: int, width: int, tokens: int) -> dict[str, Any]:
    """The ledger of the model that `beside.py` gives the others, of the same real step."""
    import time

    import torch
    from transformers import LlamaForCausalLM

    import trainledger as tl

    sys.path.insert(0, str(HERE))
    from beside import config, ids

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = LlamaForCausalLM(config(layers, width, tokens))
    batch = {"input_ids": ids(tokens), "labels": ids(tokens)}
    start = time.process_time()
    ledger = tl.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters(), foreach=False))
    matmuls = ledger.filter(lambda each: each.kind in ("matmul", "attention")).by("phase")
    return {
        "parameters": ledger.parameters, "forward": matmuls["forward"],
        "step": matmuls["forward"] + matmuls["backward"], "peak": ledger.peak().nbytes,
        "seconds": time.process_time() - start,
    }  # fmt: skip


def told(python: str, *words: object) -> dict[str, Any]:
    """What a process prints as its last line; its complaint as an error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, *map(str, words)], capture_output=True, text=True, env=environment)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        complaint = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": complaint[:200]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def environment_of_others(folder: str) -> tuple[str, dict[str, str]]:
    """A Python that has the other tools beside this one's torch and transformers; what could not be installed."""
    python = borrowing(Path(folder))
    missing = {}
    for package in filter(None, TOOLS.values()):
        why = not_installed(python, package)
        if why:
            missing[package] = why
    return python, missing


def own_figures(samples: int, *, whole: bool) -> dict[str, dict[str, Any]]:
    """Median seconds and bytes of each step of `STEPS`; with ``whole`` whether the trace of all blocks is equal."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in STEPS}
    for _ in range(samples):
        for name, (kind, model) in STEPS.items():
            rows[name].append(told(sys.executable, __file__, "--step", kind, model or "-", "once"))
    figures = {}
    for name, each in rows.items():
        failed = next((row["error"] for row in each if "error" in row), "")
        if failed:
            figures[name] = {"error": failed}
            continue
        numbers = ("seconds", "wall_seconds", "over_torch_nbytes", "over_imports_nbytes")
        figures[name] = {**each[0], **{number: median(row[number] for row in each) for number in numbers}}
        if whole:
            kind, model = STEPS[name]
            every = told(sys.executable, __file__, "--step", kind, model or "-", "all")
            same = all(every.get(key) == each[0][key] for key in ("operations", "flops", "peak", "kept"))
            figures[name] |= {"equal": same, "whole_seconds": every.get("seconds")}
    return figures


def print_own(figures: dict[str, dict[str, Any]]) -> None:
    heads = f"{'CPU s':>8}{'wall s':>8}{'over torch':>12}{'over imports':>14}{'operations':>12}"
    print(f"{'traced step':22}{heads}  all blocks")
    for name, row in figures.items():
        if "error" in row:
            print(f"{name:22}{row['error']}")
            continue
        every = ""
        if "equal" in row:
            every = f"{'equal' if row['equal'] else 'DIFFER'} in {row['whole_seconds']:.1f} s"
        print(
            f"{name:22}{row['seconds']:8.2f}{row['wall_seconds']:8.2f}{row['over_torch_nbytes'] / 1e6:9.0f} MB"
            f"{row['over_imports_nbytes'] / 1e6:11.0f} MB{row['operations']:12,}  {every}"
        )


def print_beside(size: tuple[int, int, int], truth: dict[str, Any], others: dict[str, dict[str, Any]]) -> None:
    layers, width, tokens = size
    print(f"\nLlama of {layers} layers, width {width}, {tokens} tokens, fp32, AdamW: ratio to the ledger")
    print(f"{'':20}{'forward':>9}{'step':>9}{'peak':>9}{'CPU s':>8}")
    print(f"{'trainledger':20}{1:9.3f}{1:9.3f}{1:9.3f}{truth['seconds']:8.2f}")
    for name, row in others.items():
        if row.get("error"):
            print(f"{name:20}{row['error']}")
            continue
        cells = [
            f"{row[key] / truth[key]:9.3f}" if row.get(key) else f"{'-':>9}" for key in ("forward", "step", "peak")
        ]
        print(f"{name:20}{''.join(cells)}{row['seconds']:8.2f}")
        if row.get("skipped"):
            print(f"{'':20}skipped: {row['skipped'][:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", action="store_true", help="install other tools and ask them too")
    parser.add_argument("--whole", action="store_true", help="also trace every block and compare")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", nargs=3, metavar=("KIND", "MODEL", "BLOCKS"), help=argparse.SUPPRESS)
    parser.add_argument("--truth", nargs=3, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(own_step(*args.step)))
        return
    if args.truth:
        print(json.dumps(own_truth(*args.truth)))
        return
    result: dict[str, Any] = {"steps": own_figures(args.samples, whole=args.whole)}
    if not args.json:
        print_own(result["steps"])
    if args.beside:
        with tempfile.TemporaryDirectory() as folder:
            python, missing = environment_of_others(folder)
            result |= {"not_installed": missing, "beside": {}}
            for size in SIZES:
                truth = told(sys.executable, __file__, "--truth", *size)
                asked = [name for name, package in TOOLS.items() if package not in missing]
                others = {name: told(python, HERE / "beside.py", name, *size) for name in asked}
                result["beside"]["x".join(map(str, size))] = {"trainledger": truth, **others}
                if not args.json:
                    print_beside(size, truth, others)
    if args.json:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
