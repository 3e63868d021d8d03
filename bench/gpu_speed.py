"""Speed of the engine's step on a GPU beside a bare loop of the same model and one of transformers' model.

Called by ``bench/gpu.py``. 124M, 350M and 1.2B parameters in bf16 (autocast), blocks compiled, tokens that are random:
what a step does is what is timed, without data or checkpoints. The three loops take turns, so that clocks and heat are
the same for them; figures are medians. Memory is of a process of one loop: what its own tensors take at the peak, and
what the allocator holds, beside the forecast.

Profiles: where the time of steps goes, beside the forecast's causes, and the memory of one: of the engine's step
(compiled, eager and with checkpointing; a vocabulary as it is and one filled up to a multiple of 64) and of
transformers' model in the loop that a person would write. With a folder, traces and a snapshot are kept there.
Reconciled: runs of the engine from the command line, forecast and measured.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import trainledger
from trainledger.answers.load import load
from trainledger.catalog import device
from trainledger.engine.nn.init import initialize
from trainledger.engine.train.device import set_fp32_matmuls
from trainledger.engine.train.guard import Agreed, JudgedOnDevice
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.precision import build_model
from trainledger.engine.train.step import optimizer_step
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.predict import predict
from trainledger.ledger.step import account
from trainledger.observe.profiler.profile import profile_of
from trainledger.spec.run import Run

Step = Callable[[], object]
SIZES = (("gpt2", 1024, 16), ("gpt2-medium", 1024, 8), ("llama-3.2-1b", 2048, 4))
ROUNDS, STEPS = 4, 5


def runs(models: list[str]) -> Iterator[Run]:
    for preset, seq_len, batch in (each for each in SIZES if each[0] in models):
        recipe = {"seq_len": seq_len, "global_batch": batch, "steps": 1, "precision": "bf16-mixed", "compile": True}
        # Products of 50,257 columns take kernels a fifth as fast; torch.compile pads them in transformers' model.
        model = {"preset": preset, "vocab_multiple": 64}
        yield load({"model": model, "recipe": recipe, "cluster": {"backend": "cuda"}})


@dataclass
class Loop:
    """One way to take a step, the seconds of its steps, and the memory of its process."""

    name: str
    make: Callable[[Run, Tensor, Tensor], Step]
    seconds: list[float] = field(default_factory=list)
    peak_nbytes: int = 0
    reserved_nbytes: int = 0


def engine(run: Run, inputs_BT: Tensor, targets_BT: Tensor) -> Step:
    """The engine's own step, judged as in its loop: loss and norm are read where the next step is launched."""
    model = _model(run)
    optimizer = build_optimizer(model, run.recipe)
    earlier: list[JudgedOnDevice] = []

    def step() -> None:
        judge = JudgedOnDevice(lambda loss, norm: Agreed(loss, norm, True))
        optimizer_step(model, optimizer, [(inputs_BT, targets_BT)], run.recipe, judge=judge)
        for each in earlier:
            each.read()
        earlier[:] = [judge]

    return step


def bare(run: Run, inputs_BT: Tensor, targets_BT: Tensor) -> Step:
    """The same model in the loop that a person would write."""
    model = _model(run)
    return _written_out(model, lambda: model(inputs_BT), targets_BT)


