"""Two processes that train a small model of ours side by side (gloo, CPU) under torch.profiler, a trace of each.

    python tests/observe/profiler/two_ranks.py FOLDER RANK PORT WAY DELAY_SECONDS

``WAY`` is ddp or fsdp. ``DELAY_SECONDS`` is what the second rank sleeps before each backward.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, schedule

from trainledger.engine.nn.init import initialize
from trainledger.engine.train.precision import build_model
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe

STEPS = 3
SPEC = from_fields(
    ModelSpec,
    {
        "vocab_size": 96, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "feed_forward.d_ff": 80,
        "max_seq_len": 64,
    },
)  # fmt: skip
RECIPE = with_fields(Recipe(seq_len=32, global_batch=4, steps=1, learning_rate=1e-3), {"precision": "fp32"})


def main(folder: str, rank: int, port: str, way: str, delay_seconds: float) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    inner = build_model(SPEC, RECIPE)
    initialize(inner, seed=0)
    model: torch.nn.Module = inner
    if way == "fsdp":
        for each in (*inner.layers, inner):
            fully_shard(each, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens_BT = torch.randint(0, 96, (2, RECIPE.seq_len))
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(Path(folder) / f"rank{rank}.json.gz")),
    ) as recording:  # fmt: skip
        for _ in range(STEPS + 2):
            loss = torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
            if rank == 1 and delay_seconds:
                time.sleep(delay_seconds)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]))
