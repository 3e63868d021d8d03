"""A stage's peak is that of its micro-batches in flight: those that come and go leave nothing behind."""

from dataclasses import replace

import pytest

from models import spec_of
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.ranks import account_of_stage
from trainledger.spec.layout import Layout
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep

MODEL = spec_of(V=256, D=64, L=12, H=4, F=128, T=32)


def pipelined(micro_batches: int, *, tensor: int, zero: int, checkpointing: str, precision: str) -> Run:
    layout = Layout(pipeline=3, tensor=tensor, shard=2, zero=zero)
    recipe = from_fields(Recipe, {
        "seq_len": 32, "micro_batch": 2, "global_batch": 2 * 2 * micro_batches, "steps": 1, "precision": precision,
        "activation_checkpointing": checkpointing, "attention": "flash",
        "precision.master_weights": precision == "fp16",
    })  # fmt: skip
    return Run(model=MODEL, recipe=recipe, layout=layout)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("precision", "zero", "tensor"),
    [("fp16", 1, 1), ("fp16", 1, 2), ("bf16-mixed", 1, 2), ("bf16-sharded", 3, 2), ("bf16-mixed", 3, 1)],
)
@pytest.mark.long
def test_more_micro_batches_than_are_in_flight_change_no_peak(precision, zero, tensor, checkpointing, stage):
    few, many = (
        pipelined(count, tensor=tensor, zero=zero, checkpointing=checkpointing, precision=precision)
        for count in (8, 64)
    )
    batch = 16 * 32 * 2 * (64 - 8)  # ids and targets of the other micro-batches, which are there from the start
    before, after = (peak_nbytes(account_of_stage(run, stage, backend="cuda")) for run in (few, many))
    assert after - before == batch


def test_a_pipeline_of_sharded_parameters_adds_whole_gradients_up_in_the_format_of_the_reduction() -> None:
    run = pipelined(8, tensor=1, zero=3, checkpointing="full", precision="bf16-sharded")
    ledger = account_of_stage(run, 1, backend="cuda")
    gathered_again = replace(run, layout=replace(run.layout, reshard_after_forward=True))
    blocks = 12 // 3 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert dict(ledger.resident)["gradients"] == 4 * blocks
    assert "gradients" not in dict(account_of_stage(gathered_again, 1, backend="cuda").resident)
