"""One rank of FSDP2 with its states on the host: counts the bytes of each copy that it asks for in one step.

Started by test_offload_ranks.py, once for each rank: python offload_rank.py CASES.json RANK OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_witness import batches_of, local, model_of, nbytes
from torch import Tensor

from trainledger.answers.load import load
from trainledger.engine.train.parallel.mesh import data_rank, mesh_of
from trainledger.engine.train.parallel.model_on_rank import RanksTogether, divide, optimizer_on_rank
from trainledger.engine.train.step import optimizer_step
from trainledger.spec.run import Run

COPIES = {"_fsdp_param.py": "to_device", "_fsdp_collectives.py": "to_host"}


def run_case(run: Run) -> dict[str, Any]:
    """Bytes of the copies of one step by direction, and a figure of the trained weights."""
    torch.manual_seed(0)
    model, mesh, sent, to = model_of(run), mesh_of(run.layout), dict.fromkeys(COPIES.values(), 0), Tensor.to
    divide(model, run.layout, mesh, run.recipe.precision, on_host=run.recipe.offload == "parameters")
    together = RanksTogether(run.layout, mesh)
    optimizer = optimizer_on_rank(model, run.recipe, together)

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        direction = COPIES.get(Path(sys._getframe(1).f_code.co_filename).name)
        if direction is not None and "non_blocking" in kwargs:
            sent[direction] += nbytes(self)
        return to(self, *args, **kwargs)

    Tensor.to = counted  # type: ignore[method-assign, assignment]
    try:
        optimizer_step(model, optimizer, batches_of(run, 0, data_rank(run.layout, mesh)), run.recipe, together=together)
    finally:
        Tensor.to = to  # type: ignore[method-assign]
    return {"sent": sent, "weights": [float(local(each).double().sum()) for each in model.parameters()]}


if __name__ == "__main__":
    told, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    where = f"file://{Path(sys.argv[1]).resolve()}.meet"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=told["world"])
    facts = {name: run_case(load(tables)) for name, tables in told["cases"].items()}
    Path(sys.argv[3]).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()
