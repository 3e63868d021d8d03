"""Adapters on ranks that share their training: what each holds and sends is what the ledger says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run_of, train_on_ranks
from spread_runs import SPREAD, told, train_alone
from test_drawn_layouts import differences
from test_parallel_ranks import GPT2, Case, check, run_for_real, tables

from trainledger.answers.load import load
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.run_directory import all_checkpoints
from trainledger.engine.train.trained import load_trained, write_start
from trainledger.ledger.ranks import read_ranks

pytestmark = pytest.mark.process

ODD = {"feed_forward.d_ff": 81, "vocab_size": 97, "d_model": 33, "attention.head_dim": 8}
LORA = {"lora.rank": 3}
DORA = {**LORA, "lora.dora": True}
MIXER = {
    "mixer": "gated-delta", "mixer.n_heads": 4, "mixer.n_key_heads": 2, "mixer.key_dim": 6, "mixer.value_dim": 8,
    "layers": "RA",
}  # fmt: skip
WHOLE = {"lora.whole": ["embed_tokens", "lm_head"]}
EXPERTS = {
    "feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.per_token": 2, "feed_forward.expert_d_ff": 16,
}  # fmt: skip
ON_EXPERTS = {**LORA, "lora.targets": ["linear", "experts"]}
TWO: dict[str, Case] = {
    "ddp, experts": ({"replicate": 2}, EXPERTS, {**ON_EXPERTS, "global_batch": 4}),
    "zero 2, experts by rows": ({"shard": 2, "zero": 2}, EXPERTS, {**ON_EXPERTS, "lora.experts": "rows"}),
    "fsdp, experts": ({"shard": 2}, EXPERTS, {**ON_EXPERTS, "lora.base_format": "nf4"}),
    "fsdp, experts by rows": (
        {"shard": 2}, EXPERTS, {**ON_EXPERTS, "lora.experts": "rows", "precision": "bf16-sharded"},
    ),
    "ddp": ({"replicate": 2}, {}, {**LORA, "global_batch": 4}),
    "ddp, nf4": ({"replicate": 2}, {}, {**LORA, "global_batch": 4, "lora.base_format": "nf4"}),
    "zero 1": ({"shard": 2, "zero": 1}, {}, LORA),
    "zero 2": ({"shard": 2, "zero": 2}, {}, LORA),
    "fsdp": ({"shard": 2}, {}, LORA),
    "fsdp, gpt2, odd sizes": ({"shard": 2}, {**GPT2, **ODD}, LORA),
    "fsdp, attention alone": ({"shard": 2}, {}, {**LORA, "lora.targets": ["q_proj", "v_proj"]}),
    "fsdp, checkpointed": ({"shard": 2}, {}, {**LORA, "activation_checkpointing": "full"}),
    "fsdp, kept": ({"shard": 2, "reshard_after_forward": False}, {}, LORA),
    "fsdp, bf16": ({"shard": 2}, {}, {**LORA, "precision": "bf16"}),
    "fsdp, bf16 base": ({"shard": 2}, {}, {**LORA, "lora.base_format": "bf16"}),
    "fsdp, nf4": ({"shard": 2}, ODD, {**LORA, "lora.base_format": "nf4", "precision": "bf16-mixed"}),
    "fsdp, int8": ({"shard": 2}, ODD, {**LORA, "lora.base_format": "int8"}),
    "fsdp, gathered in bf16": ({"shard": 2}, {}, {**LORA, "precision": "bf16-sharded"}),
    "tensor": ({"tensor": 2}, {}, LORA),
    "tensor and sequence": ({"tensor": 2, "sequence_parallel": True}, {}, {**LORA, "micro_batch": 4}),
    "tensor, gpt2": ({"tensor": 2}, GPT2, LORA),
    "tensor, sequence, dropout": (
        {"tensor": 2, "sequence_parallel": True}, {}, {**LORA, "lora.dropout": 0.1, "micro_batch": 4}
    ),
    "tensor, attention alone": ({"tensor": 2}, {}, {**LORA, "lora.targets": ["q_proj", "o_proj"]}),
    "tensor, checkpointed, bf16-mixed": (
        {"tensor": 2}, {}, {**LORA, "activation_checkpointing": "full", "precision": "bf16-mixed"}
    ),
    "tensor, dora": ({"tensor": 2}, {}, DORA),
    "tensor, gpt2, dora, bf16-mixed": ({"tensor": 2}, GPT2, {**DORA, "precision": "bf16-mixed"}),
    "tensor, sequence, dora, dropout": (
        {"tensor": 2, "sequence_parallel": True}, {}, {**DORA, "lora.dropout": 0.1, "micro_batch": 4}
    ),
    "tensor, dora, checkpointed": ({"tensor": 2}, {}, {**DORA, "activation_checkpointing": "full"}),
    "tensor, embedding and head": ({"tensor": 2}, {}, {**LORA, **WHOLE}),
    "ddp, dora": ({"replicate": 2}, {}, {**DORA, "global_batch": 4}),
    "zero 2, dora, odd sizes": ({"shard": 2, "zero": 2}, ODD, DORA),
    "fsdp, dora": ({"shard": 2}, {}, DORA),
    "fsdp, dora, nf4, dropout": ({"shard": 2}, ODD, {**DORA, "lora.base_format": "nf4", "lora.dropout": 0.1}),
    "fsdp, dora, gathered in bf16": ({"shard": 2}, {}, {**DORA, "precision": "bf16-sharded"}),
    "ddp, embedding and head": ({"replicate": 2}, {}, {**LORA, **WHOLE, "global_batch": 4}),
    "zero 2, embedding and head": ({"shard": 2, "zero": 2}, ODD, {**LORA, **WHOLE}),
    "fsdp, embedding and head": ({"shard": 2}, {}, {**LORA, **WHOLE}),
    "fsdp, head, nf4, odd sizes": ({"shard": 2}, ODD, {**LORA, "lora.whole": ["lm_head"], "lora.base_format": "nf4"}),
    "zero 2, mixer": ({"shard": 2, "zero": 2}, MIXER, LORA),
    "fsdp, mixer": ({"shard": 2}, MIXER, {**LORA, "lora.targets": ["attention"]}),
    "fsdp, bf16 base gathered": ({"shard": 2}, {}, {**LORA, "precision": "bf16-sharded", "lora.base_format": "bf16"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_for_real(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
def test_a_rank_of_two_is_what_the_ledger_says(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    check(load(tables(TWO[name])), two[name])


FOUR: dict[str, Case] = {
    "hybrid, nf4": ({"shard": 2, "replicate": 2}, ODD, {**LORA, "lora.base_format": "nf4"}),
    "fsdp over four, odd sizes, int8": ({"shard": 4}, ODD, {**LORA, "lora.base_format": "int8", "lora.dropout": 0.1}),
    "fsdp over four, odd sizes, bf16": ({"shard": 4}, {**GPT2, **ODD}, {**LORA, "precision": "bf16-sharded"}),
    "zero 2 over four, odd sizes": ({"shard": 4, "zero": 2}, ODD, {**LORA, "lora.base_format": "nf4"}),
    "tensor over four": ({"tensor": 4}, {"attention.n_kv_heads": 4, "attention.n_heads": 4}, LORA),
    "tensor and fsdp": ({"tensor": 2, "shard": 2}, {}, LORA),
    "tensor and fsdp, dora": ({"tensor": 2, "shard": 2}, {}, DORA),
    "tensor, sequence and fsdp": ({"tensor": 2, "shard": 2, "sequence_parallel": True}, {}, {**LORA, "micro_batch": 4}),
    "zero 1 over four, odd sizes": ({"shard": 4, "zero": 1}, ODD, LORA),
}


OF_PEFT = ("ddp", "zero 2", "fsdp", "fsdp, checkpointed", "fsdp, bf16", "fsdp, gathered in bf16", "fsdp, dora")


def test_adapters_of_peft_are_what_the_ledger_says(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for name, ranks in run_for_real({name: TWO[name] for name in OF_PEFT}, 2, tmp_path, peft=True).items():
        check(load(tables(TWO[name])), ranks)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    for name, ranks in run_for_real(FOUR, 4, tmp_path).items():
        check(load(tables(FOUR[name])), ranks)


OVER_TENSOR = {"tensor": {"tensor": 2}, "tensor and sequence": {"tensor": 2, "sequence_parallel": True}}


@pytest.mark.parametrize(
    ("layouts", "adapters"),
    [
        (SPREAD, {"lora.dropout": 0.1, "lora.base_format": "nf4"}),
        (OVER_TENSOR, {"lora.whole": ["embed_tokens", "lm_head"]}),
        ({"shards": {"shard": 2}}, {"lora.dora": True, "lora.base_format": "int8"}),
        ({"tensor": {"tensor": 2}}, {"lora.dropout": 0.1}),
        (OVER_TENSOR, {"lora.dora": True}),
        (
            {"expert ranks": {"shard": 2, "expert": 2}},
            {"lora.targets": ["linear", "experts"], "model": {**EXPERTS, "feed_forward.per_token": 4}},
        ),
    ],
    ids=["data ranks", "tensor ranks", "dora", "dropout over tensor ranks", "dora over tensor ranks", "expert ranks"],
)
def test_trained_adapters_are_those_of_one_process_and_resume_with_the_same_bits(
    layouts: dict[str, dict[str, Any]], adapters: dict[str, Any], tmp_path: Path
) -> None:
    fields = {
        "steps": 6, "global_batch": 8, "micro_batch": 2, "checkpoints.every": 3, "lora.rank": 3, **adapters,
        "optimizer.epsilon": 1e-5,
    }  # fmt: skip
    alike = run_of({"fields": fields})
    start = build(alike.model, alike.recipe)
    initialize(start, seed=5)
    write_start(start, tmp_path / "start")
    fields["initial_weights"] = str(tmp_path / "start")
    train_alone(tmp_path, fields)
    runs: list[dict[str, Any]] = []
    for name, layout in layouts.items():
        common = {"layout": layout, "fields": fields}
        cut = common | {"dir": str(tmp_path / f"{name}, cut")}
        runs += [common | {"dir": str(tmp_path / name), "metered": True}, cut | {"stop_after": 3}]
        runs += [cut | {"resume": True}]
    assert train_on_ranks(tmp_path, runs, 2) == [[0, 0], [143, 143], [0, 0]] * len(layouts)
    alone = dict(load_trained(tmp_path / "alone", print).model.named_parameters())
    for name, layout in layouts.items():
        masked = "tensor" in layout and "lora.dropout" in adapters  # parts of a row have masks of their own
        for what in ("loss", "grad_norm", "validation_loss"):
            close = pytest.approx(told(tmp_path / "alone", what), rel=0.2 if masked else 1e-5)
            assert told(tmp_path / name, what) == close, name
        for parameter, value in load_trained(tmp_path / name, print).model.named_parameters() if not masked else ():
            torch.testing.assert_close(value, alone[parameter], rtol=1e-4, atol=1e-5)
        whole, cut = (all_checkpoints(tmp_path / each)[-1] for each in (name, f"{name}, cut"))
        for file in [*whole.glob("model*"), *whole.glob("optimizer*")]:
            assert (cut / file.name).read_bytes() == file.read_bytes(), f"{name}: {file.name}"
        run = run_of({"layout": layouts[name], "fields": fields})
        wrong = [each for rank in read_ranks(tmp_path / name) for each in differences(rank, run)]
        assert wrong == [], name
