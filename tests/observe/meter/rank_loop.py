"""A loop of two ranks around a model of ours, metered, with a recorded step.

    python tests/observe/meter/rank_loop.py RUN_DIR RANK PORT WAY

``WAY`` is replicate (DDP) or shard (FSDP2).
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import trainledger as tl
from trainledger.engine.nn.init import initialize
from trainledger.engine.train.precision import build_model
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe

SPEC = from_fields(
    ModelSpec,
    {
        "vocab_size": 96, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "feed_forward.d_ff": 80,
        "max_seq_len": 64,
    },
)  # fmt: skip
RECIPE = with_fields(
    Recipe(seq_len=32, global_batch=4, micro_batch=2, steps=1, learning_rate=1e-3), {"precision": "fp32"}
)


def main(run_dir: str, rank: int, port: str, way: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    inner = build_model(SPEC, RECIPE)
    initialize(inner, seed=0)
    model: torch.nn.Module = inner
    if way == "shard":
        for each in (*inner.layers, inner):
            fully_shard(each, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens_BT = torch.randint(0, 96, (2, RECIPE.seq_len))
    with tl.meter_loop(model, optimizer, run_dir, deep=3):
        for _ in range(10):
            loss = cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
