"""Steps of our own model, recorded by torch.profiler."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainledger.engine.nn.init import initialize
from trainledger.engine.train.precision import build_model
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

SPEC = from_fields(
    ModelSpec,
    {
        "vocab_size": 96, "d_model": 32, "n_layers": 3, "attention.n_heads": 4, "feed_forward.d_ff": 80,
        "max_seq_len": 64,
    },
)  # fmt: skip
STEPS = 4


def run_of(**recipe: str) -> Run:
    made = Recipe(seq_len=32, global_batch=2, steps=1, learning_rate=1e-3)
    return Run(model=SPEC, recipe=with_fields(made, {"precision": "fp32", **recipe}))


def recorded(folder: Path, run: Run, *, marked: bool = True, compiled: bool = False) -> Path:
    model = initialize_model(run)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens_BT = torch.randint(0, 96, (run.device_batch, run.recipe.seq_len))
    kept = folder / "trace.json"
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1) if marked else None,
        on_trace_ready=(lambda found: found.export_chrome_trace(str(kept))) if marked else None,
    ) as recording:  # fmt: skip
        for _ in range(STEPS + 1):
            torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.step() if marked else None
    if not marked:
        recording.export_chrome_trace(str(kept))
    return kept


def initialize_model(run: Run) -> torch.nn.Module:
    model = build_model(run.model, run.recipe)
    initialize(model, seed=0)
    return model
