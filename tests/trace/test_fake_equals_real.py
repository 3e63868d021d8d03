"""A step on fake tensors runs the operations that the same step runs for real, with the same memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from random_runs import run_of, runs
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trainledger.engine.nn.transformer import build
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.step import optimizer_step
from trainledger.ledger import rules
from trainledger.ledger.entry import Entry
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse, rehearse_really
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(runs())
def test_fake_equals_real(run: Run) -> None:
    fake, real = rehearse(run), rehearse_really(run)
    assert fake.resident == real.resident
    assert fake.uncounted == real.uncounted == ()
    for amount in ("flops", "model_flops", "kept"):
        assert fake.total(amount) == real.total(amount)
    assert [without_time(each) for each in fake] == [without_time(each) for each in real]


def without_time(each: Entry) -> Entry:
    return replace(each, seconds=None)


def test_only_the_real_step_has_times() -> None:
    fake, real = rehearse(run_of()), rehearse_really(run_of())
    assert (fake.writer, real.writer) == ("trace", "measure")
    assert all(each.seconds is None for each in fake)
    assert all(each.seconds is not None and each.seconds > 0 for each in real)


# FlopCounterMode knows matmuls everywhere and attention on accelerators. The CPU's fused attention kernel has no
# formula there and counts as nothing, which is why `attention` is compared by the rule and not by the run.
ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.mark.parametrize("gpt2", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_flops_equal_flop_counter_with_written_out_attention(gpt2: bool, precision: str, checkpointing: str) -> None:
    run = run_of(
        gpt2=gpt2, attention="math", precision=precision, activation_checkpointing=checkpointing, micro_batch=2
    )
    assert counted(run) == account(run).matmul_flops == rehearse(run).matmul_flops


def test_flop_counter_counts_fused_attention_on_a_cpu_since_torch_2_15() -> None:
    since_then = torch.__version__ >= (2, 15)
    assert (ON_CPU in flop_registry) == since_then
    run = run_of()
    flops = account(run).by("kind")
    assert flops["attention"] > 0
    assert counted(run) == flops["matmul"] + flops["attention"] * since_then


def test_attention_rules_equal_flop_counter_where_it_has_one() -> None:
    q_shape, k_shape, v_shape = (2, 6, 33, 8), (2, 6, 35, 8), (2, 6, 35, 12)
    sizes = (2, 6, 33, 35, 8, 12)
    assert rules.attention_flops(*sizes) == sdpa_flop_count(q_shape, k_shape, v_shape)
    grad_shape = (2, 6, 33, 12)
    assert rules.attention_backward_flops(*sizes) == sdpa_backward_flop_count(grad_shape, q_shape, k_shape, v_shape)


def counted(run: Run) -> int:
    """What torch's own counter says of one real step."""
    model = build(run.model, run.recipe)
    optimizer = build_optimizer(model, run.recipe)
    shape = (run.device_batch, run.recipe.seq_len)
    batches = [(torch.zeros(shape, dtype=torch.int64),) * 2 for _ in range(run.grad_accum)]
    with FlopCounterMode(display=False) as counter:
        optimizer_step(model, optimizer, batches, run.recipe)
    return counter.get_total_flops()
