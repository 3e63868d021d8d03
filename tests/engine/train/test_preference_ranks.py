"""Preferences on ranks: what each holds and sends is what the ledger says, and the run is that of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run_of, train_on_ranks
from spread_runs import SPREAD, told
from test_drawn_layouts import differences
from test_parallel_ranks import GPT2, Case, check, run_for_real, tables
from test_preferences_train import pairs_in, singles_in

from trainledger.answers.load import load
from trainledger.engine.train.engine import train
from trainledger.engine.train.run_directory import all_checkpoints
from trainledger.engine.train.trained import load_trained
from trainledger.ledger.ranks import read_ranks

pytestmark = pytest.mark.process

ODD = {"feed_forward.d_ff": 81, "vocab_size": 97, "d_model": 33, "attention.head_dim": 8}
DPO = {"objective": "dpo"}
KNOWN = {**DPO, "objective.reference": "precomputed"}
LORA = {**DPO, "lora.rank": 3}
CHUNKED = {"loss": "chunked", "loss.chunks": 4}
TEACHER = {"teacher": {"n_layers": 3, "d_model": 48, "norm": "layernorm", "feed_forward.d_ff": 81}}
TAUGHT = {"objective": "distillation", "objective.kd_ratio": 0.5, **TEACHER}
SCORES = {"scores": True, "tie_embeddings": False}
TWO: dict[str, Case] = {
    "ddp": ({"replicate": 2}, {}, {**DPO, "global_batch": 4}),
    "ddp, adapters": ({"replicate": 2}, {}, {**LORA, "global_batch": 4}),
    "zero 1": ({"shard": 2, "zero": 1}, {}, DPO),
    "zero 2": ({"shard": 2, "zero": 2}, ODD, DPO),
    "zero 2, adapters on nf4": ({"shard": 2, "zero": 2}, {}, {**LORA, "lora.base_format": "nf4"}),
    "fsdp": ({"shard": 2}, {}, DPO),
    "fsdp, odd sizes": ({"shard": 2}, {**GPT2, **ODD}, DPO),
    "fsdp, kept": ({"shard": 2, "reshard_after_forward": False}, {}, DPO),
    "fsdp, checkpointed": ({"shard": 2}, {}, {**DPO, "activation_checkpointing": "full"}),
    "fsdp, gathered in bf16": ({"shard": 2}, {}, {**DPO, "precision": "bf16-sharded"}),
    "fsdp, chunked": ({"shard": 2}, {}, {**DPO, **CHUNKED}),
    "fsdp, precomputed": ({"shard": 2}, {}, KNOWN),
    "fsdp, adapters": ({"shard": 2}, {}, LORA),
    "ddp, a teacher": ({"replicate": 2}, {}, {**TAUGHT, "global_batch": 4, "precision": "bf16-mixed"}),
    "zero 2, a teacher": ({"shard": 2, "zero": 2}, {}, TAUGHT),
    "fsdp, a teacher": ({"shard": 2}, {}, TAUGHT),
    "fsdp, a teacher in bf16": ({"shard": 2}, {}, {**TAUGHT, "precision": "bf16-sharded"}),
    "fsdp, adapters, a teacher": ({"shard": 2}, {}, {**TAUGHT, "lora.rank": 3}),
    "ddp, scores": ({"replicate": 2}, SCORES, {"objective": "reward", "global_batch": 4}),
    "fsdp, scores": ({"shard": 2}, SCORES, {"objective": "reward", "precision": "bf16-sharded"}),
    "fsdp, adapters, chunked": ({"shard": 2}, {}, {**LORA, **CHUNKED}),
    "fsdp, adapters on nf4": ({"shard": 2}, ODD, {**LORA, "lora.base_format": "nf4", "precision": "bf16-mixed"}),
}  # fmt: skip
FOUR: dict[str, Case] = {
    "hybrid": ({"shard": 2, "replicate": 2}, ODD, DPO),
    "fsdp over four, odd sizes": ({"shard": 4}, {**GPT2, **ODD}, {**DPO, "precision": "bf16-sharded"}),
    "fsdp over four, adapters": ({"shard": 4}, ODD, LORA),
    "zero 1 over four": ({"shard": 4, "zero": 1}, ODD, DPO),
    "hybrid, a teacher": ({"shard": 2, "replicate": 2}, {}, {**TAUGHT, "precision": "bf16-sharded"}),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_for_real(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
def test_a_rank_of_two_is_what_the_ledger_says(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    check(load(tables(TWO[name])), two[name])


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    for name, ranks in run_for_real(FOUR, 4, tmp_path).items():
        check(load(tables(FOUR[name])), ranks)


FIELDS: dict[str, Any] = {
    "model": {"vocab_size": 257, "max_seq_len": 32}, "steps": 6, "seq_len": 24, "global_batch": 8, "micro_batch": 4,
    "learning_rate": 1e-3, "checkpoints.every": 3, "optimizer.epsilon": 1e-5,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "all weights": DPO, "adapters": {**LORA, "lora.dropout": 0.1}, "precomputed": KNOWN,
    "single answers": {"objective": "kto"}, "odds ratio": {"objective": "orpo"}, "a teacher": TAUGHT,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_of_one_process_and_resumes_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    fields = {**FIELDS, **KINDS[kind]}
    records = singles_in(tmp_path) if kind == "single answers" else pairs_in(tmp_path)
    data: dict[str, Any] = {"path": [str(records)], "validation_fraction": 0.2, "cache": str(tmp_path / "cache")}
    data |= {"text_field": "chosen"} if kind == "a teacher" else {}
    described = {"fields": fields, "data": data}
    train(run_of(described), tmp_path / "alone")
    runs: list[dict[str, Any]] = []
    for name, layout in SPREAD.items():
        common = {**described, "layout": layout}
        cut = common | {"dir": str(tmp_path / f"{name}, cut")}
        runs += [common | {"dir": str(tmp_path / name), "metered": True}, cut | {"stop_after": 3}]
        runs += [cut | {"resume": True}]
    assert train_on_ranks(tmp_path, runs, 2) == [[0, 0], [143, 143], [0, 0]] * len(SPREAD)
    if fields["objective"] == "dpo":
        assert told(tmp_path / "alone", "loss")[0] == pytest.approx(math.log(2), abs=1e-3)
    alone = dict(load_trained(tmp_path / "alone", print).model.named_parameters())
    for name, layout in SPREAD.items():
        for what in ("loss", "validation_loss"):
            assert told(tmp_path / name, what) == pytest.approx(told(tmp_path / "alone", what), rel=1e-4), name
        for parameter, value in load_trained(tmp_path / name, print).model.named_parameters():
            torch.testing.assert_close(value, alone[parameter], rtol=1e-3, atol=1e-4)
        whole, cut = (all_checkpoints(tmp_path / each)[-1] for each in (name, f"{name}, cut"))
        for file in [*whole.glob("model*"), *whole.glob("optimizer*")]:
            assert (cut / file.name).read_bytes() == file.read_bytes(), f"{name}: {file.name}"
        wrong = [
            each
            for rank in read_ranks(tmp_path / name)
            for each in differences(rank, run_of({**described, "layout": layout}))
        ]
        assert wrong == [], name
