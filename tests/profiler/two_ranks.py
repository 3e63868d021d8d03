"""Two processes that train a small model side by side (gloo, CPU) under torch.profiler, a trace of each.

    python tests/profiler/two_ranks.py FOLDER RANK PORT DELAY_SECONDS

``DELAY_SECONDS`` is what the second rank sleeps before each backward.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

STEPS, ROWS, SIZE = 3, 64, 128


def main(folder: str, rank: int, port: str, delay_seconds: float) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(Path(folder) / f"rank{rank}.json.gz")),
    ) as recording:  # fmt: skip
        for _ in range(STEPS + 2):
            loss = model(torch.randn(ROWS, SIZE)).square().mean()
            if rank == 1 and delay_seconds:
                time.sleep(delay_seconds)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
