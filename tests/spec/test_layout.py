"""What a layout must obey, as sentences with the nearest layout that works."""

from __future__ import annotations

from typing import Any

import pytest

from trainledger.answers.load import load
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput
from trainledger.spec.runfile import parse, resolved

MODEL: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 56,
    "n_layers": 6,
    "attention.n_heads": 7,
    "attention.n_kv_heads": 7,
    "feed_forward.d_ff": 96,
    "max_seq_len": 64,
    "attention.head_dim": 8,
}
EIGHT = {"attention.n_heads": 8, "attention.n_kv_heads": 4}
EXPERTS = {**EIGHT, "feed_forward": "experts", "feed_forward.n_experts": 8, "feed_forward.per_token": 2}


def tables(layout: dict[str, Any], model: dict[str, Any], recipe: dict[str, Any], count: int) -> dict[str, Any]:
    return {
        "model": {**MODEL, **model},
        "recipe": {"seq_len": 64, "global_batch": 24, "micro_batch": 1, "steps": 1, **recipe},
        "layout": layout,
        "cluster": {"count": count},
    }


@pytest.mark.parametrize(
    ("layout", "model", "recipe", "count", "sentence"),
    [
        ({"tensor": 3}, {}, {}, 3, "layout.tensor = 3: must divide model.attention.n_heads = 7; nearest that works: 1"),
        (
            {"pipeline": 100000},
            {"n_layers": 100000},
            {},
            100000,
            "layout.pipeline = 100000: must be at most 1024; nearest that works: 1024",
        ),
        (
            {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 600},
            {"n_layers": 1200},
            {},
            2,
            "layout.virtual_stages = 600: times layout.pipeline = 2 must be at most 1024 chunks; nearest that "
            "works: 512",
        ),
        (
            {"tensor": 5},
            {**EIGHT, "feed_forward.d_ff": 80},
            {},
            5,
            "layout.tensor = 5: must divide model.attention.n_heads = 8; nearest that works: 4",
        ),
        (
            {"tensor": 4},
            {**EIGHT, "feed_forward.d_ff": 98},
            {},
            4,
            "layout.tensor = 4: must divide model.feed_forward.d_ff = 98; nearest that works: 2",
        ),
        (
            {"tensor": 4},
            {**EIGHT, "vocab_size": 66},
            {},
            4,
            "layout.tensor = 4: must divide the embedding's rows = 66; nearest that works: 2",
        ),
        (
            {"tensor": 4},
            {"attention.n_heads": 12, "attention.n_kv_heads": 6},
            {},
            4,
            "layout.tensor = 4: must divide model.attention.n_kv_heads = 6, or be a multiple of it; nearest that "
            "works: 2",
        ),
        (
            {"tensor": 2},
            {**EIGHT, "attention.qk_norm": "width"},
            {},
            2,
            "layout.tensor = 2: norms over the width of all heads (qk_norm) cannot be split by heads"
            "; nearest that works: 1",
        ),
        (
            {"sequence_parallel": True, "shard": 2},
            {},
            {},
            2,
            "layout.sequence_parallel = true: needs layout.tensor above 1; nearest that works: false",
        ),
        (
            {"tensor": 2, "sequence_parallel": True},
            EIGHT,
            {"seq_len": 63},
            2,
            "layout.tensor = 2: sequence parallelism splits the 63 tokens of a rank, so it must divide them"
            "; nearest that works: 1",
        ),
        ({"shard": 8}, {}, {}, 4, "cluster.count = 4: the layout (shard 8) takes 8; nearest that works: 8"),
        (
            {"shard": 5},
            {},
            {},
            5,
            "recipe.global_batch = 24: must be a multiple of micro_batch = 1 x 5 data ranks (layout.replicate x "
            "layout.shard)"
            "; nearest that works: 25",
        ),
        (
            {"pipeline": 4},
            {},
            {},
            4,
            "layout.pipeline = 4: the 6 layers cannot be divided evenly among 4 chunks; layout.stage_layers sets "
            "another division, such as [2, 2, 1, 1]"
            "; nearest that works: 3",
        ),
        (
            {"pipeline": 4, "stage_layers": [2, 2, 1]},
            {},
            {},
            4,
            "layout.stage_layers = [2, 2, 1]: must have 4 numbers, one for each of pipeline x virtual_stages"
            "; nearest that works: [2, 2, 1, 1]",
        ),
        (
            {"pipeline": 2, "stage_layers": [4, 4]},
            {},
            {},
            2,
            "layout.stage_layers = [4, 4]: must add up to model.n_layers = 6, not 8; nearest that works: [3, 3]",
        ),
        (
            {"pipeline": 2, "virtual_stages": 3},
            {},
            {},
            2,
            "layout.virtual_stages = 3: needs layout.schedule = 'interleaved'; nearest that works: 1",
        ),
        (
            {"pipeline": 3, "virtual_stages": 2, "schedule": "interleaved"},
            {},
            {"global_batch": 4},
            3,
            "recipe.global_batch = 4: interleaving takes micro-batches in rounds of 3 stages, and a rank has 4"
            "; nearest that works: 3",
        ),
        (
            {"pipeline": 3, "virtual_stages": 2, "schedule": "interleaved"},
            {},
            {"global_batch": 6, "micro_batch": None},
            3,
            "recipe.micro_batch: interleaving takes micro-batches in rounds of 3 stages, and a rank has 1"
            "; nearest that works: 2",
        ),
        (
            {"pipeline": 3, "virtual_stages": 2, "schedule": "interleaved"},
            {},
            {"global_batch": 1, "micro_batch": None},
            3,
            "recipe.global_batch = 1: interleaving takes micro-batches in rounds of 3 stages, and a rank has 1"
            "; nearest that works: 3",
        ),
        (
            {"shard": 4, "pipeline": 2, "virtual_stages": 3, "schedule": "interleaved"},
            {},
            {"global_batch": 1, "micro_batch": None},
            8,
            "recipe.global_batch = 1: must be a multiple of the 4 data ranks (layout.replicate x layout.shard)"
            "; nearest that works: 4",
        ),
        (
            {"context": 5},
            {},
            {},
            5,
            "layout.context = 5: each rank takes an early and a late part of the 64 tokens, so twice it must "
            "divide them"
            "; nearest that works: 4",
        ),
        (
            {"context": 8, "context_kind": "all-to-all"},
            EIGHT,
            {},
            8,
            "layout.context = 8: must divide the 4 key-value heads of a tensor rank, which all-to-all splits"
            "; nearest that works: 4",
        ),
        (
            {"context": 2},
            {},
            {"attention": "math"},
            2,
            "recipe.attention = 'math': context ranks combine attention from parts, which unfused attention does not "
            "do; nearest that works: sdpa",
        ),
        (
            {"context": 2},
            {"attention.window": 8},
            {"precision": "bf16-mixed"},
            2,
            "recipe.attention = 'sdpa': between context ranks only the flash kernel has windows and ALiBi without a "
            "mask of all tokens; nearest that works: flash",
        ),
        (
            {"context": 2},
            {"attention.sinks": True},
            {"attention": "math"},
            2,
            "layout.context = 2: in fp32 no kernel between context ranks has attention sinks (model.attention.sinks); "
            "nearest that works: 1",
        ),
        (
            {"shard": 2},
            {},
            {"optimizer": "adafactor"},
            2,
            "recipe.optimizer = 'adafactor': works on whole matrices, and sharded ranks have pieces of them "
            "(replicate, tensor "
            "and pipeline do not); nearest that works: adamw",
        ),
        (
            {"shard": 2, "zero": 1},
            {},
            {"optimizer": "muon"},
            2,
            "recipe.optimizer = 'muon': works on whole matrices, and sharded ranks have pieces of them "
            "(replicate, tensor "
            "and pipeline do not); at zero = 3 they are rows, and are gathered; nearest that works: adamw",
        ),
        (
            {"tensor": 2},
            EIGHT,
            {"loss": "compiled"},
            2,
            "recipe.loss = 'compiled': tensor ranks each compute the loss over their columns, which is not accounted "
            "for when compiled; nearest that works: full",
        ),
        (
            {"tensor": 2},
            EIGHT,
            {"loss": "chunked"},
            2,
            "recipe.loss = 'chunked': tensor ranks compute the loss of all logits at once, each over its columns"
            "; nearest that works: full",
        ),
        (
            {"shard": 3, "expert": 3},
            EXPERTS,
            {},
            3,
            "layout.expert = 3: must divide n_experts = 8 and the 3 ranks of shard x context; nearest that works: 1",
        ),
        (
            {"shard": 2, "expert": 2},
            EIGHT,
            {},
            2,
            "layout.expert = 2: the model has no experts (model.feed_forward); nearest that works: 1",
        ),
        (
            {"expert": 2},
            EXPERTS,
            {},
            1,
            "layout.expert = 2: needs layout.shard or layout.context to take ranks from; nearest that works: 1",
        ),
        (
            {"shard": 2, "zero": 1, "reshard_after_forward": True},
            {},
            {},
            2,
            "layout.reshard_after_forward = true: parameters are whole at zero = 1; nearest that works: none",
        ),
        ({"shard": 2, "zero": 4}, {}, {}, 2, "layout.zero = 4: must be at most 3; nearest that works: 3"),
        (
            {"schedule": "1F1B"},
            {},
            {},
            1,
            "layout.schedule = '1F1B': must be one of 1f1b, gpipe, interleaved, zero-bubble; nearest that works: 1f1b",
        ),
        (
            {"tensor": 2, "sequence_gather": "again"},
            EIGHT,
            {},
            2,
            "layout.sequence_gather = 'again': is for what sequence-parallel ranks gather; it needs "
            "layout.sequence_parallel; nearest that works: kept",
        ),
        (
            {"tensor": 2, "sequence_parallel": True, "sequence_gather": "again"},
            {**EIGHT, "d_model": 64},
            {"precision": "fp8-block"},
            2,
            "layout.sequence_gather = 'again': matmuls of precision fp8-block keep separate 8-bit copies of what "
            "was gathered; nearest that works: kept",
        ),
        (
            {"tensor": 4},
            {**EIGHT, "d_model": 64, "attention.n_heads": 4, "attention.n_kv_heads": 4, "feed_forward.d_ff": 96},
            {"precision": "fp8-tensorwise"},
            4,
            "layout.tensor = 4: 8-bit matmuls need multiples of 16, and each tensor rank has 24 of d_ff = 96"
            "; nearest that works: 2",
        ),
        (
            {"split_sends": True},
            {},
            {},
            1,
            "layout.split_sends = true: needs layout.tensor and layout.pipeline above 1; nearest that works: false",
        ),
        (
            {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "split_sends": True},
            EIGHT,
            {},
            4,
            "layout.split_sends = true: is for whole activations: with layout.sequence_parallel tensor ranks have and "
            "send only their part; nearest that works: false",
        ),
        (
            {"tensor": 4, "pipeline": 2, "split_sends": True},
            {**EIGHT, "d_model": 55},
            {"seq_len": 63},
            8,
            "layout.split_sends = true: the 3465 numbers of a sequence cannot be divided evenly among 4 tensor ranks"
            "; nearest that works: false",
        ),
        (
            {"pipeline": 5},
            {},
            {},
            5,
            "layout.pipeline = 5: the 6 layers cannot be divided evenly among 5 chunks; layout.stage_layers sets "
            "another division, such as [2, 1, 1, 1, 1]; nearest that works: 6",
        ),
        (
            {"shard": 2, "expert_send": "nodes"},
            EXPERTS,
            {},
            2,
            "layout.expert_send = 'nodes': needs layout.expert above 1; nearest that works: copies",
        ),
        (
            {"shard": 2, "expert": 2, "expert_send": "nodes"},
            EXPERTS,
            {"expert_dispatch": "capacity"},
            2,
            "layout.expert_send = 'nodes': sends every token to its experts, which recipe.expert_dispatch = 'capacity' "
            "does not; nearest that works: copies",
        ),
        (
            {"shard": 2, "overlap": ["gradients", "experts"]},
            EXPERTS,
            {},
            2,
            "layout.overlap = ['gradients', 'experts']: experts: needs layout.expert above 1, else they send nothing"
            "; nearest that works: ['gradients']",
        ),
        (
            {"shard": 2, "expert": 2, "pipeline": 2, "overlap": "experts"},
            EXPERTS,
            {},
            4,
            "layout.schedule = '1f1b': overlap of experts needs a schedule that runs a forward together with another "
            "micro-batch's backward: interleaved or zero-bubble; nearest that works: zero-bubble",
        ),
        (
            {"shard": 2, "expert": 2, "overlap": "experts"},
            EXPERTS,
            {"global_batch": 2},
            2,
            "recipe.global_batch = 2: overlap of experts needs two micro-batches of a rank, and it has one"
            "; nearest that works: 4",
        ),
        (
            {"shard": 2, "expert": 2, "overlap": "experts"},
            EXPERTS,
            {"global_batch": 8, "micro_batch": None},
            2,
            "recipe.micro_batch: overlap of experts needs two micro-batches of a rank, and it has one"
            "; nearest that works: 2",
        ),
        (
            {"pipeline": 2},
            {"n_mtp_layers": 1, "positions": "learned"},
            {},
            2,
            "layout.pipeline = 2: multi-token prediction modules (model.n_mtp_layers) are not accounted for on a last "
            "stage that has learned positions or a norm after the embedding; nearest that works: 1",
        ),
        (
            {"overlap": "expert", "auto": True},
            EXPERTS,
            {},
            1,
            "layout.overlap = 'expert': must be among gradients, parameters, tensor, input-gradients, "
            "experts; nearest that works: experts",
        ),
        ({"stage_layers": [1, -5]}, {}, {}, 1, "layout.stage_layers = [1, -5]: each of them must be at least 0"),
        (
            {"stage_layers": "six"},
            {},
            {},
            1,
            "layout.stage_layers = 'six': must be a list of whole numbers, such as [4, 4]",
        ),
    ],
)
def test_a_layout_that_does_not_work_is_one_sentence(
    layout: dict[str, Any], model: dict[str, Any], recipe: dict[str, Any], count: int, sentence: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(tables(layout, model, recipe, count))
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
