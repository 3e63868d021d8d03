"""Numbers that can be checked by hand."""

from dataclasses import replace
from itertools import groupby

import pytest

from trainledger.answers.load import load, model
from trainledger.ledger import rules
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.step import account
from trainledger.spec.run import Run


def run(preset: str, **recipe: object) -> Run:
    defaults = {"seq_len": 1024, "global_batch": 1, "steps": 1}
    return load({"model": {"preset": preset}, "recipe": {**defaults, **recipe}})


def test_parameters_of_gpt2() -> None:
    count = parameters(model("gpt2"))
    width, layers = 768, 12
    assert count.by_component == {
        "embedding": 50257 * width,
        "positions": 1024 * width,
        "attention": layers * (4 * width * width + 4 * width),
        "mlp": layers * (8 * width * width + 5 * width),
        "norms": (2 * layers + 1) * 2 * width,
        "head": 0,
    }
    assert count.total == count.active == 124_439_808


def test_parameters_of_llama_3_8b() -> None:
    count = parameters(model("llama-3-8b"))
    assert count.total == 8_030_261_248
    assert count.by_component["attention"] == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert count.by_component["mlp"] == 32 * 3 * 4096 * 14336
    assert count.by_component["head"] == count.by_component["embedding"] == 128256 * 4096


@pytest.mark.parametrize("preset", ["gpt2", "llama-3-8b", "teach-1m", "teach-gpt-1m"])
def test_the_parts_add_up_to_what_the_step_trains(preset: str) -> None:
    count = parameters(model(preset))
    assert sum(count.by_component.values()) == count.total == account(run(preset, seq_len=8)).parameters


def test_one_linear_layer() -> None:
    """y = x W with x of [1024, 768] and W of [768, 50257]: forward one matmul, backward two of the same size."""
    flops = account(run("gpt2")).filter(lambda each: each.path == "lm_head" and each.kind == "matmul")
    assert [(each.phase, each.flops) for each in flops] == [
        ("forward", 2 * 1024 * 768 * 50257),
        ("backward", 2 * 1024 * 768 * 50257),
        ("backward", 2 * 1024 * 768 * 50257),
    ]
    assert rules.matmul_flops(1024, 50257, 768) == 79_047_426_048


def test_six_flops_per_matrix_parameter_and_token() -> None:
    """6 N D (Kaplan et al. 2020) is exact for matmuls when N are the matrices that tokens pass through."""
    ledger, count = account(run("llama-3-8b", seq_len=512)), parameters(model("llama-3-8b"))
    matrices = count.by_component["attention"] + count.by_component["mlp"] + count.by_component["head"]
    assert ledger.by("kind")["matmul"] == 6 * matrices * 512
    attention = 32 * rules.attention_flops(1, 32, 512, 512, 128, 128)
    assert ledger.model_flops == 6 * matrices * 512 + 3 * attention


def test_recomputation_repeats_the_blocks_matmuls_and_is_no_model_work() -> None:
    plain, again = account(run("llama-3-8b")), account(run("llama-3-8b", activation_checkpointing="full"))
    assert plain.model_flops == again.model_flops
    recomputed = again.filter(lambda each: each.phase == "recompute" and each.kind in ("matmul", "attention"))
    count = parameters(model("llama-3-8b"))
    attention = 32 * rules.attention_flops(1, 32, 1024, 1024, 128, 128)
    # The last matmul of a block is not run again: nothing in its backward reads its result.
    in_blocks = count.by_component["attention"] + count.by_component["mlp"] - 32 * 4096 * 14336
    assert recomputed.flops == 2 * in_blocks * 1024 + attention


def test_static_bytes_of_adamw_in_mixed_precision() -> None:
    ledger = account(run("llama-3-8b", precision="bf16-mixed"))
    resident, count = dict(ledger.resident), parameters(model("llama-3-8b"))
    assert resident["parameters"] == 4 * count.total
    tensors = 32 * 9 + 3
    assert resident["optimizer state"] == 8 * count.total + 4 * tensors


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("loop", ["fused", "loop"])
def test_loops_written_out_by_hand_add_up_to_the_same(checkpointing: str, loop: str) -> None:
    recipe = {
        "activation_checkpointing": checkpointing,
        "optimizer.implementation": loop,
        "global_batch": 6,
        "micro_batch": 2,
    }
    ledger = account(run("teach-1m", seq_len=64, **recipe))
    flat = Ledger(tuple(written_out(ledger.entries, 0)), ledger.resident, micro_batches=ledger.micro_batches)
    assert len(flat) == sum(each.times for each in ledger) > 2 * len(ledger)
    assert flat.flops == ledger.flops
    assert flat.kept_nbytes == ledger.kept_nbytes
    assert flat.by("phase", "written") == ledger.by("phase", "written")
    assert flat.peak().nbytes == ledger.peak().nbytes
    assert flat.peak().by_category == ledger.peak().by_category


def written_out(entries: tuple[Entry, ...], depth: int) -> list[Entry]:
    flat: list[Entry] = []
    for loop, group in groupby(entries, key=lambda each: each.loop[depth : depth + 1]):
        body = tuple(group)
        for _ in range(loop[0][1] if loop else 1):
            flat += written_out(body, depth + 1) if loop else [replace(each, loop=()) for each in body]
    return flat
