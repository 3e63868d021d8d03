"""FSDP2 with CPUOffloadPolicy on real processes: the copies that it asks for are those of the ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_parallel_ranks import GPT2, Case, tables

from trainledger.answers.load import load
from trainledger.ledger.ranks import accounts
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.process

ODD = {"feed_forward.d_ff": 82, "vocab_size": 98, "d_model": 34, "attention.head_dim": 8}
HOST = {"offload": "parameters"}
CASES: dict[str, Case] = {
    "on the device": ({"shard": 2}, {}, {}),
    "fsdp": ({"shard": 2}, {}, HOST),
    "odd sizes, gathered in bf16": ({"shard": 2}, ODD, {**HOST, "precision": "bf16-sharded"}),
    "gpt2, kept": ({"shard": 2, "reshard_after_forward": False}, GPT2, {**HOST, "precision": "bf16"}),
    "adapters": ({"shard": 2}, {}, {**HOST, "lora.rank": 4, "activation_checkpointing": "full"}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    told = folder / "cases.json"
    told.write_text(json.dumps({"world": 2, "cases": {name: tables(case) for name, case in CASES.items()}}))
    worker = Path(__file__).with_name("offload_rank.py")
    outs = [folder / f"rank{rank}.json" for rank in range(2)]
    commands = [[sys.executable, str(worker), str(told), str(rank), str(out)] for rank, out in enumerate(outs)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert all(out.exists() for out in outs), "\n".join(errors)[-4000:]
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.parametrize("name", [name for name in CASES if name != "on the device"])
def test_copies_are_those_of_the_ledger(ranks: list[dict[str, Any]], name: str) -> None:
    (account,) = accounts(load(tables(CASES[name])), backend="cuda")
    sent = {"to_device": 0, "to_host": 0}
    for entry in account.ledger:
        if entry.name in sent:
            sent[entry.name] += entry.read * entry.times
    for rank in ranks:
        assert rank[name]["sent"] == sent, name


def test_where_states_are_does_not_change_the_weights(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["fsdp"]["weights"] == rank["on the device"]["weights"]
        assert rank["on the device"]["sent"] == {"to_device": 0, "to_host": 0}


def test_offload_is_refused_on_an_accelerator() -> None:
    from trainledger.engine.train.parallel.refusals import refuse_offload

    run = load(tables(CASES["fsdp"]))
    refuse_offload(run.recipe, "cpu")
    with pytest.raises(InvalidInput, match=r"recipe.offload = 'parameters': .* a CPU, whose memory is the host's"):
        refuse_offload(run.recipe, "cuda")
