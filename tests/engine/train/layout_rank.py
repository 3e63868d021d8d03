"""One rank of a tiny run in some layout: begins or loads a checkpoint, takes some steps, saves, and says its losses.

Started by `train_in` of test_layouts_of_checkpoints.py: python layout_rank.py WHAT.json RANK OUT.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.nn.init import initialize
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.parallel.mesh import data_rank, mesh_of
from trainledger.engine.train.parallel.model_on_rank import model_on_rank, optimizer_on_rank
from trainledger.engine.train.precision import build_model
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.saving import Saver, load
from trainledger.engine.train.step import ALONE, Together, optimizer_step
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout


def main(what: str, rank: int, out: str) -> None:
    torch.set_num_threads(1)
    told = json.loads(Path(what).read_text())
    layout = Layout(**told["layout"])
    run = replace(tiny_run(**told["recipe"]), layout=layout, cluster=Cluster(count=layout.devices))
    cpu = torch.device("cpu")
    mesh = None
    together: Together = ALONE
    if layout.devices == 1:
        model = build_model(run.model, run.recipe)
        initialize(model, seed=1)
        optimizer = build_optimizer(model, run.recipe)
        part, ranks = 0, Ranks()
    else:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(what).resolve()}.meet", rank=rank, world_size=layout.devices
        )
        mesh = mesh_of(layout)
        model, together = model_on_rank(run, mesh, cpu, seed=1)
        optimizer = optimizer_on_rank(model, run.recipe, together)
        part, ranks = data_rank(layout, mesh), Ranks(rank, layout.devices, cpu, dist.new_group())
    step = 0 if told["path"] is None else load(Path(told["path"]), model, optimizer)["step"]
    feed = CountingFeed(run, cpu, rank=part, ranks=layout.data_ranks)
    losses = []
    for _, batches in zip(range(told["steps"]), feed.batches(step), strict=False):
        result = optimizer_step(model, optimizer, batches, run.recipe, together=together)
        (total,) = ranks.summed(result.loss.item())
        losses.append(total / layout.devices)
        step += 1
    saver = Saver(Path(told["run_dir"]), ranks, mesh, background=False)
    saver.begin(step, model, optimizer, {})
    path = saver.finish()
    Path(out).write_text(json.dumps({"losses": losses, "path": str(path)}))
    if mesh is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
