"""One rank of a real run with compiled blocks: what its forward keeps and its peak, by the allocator's own events.

Started by test_compiled_ranks.py, once for each of two ranks: python compiled_rank.py CASES.json RANK OUT.json
A dispatch mode, as rank_witness.py has it, would make compiled blocks run eagerly.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_witness import batches_of, local

from trainledger.answers.load import load
from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.parallel.mesh import mesh_of
from trainledger.engine.train.parallel.model_on_rank import spread
from trainledger.engine.train.step import optimizer_step
from trainledger.observe.measure.meter import AllocatorPeak
from trainledger.spec.run import Run


def run_case(run: Run) -> dict[str, int]:
    """The least peak of some steps, and the least that a forward after them leaves: gloo lets go late under load."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = build(run.model, run.recipe)
    for block in model.layers:
        block.compile()
    model = spread(model, run.layout, mesh_of(run.layout), run.recipe.precision).train()
    optimizer = build_optimizer(model, run.recipe)
    batches = batches_of(run, 0, dist.get_rank())

    def step() -> None:
        optimizer_step(model, optimizer, batches, run.recipe)

    for _ in range(2):
        step()
        optimizer.zero_grad(set_to_none=True)
    gc.collect()  # what is freed below must have been allocated below
    states = [each for state in optimizer.state.values() for each in state.values()]
    standing = [
        *map(local, [*model.parameters(), *states]),
        *model.buffers(),
        *(one for each in batches for one in each),
    ]
    # States stay where they are, so what stands is the same for each step.
    there = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in standing}
    peaks = []
    for _ in range(12):
        with AllocatorPeak(torch.device("cpu"), live_nbytes=sum(there.values())) as peak:
            step()
        assert peak.nbytes is not None
        peaks.append(peak.nbytes)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
    ids_BT, targets_BT = batches[0]
    kept = []
    for _ in range(6):
        with AllocatorPeak(torch.device("cpu")) as left:
            loss = next_token_loss(model(ids_BT), targets_BT)
        kept.append(sum(left.changes))
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
    return {"kept": min(kept), "peak": min(peaks)}


def main(cases: str, rank: str, out: str) -> None:
    """Run every case; ranks meet in a file next to the cases."""
    torch.set_num_threads(1)
    where = f"file://{Path(cases).resolve()}.meet"
    dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=2)
    told = json.loads(Path(cases).read_text())
    Path(out).write_text(json.dumps({name: run_case(load(run)) for name, run in told.items()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
