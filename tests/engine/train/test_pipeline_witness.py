"""What the ranks of real pipelines hold and send, against the account of their stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_parallel_ranks import LLAMA, RECIPE

from trainledger.answers.load import load
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import account_of_stage
from trainledger.spec.run import Run

pytestmark = pytest.mark.process

RANK = Path(__file__).with_name("pipeline_rank.py")
CASES: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "gpipe": ({"pipeline": 2, "schedule": "gpipe"}, {}),
        "1f1b": ({"pipeline": 2}, {}),
        "interleaved": ({"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}, {}),
        "zero-bubble": ({"pipeline": 2, "schedule": "zero-bubble"}, {}),
        "uneven": ({"pipeline": 2, "stage_layers": (3, 1)}, {}),
        "checkpointed": ({"pipeline": 2}, {"activation_checkpointing": "full"}),
        "chunked loss": ({"pipeline": 2}, {"loss": "chunked", "loss.chunks": 4}),
    },
    4: {
        "four stages": ({"pipeline": 4}, {}),
        "four stages, zero-bubble": ({"pipeline": 4, "schedule": "zero-bubble"}, {}),
        "shards": ({"pipeline": 2, "shard": 2}, {"global_batch": 32}),
        "interleaved shards": (
            {"pipeline": 2, "shard": 2, "schedule": "interleaved", "virtual_stages": 2}, {"global_batch": 32},
        ),
        "tensor": ({"pipeline": 2, "tensor": 2}, {}),
        "tensor and sequence": ({"pipeline": 2, "tensor": 2, "sequence_parallel": True}, {}),
        "replicas": ({"pipeline": 2, "replicate": 2}, {"global_batch": 32}),
    },
}  # fmt: skip
NAMES = [(world, name) for world, cases in CASES.items() for name in cases]


def run_of(world: int, name: str) -> dict[str, Any]:
    layout, recipe = CASES[world][name]
    return {
        "model": {**LLAMA, "n_layers": 4}, "recipe": {**RECIPE, "global_batch": 16, **recipe}, "layout": layout,
        "cluster": {"count": world},
    }  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """What each rank held and sent, by case."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for world, cases in CASES.items():
        folder = tmp_path_factory.mktemp(f"pipelines of {world}")
        told, outs = folder / "cases.json", [folder / f"rank{rank}.json" for rank in range(world)]
        told.write_text(json.dumps({"world": world, "cases": {name: run_of(world, name) for name in cases}}))
        processes = [
            subprocess.Popen(
                [sys.executable, str(RANK), str(told), str(rank), str(out)], env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE, text=True,
            )
            for rank, out in enumerate(outs)
        ]  # fmt: skip
        errors = [each.communicate(timeout=300)[1] for each in processes]
        assert all(each.exists() for each in outs), "\n".join(errors)[-4000:]
        facts = [json.loads(each.read_text()) for each in outs]
        found |= {(world, name): [each[name] for each in facts] for name in cases}
    return found


@pytest.mark.parametrize(("world", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_rank_holds_and_sends_what_its_stage_is_accounted_for(
    ranks: dict[tuple[int, str], list[dict[str, Any]]], world: int, name: str
) -> None:
    run = load(run_of(world, name))
    for rank, facts in enumerate(ranks[world, name]):
        stage = rank * run.layout.pipeline // world
        ledger = account_of_stage(run, stage)
        resident = dict(ledger.resident)
        assert facts["parameters"] == resident["parameters"]
        assert facts["optimizer state"] == resident["optimizer state"]
        assert facts["elements"] == ledger.parameters
        assert facts["gradients"] == 4 * ledger.parameters
        sent: Counter[tuple[str, int, int]] = Counter()
        for each in ledger:
            if each.kind == "collective":
                sent[each.name, each.payload, each.ranks] += each.times
        assert Counter({tuple(key): times for *key, times in facts["sent"]}) == sent
        buckets = resident.get("communication", 0)  # DDP's, which a pipeline fills one by one when its peak is over
        peak = ledger.peak().nbytes - buckets
        least, most = held_by_torch(run, ledger, stage)
        assert 0.99 * (peak + least) <= facts["peak"] <= 1.01 * (peak + most)


def held_by_torch(run: Run, ledger: Ledger, stage: int) -> tuple[int, int]:
    """What torch's schedules hold at least, and at most, that is not accounted for.

    * The first and the last stage read a copy of all token ids, or of all targets: half of the batch.
    * For each chunk of layers, what was sent last in either direction, until the next is sent.
    * zero-bubble: S micro-batches on stage S wait for the weights' part of their backward, with all that they keep for
      it, while the account lets the input's part free it; and with the gradients of the inputs of those weights.
    """
    layout, recipe = run.layout, run.recipe
    tokens = run.device_batch * recipe.seq_len
    copied = 8 * tokens * run.grad_accum * (stage in (0, layout.pipeline - 1))
    stream = 4 * tokens * run.model.d_model // (layout.tensor if layout.sequence_parallel else 1)
    waiting = stage * ledger.kept_nbytes * 2 if layout.schedule == "zero-bubble" else 0
    return copied, copied + 2 * layout.virtual_stages * stream + waiting
