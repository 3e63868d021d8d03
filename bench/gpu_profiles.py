"""Profiles of steps on a GPU: where their time goes, beside the forecast's causes, and the memory of one.

Called by ``bench/gpu.py``. Of the engine's step (compiled, eager and with checkpointing; with a vocabulary as it is and
one filled up to a multiple of 64) and of transformers' model in the loop that a person would write. With a folder, the
traces and a snapshot of the caching allocator are kept there.
"""

from __future__ import annotations

import gc
import gzip
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_speed
import torch

from trainledger.answers.load import load
from trainledger.catalog import device
from trainledger.engine.train.precision import set_fp32_matmuls
from trainledger.forecast.predict.predict import predict
from trainledger.observe.profiler.profile import profile_of
from trainledger.spec.run import Run

STEPS = 3


def runs() -> Iterator[tuple[str, Run, Any]]:
    """The name of a profile, its run and the loop that takes its steps."""
    for preset, multiple, seq_len, batch, compiled, checkpointing, loop in (
        ("gpt2", 64, 1024, 16, True, "none", gpu_speed.engine),
        ("gpt2", 1, 1024, 16, True, "none", gpu_speed.engine),
        ("gpt2", 1, 1024, 16, True, "none", gpu_speed.transformers),
        ("gpt2-medium", 64, 1024, 8, True, "none", gpu_speed.engine),
        ("gpt2-medium", 64, 1024, 8, False, "full", gpu_speed.engine),
        ("llama-3.2-1b", 1, 2048, 4, True, "none", gpu_speed.engine),
    ):
        recipe = {
            "seq_len": seq_len, "global_batch": batch, "steps": 1, "precision": "bf16-mixed", "compile": compiled,
            "activation_checkpointing": checkpointing,
        }  # fmt: skip
        model = {"preset": preset, "vocab_multiple": multiple}
        run = load({"model": model, "recipe": recipe, "cluster": {"backend": "cuda"}})
        how = "compiled" if compiled else "checkpointed"
        yield f"{preset}-{loop.__name__}-{how}-{run.model.padded_vocab}", run, loop


def profile(name: str, run: Run, loop: Any, folder: Path) -> dict[str, Any]:
    """One profile: written to the folder, read back."""
    gc.collect()
    torch.cuda.empty_cache()
    set_fp32_matmuls(run.recipe.precision)
    shape = (run.device_batch, run.recipe.seq_len)
    inputs_BT, targets_BT = (torch.randint(0, run.model.vocab_size, shape, device="cuda") for _ in range(2))
    step = loop(run, inputs_BT, targets_BT)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        step()
    end.record()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as recorded:
        for _ in range(STEPS):
            step()
            recorded.step()
        torch.cuda.synchronize()
    plain = folder / f"{name}.json"
    recorded.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(f"{plain}.gz", "wb") as packed:
        shutil.copyfileobj(source, packed)
    plain.unlink()
    found = profile_of(f"{plain}.gz")
    forecast = predict(run, device("h200" if "H200" in torch.cuda.get_device_name() else "h100-sxm"), backend="cuda")
    return {
        "profile": name, "unprofiled_step_seconds": begin.elapsed_time(end) / 1e4,
        "predicted_step_seconds": forecast.step_seconds, "predicted_causes": forecast.step_causes,
        "step_nanoseconds": [each.nanoseconds for each in found.steps], "parts_ns": dict(found.step.parts_ns),
        "flops": found.flops, "hfu": found.hfu, "causes": [each.sentence for each in found.causes],
        "doubts": list(found.doubts),
    }  # fmt: skip


def snapshot(run: Run, path: Path) -> int:
    """The caching allocator's own record of a model built and two eager steps; gives its peak in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shape = (run.device_batch, run.recipe.seq_len)
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    inputs_BT, targets_BT = (torch.randint(0, run.model.vocab_size, shape, device="cuda") for _ in range(2))
    step = gpu_speed.engine(run, inputs_BT, targets_BT)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    return int(torch.cuda.max_memory_allocated())


def profiles(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """All of them, one after the other, and with a folder the snapshot."""
    with tempfile.TemporaryDirectory() as temporary:
        for name, run, loop in runs():
            yield profile(name, run, loop, folder or Path(temporary))
    if folder is not None:
        recipe = {"seq_len": 1024, "global_batch": 8, "steps": 1, "precision": "bf16-mixed"}
        run = load({"model": {"preset": "gpt2"}, "recipe": recipe, "cluster": {"backend": "cuda"}})
        yield {"profile": "snapshot", "peak_nbytes": snapshot(run, folder / "gpt2-memory.pickle")}
