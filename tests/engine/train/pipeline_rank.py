"""One rank of real pipelines: takes two steps of each case and writes down what the last one held and sent.

Started by test_pipeline_witness.py, once for each rank: python pipeline_rank.py CASES.json RANK OUT.json
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_witness import Witness, batches_of, local, nbytes, storage_nbytes

from trainledger.answers.load import load
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.parallel.mesh import data_rank, mesh_of
from trainledger.engine.train.parallel.model_on_rank import model_on_rank
from trainledger.engine.train.step import optimizer_step
from trainledger.spec.run import Run

STEPS = 2  # the first one makes the optimizer's states


def run_case(run: Run) -> dict[str, Any]:
    mesh = mesh_of(run.layout)
    model, together = model_on_rank(run, mesh, torch.device("cpu"), seed=0)
    optimizer = build_optimizer(model, run.recipe)
    for step in range(STEPS):
        batches = batches_of(run, step, data_rank(run.layout, mesh))
        optimizer.zero_grad(set_to_none=True)
        gc.collect()  # what earlier steps left in cycles is not this one's
        witness = Witness()
        witness.resident([local(each) for each in model.parameters()])
        witness.resident(list(model.buffers()))
        witness.resident([each for state in optimizer.state.values() for each in map(local, state.values())])
        witness.resident([each for pair in batches for each in pair])
        with witness.following_resizes(), witness:
            optimizer_step(model, optimizer, batches, run.recipe, together=together)
    return {
        "peak": witness.peak,
        "sent": sorted([*key, times] for key, times in by_kind(witness).items()),
        "parameters": storage_nbytes([local(each) for each in model.parameters()]),
        "elements": sum(local(each).numel() for each in model.parameters()),
        "gradients": sum(nbytes(local(each.grad)) for each in model.parameters() if each.grad is not None),
        "optimizer state": sum(nbytes(local(v)) for state in optimizer.state.values() for v in state.values()),
    }


def by_kind(witness: Witness) -> Counter[tuple[str, int, int]]:
    """Collectives by kind, payload and ranks: a schedule sends between forwards and backwards, in neither phase."""
    found: Counter[tuple[str, int, int]] = Counter()
    for (_, kind, payload, ranks), times in witness.collectives.items():
        found["recv" if kind == "recv_" else kind, payload, ranks] += times
    return found


def main(cases: str, rank: str, out: str) -> None:
    """Run every case; ranks meet in a file next to the cases."""
    torch.set_num_threads(1)
    told = json.loads(Path(cases).read_text())
    where = f"file://{Path(cases).resolve()}.meet"
    dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=told["world"])
    facts = {name: run_case(load(run)) for name, run in told["cases"].items()}
    Path(out).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