def transformers(run: Run, inputs_BT: Tensor, targets_BT: Tensor) -> Step:
    """transformers' model of the same sizes, with its own loss, in the same loop."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    spec = run.model
    if run.model.name.startswith("gpt2"):
        sizes = {"n_embd": spec.d_model, "n_layer": spec.n_layers, "n_head": spec.attention.n_heads}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = GPT2Config(
            vocab_size=spec.vocab_size, n_positions=spec.max_seq_len, use_cache=False, **sizes, **off
        )
    else:
        config = LlamaConfig(
            vocab_size=spec.vocab_size, hidden_size=spec.d_model, num_hidden_layers=spec.n_layers,
            intermediate_size=spec.feed_forward.d_ff, num_attention_heads=spec.attention.n_heads,
            num_key_value_heads=spec.attention.n_kv_heads, max_position_embeddings=spec.max_seq_len,
            tie_word_embeddings=spec.tie_embeddings, use_cache=False,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").cuda().train()
    compiled: Any = torch.compile(model)
    return _written_out(model, lambda: compiled(inputs_BT).logits, targets_BT)


def _model(run: Run) -> nn.Module:
    with torch.device("cuda"):
        model = build_model(run.model, run.recipe)
    initialize(model, seed=0)
    for layer in model.train().layers if run.recipe.compile else ():
        layer.compile()
    return model


def _written_out(model: nn.Module, logits: Callable[[], Tensor], targets_BT: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(logits().float().flatten(0, 1), targets_BT.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def compare(run: Run) -> dict[str, Any]:
    """Tokens per second, MFU and memory of each loop for one run."""
    set_fp32_matmuls(run.recipe.precision)
    shape = (run.device_batch, run.recipe.seq_len)
    inputs_BT, targets_BT = (torch.randint(0, run.model.vocab_size, shape, device="cuda") for _ in range(2))
    loops = [Loop(each.__name__, each) for each in (engine, bare, transformers)]
    for _ in range(2):  # each loop first and last once, in a process that holds no other
        for loop in loops:
            _sample(loop, run, inputs_BT, targets_BT)
        loops.reverse()
    sheet = device("h200" if "H200" in torch.cuda.get_device_name() else "h100-sxm")
    peak = sheet.peak_flops_per_second["bf16"]
    ledger = account(run, backend="cuda")
    forecast = predict(run, sheet, backend="cuda")
    told = {
        each.name: {
            "step_seconds": median(each.seconds),
            "tokens_per_second": run.recipe.tokens_per_step / median(each.seconds),
            "mfu": ledger.matmul_flops / median(each.seconds) / peak,
            "peak_nbytes": each.peak_nbytes, "reserved_nbytes": each.reserved_nbytes,
        }
        for each in loops
    }  # fmt: skip
    return {
        "model": run.model.name, "tokens_per_step": run.recipe.tokens_per_step, "matmul_flops": ledger.matmul_flops,
        "peak_flops_per_second": peak, "predicted_step_seconds": forecast.step_seconds,
        "predicted_mfu": forecast.mfu, "predicted_peak_nbytes": ledger.peak().nbytes,
        "predicted_reserved_nbytes": memory_of_device(run, ledger.peak().nbytes, sheet).reserved_nbytes, "loops": told,
    }  # fmt: skip


def _sample(loop: Loop, run: Run, inputs_BT: Tensor, targets_BT: Tensor) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    step = loop.make(run, inputs_BT, targets_BT)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        loop.seconds.append((time.perf_counter() - start) / STEPS)
    loop.peak_nbytes = torch.cuda.max_memory_allocated()
    loop.reserved_nbytes = torch.cuda.max_memory_reserved()


PROFILED_STEPS = 3


def profiled_runs() -> Iterator[tuple[str, Run, Any]]:
    """The name of a profile, its run and the loop that takes its steps."""
    for preset, multiple, seq_len, batch, compiled, checkpointing, loop in (
        ("gpt2", 64, 1024, 16, True, "none", engine),
        ("gpt2", 1, 1024, 16, True, "none", engine),
        ("gpt2", 1, 1024, 16, True, "none", transformers),
        ("gpt2-medium", 64, 1024, 8, True, "none", engine),
        ("gpt2-medium", 64, 1024, 8, False, "full", engine),
        ("llama-3.2-1b", 1, 2048, 4, True, "none", engine),
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
        for _ in range(PROFILED_STEPS):
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
    step = engine(run, inputs_BT, targets_BT)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    return int(torch.cuda.max_memory_allocated())


def profiles(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """All of them, one after the other, and with a folder the snapshot."""
    with tempfile.TemporaryDirectory() as temporary:
        for name, run, loop in profiled_runs():
            yield profile(name, run, loop, folder or Path(temporary))
    if folder is not None:
        recipe = {"seq_len": 1024, "global_batch": 8, "steps": 1, "precision": "bf16-mixed"}
        run = load({"model": {"preset": "gpt2"}, "recipe": recipe, "cluster": {"backend": "cuda"}})
        yield {"profile": "snapshot", "peak_nbytes": snapshot(run, folder / "gpt2-memory.pickle")}


RECONCILED_STEPS = 40
RUN = """
[model]
preset = "{preset}"
vocab_multiple = 64
[recipe]
seq_len = {seq_len}
global_batch = {batch}
steps = {steps}
precision = "bf16-mixed"
compile = true
[data]
path = "text.txt"
tokenizer = "bytes"
"""


def reconciled(calibration: Path, models: list[str]) -> Iterator[dict[str, Any]]:
    """Each run's reconciliation as its command prints it, and each quantity predicted and measured."""
    found_in = os.pathsep.join([str(Path(trainledger.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, TRAINLEDGER_CALIBRATION=str(calibration.resolve()), PYTHONPATH=found_in)
    for preset, seq_len, batch in (each for each in SIZES if each[0] in models):
        with tempfile.TemporaryDirectory() as folder:
            text = " ".join(f"{number} times {number} is {number**2}, they say." for number in range(200_000))
            Path(folder, "text.txt").write_text(text)
            run = RUN.format(preset=preset, seq_len=seq_len, batch=batch, steps=RECONCILED_STEPS)
            Path(folder, "run.toml").write_text(run)
            command = [sys.executable, "-m", "trainledger", "train", "run.toml", "--json"]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            yield {"model": preset, "failed": done.stderr.splitlines()[-5:]}
            continue
        found = json.loads(done.stdout)
        quantities = {
            each["quantity"]: [each["predicted"], each["measured"], each["unexplained"]]
            for each in found["reconciliation"]["rows"]
        }
        yield {"model": preset, "quantities": quantities, "text": found["reconciliation_text"].splitlines()}
