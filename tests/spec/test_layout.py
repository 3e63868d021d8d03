"""What a layout must obey, as sentences with the nearest layout that works."""

from typing import Any

import pytest
from refusals import refusals

from models import sizes
from trainledger.answers.load import load
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput
from trainledger.spec.runfile import parse, resolved

MODEL: dict[str, Any] = sizes(V=64, D=56, L=6, H=7, KV=7, F=96, T=64, K=8)
EIGHT = {"attention.n_heads": 8, "attention.n_kv_heads": 4}
EXPERTS = {**EIGHT, "feed_forward": "experts", "feed_forward.n_experts": 8, "feed_forward.per_token": 2}


def tables(layout: dict[str, Any], model: dict[str, Any], recipe: dict[str, Any], count: int) -> dict[str, Any]:
    return {
        "model": {**MODEL, **model},
        "recipe": {"seq_len": 64, "global_batch": 24, "micro_batch": 1, "steps": 1, **recipe},
        "layout": layout,
        "cluster": {"count": count},
    }


@pytest.mark.parametrize(("fields", "sentence"), refusals("layout", EIGHT=EIGHT, EXPERTS=EXPERTS))
def test_a_layout_that_does_not_work_is_one_sentence(fields: list[str], sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(tables({}, {}, {}, 1), fields)
    assert [str(each) for each in refused.value.problems] == [sentence]


@pytest.mark.parametrize(
    ("layout", "model", "count"),
    [
        ({"tensor": 7}, {"feed_forward.d_ff": 98, "vocab_size": 70}, 7),
        ({"tensor": 8}, EIGHT, 8),  # twice as many ranks as key-value heads
        ({"pipeline": 4, "stage_layers": [1, 2, 2, 1]}, {}, 4),
        ({"shard": 4, "context": 2, "expert": 8}, EXPERTS, 8),
        ({"tensor": 2, "pipeline": 3, "split_sends": True}, EIGHT, 6),
        ({"replicate": 2, "shard": 2, "tensor": 2, "pipeline": 3, "context": 2}, EIGHT, 48),
    ],
)
def test_what_works_is_read_and_written(layout: dict[str, Any], model: dict[str, Any], count: int) -> None:
    run = load(tables(layout, model, {}, count))
    assert run.layout.devices == count
    assert parse(resolved(run)) == run


def test_a_batch_goes_over_the_data_ranks() -> None:
    run = load(tables({"replicate": 2, "shard": 3, "tensor": 2}, EIGHT, {"micro_batch": 2}, 12))
    assert (run.layout.data_ranks, run.device_batch, run.grad_accum) == (6, 2, 2)
    all_at_once = load(tables({"replicate": 2, "shard": 3}, EIGHT, {"micro_batch": "none"}, 6))
    assert (all_at_once.device_batch, all_at_once.grad_accum) == (4, 1)


def test_devices_without_a_layout_are_as_before() -> None:
    run = load(tables({}, {}, {}, 64))
    assert run.layout == Layout()
    assert run.layout.alone
