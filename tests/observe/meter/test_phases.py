"""The phases of a step: they sum to it, and hooks hear what the loop does."""

import time

import pytest
import torch
from torch import nn

from trainledger.observe.meter.phases import Guest, Hooks, LoopClock

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def failed(error):
    raise error


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.01)
        return self.linear(x)


def loop(steps, micro_batches=1, evaluate=False):
    model = Timed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.perf_counter()
    clock = LoopClock(CPU)
    hooks = Hooks(model, [optimizer], clock, clock.end_step, Guest(failed))
    for _ in range(steps):
        for _ in range(micro_batches):
            with clock.inside("data"):
                time.sleep(0.005)
            loss = model(torch.ones(2, 8)).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 8))
            model.train()
    took = time.perf_counter() - began
    hooks.remove()
    return list(clock.ended()), took, model


def test_phases_sum_to_the_loop():
    steps, took, _ = loop(5)
    assert [step.number for step, _ in steps] == [1, 2, 3, 4, 5]
    assert sum(sum(seconds.values()) for _, seconds in steps) <= took
    for step, seconds in steps:
        length = step.end - step.begins[0][1]
        assert sum(seconds.values()) == pytest.approx(length, abs=1e-9)
        assert seconds["forward"] >= 0.01
        assert seconds["data"] >= 0.005
        assert seconds["backward"] > 0
        assert seconds["optimizer"] > 0


def test_micro_batches_add_up_and_only_the_last_is_clipped():
    steps, _, _ = loop(3, micro_batches=4)
    for step, seconds in steps:
        assert seconds["forward"] >= 0.04
        assert seconds["data"] >= 0.02
        assert [phase for phase, _ in step.begins].count("clip") == 4
        begins = [moment for _, moment in step.begins]
        last = max(at for at, (phase, _) in enumerate(step.begins) if phase == "clip")
        assert seconds["clip"] == pytest.approx(begins[last + 1] - begins[last])


def test_evaluation_is_of_no_step():
    steps, _, _ = loop(3, evaluate=True)
    assert all(seconds["evaluation"] >= 0.01 for _, seconds in steps[1:])
    for step, _ in steps[1:]:  # the one before ends with an update, and its evaluation comes then
        assert [phase for phase, _ in step.begins].count("forward") == 1
        assert step.begins[1][0] == "evaluation"


def test_no_hook_stays():
    _, _, model = loop(1)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert "_compiled_call_impl" not in vars(model)


def test_what_ran_can_be_named_afterwards():
    clock = LoopClock(CPU)
    clock.begin("data")
    clock.was("checkpoint")
    clock.begin("data")
    ended = clock.end_step()
    assert [phase for phase, _ in ended.begins] == ["other", "checkpoint", "data"]


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_phases_are_the_devices():
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = LoopClock(torch.device("cuda"))
    hooks = Hooks(model, [optimizer], clock, clock.end_step, Guest(failed))
    for _ in range(4):
        model(torch.ones(8192, 4096, device="cuda")).sum().backward()
        optimizer.step()
    steps = list(clock.ended(wait=True))
    hooks.remove()
    assert len(steps) == 4
    for _, seconds in steps[1:]:
        assert seconds["forward"] > 0
        assert seconds["backward"] > seconds["optimizer"]
