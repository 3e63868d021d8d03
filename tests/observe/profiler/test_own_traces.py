"""Steps of our own engine's model under torch.profiler: its FLOPs are those of its account, its steps those it ran."""

import time

import pytest
import torch
from profiler_runs import STEPS, recorded, run_of
from torch.profiler import ProfilerActivity, profile, schedule

from trainledger.ledger.step import account
from trainledger.observe.profiler.kinds import RECOMPUTATION
from trainledger.observe.profiler.profile import profile_of


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_flops_of_a_step_by_its_shapes_are_those_of_its_account(tmp_path, checkpointing):
    run = run_of(activation_checkpointing=checkpointing)
    ledger = account(run)
    found = profile_of(recorded(tmp_path, run, marked=True))
    assert len(found.steps) == STEPS
    assert found.found_by == "ProfilerStep annotations"
    flops = ledger.by("kind")
    # A block that runs again stops as it comes to its last matmul, which keeps nothing new: the profiler has seen that
    # operator begin, and it is left out, as nobody ran it.
    assert found.flops == flops["matmul"] + flops["attention"]
    assert found.model_flops == ledger.model_flops
    assert (found.step.parts_ns[RECOMPUTATION] > 0) == (checkpointing == "full")
    for step in found.steps:
        assert sum(step.parts_ns.values()) == step.nanoseconds
    assert not found.on_device


def test_steps_without_marks_are_between_updates(tmp_path):
    run = run_of()
    found = profile_of(recorded(tmp_path, run, marked=False))
    assert found.found_by == "the ends of Optimizer.step annotations"
    assert len(found.steps) == STEPS


class Above(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Container(torch.optim.Optimizer):
    def __init__(self, inside):
        self.inside = inside
        super().__init__([each for one in inside for group in one.param_groups for each in group["params"]], {})

    def step(self, closure=None):
        for each in self.inside:
            each.step()


def one_by_one(layers):
    return [torch.optim.AdamW(each.parameters()) for each in layers]


UPDATES = {
    "one": lambda layers: [torch.optim.AdamW(layers.parameters())],
    "two of different classes": lambda layers: [
        torch.optim.AdamW(layers[0].parameters()), torch.optim.SGD(layers[1].parameters()),
    ],
    "four of one class": one_by_one,
    "a class and the one above it": lambda layers: [Above(layers.parameters(), lr=0.1)],
    "a container": lambda layers: [Container(one_by_one(layers))],
}  # fmt: skip


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", UPDATES)
def test_a_step_has_as_many_updates_as_repeat_as_a_whole(tmp_path, name, evaluates):
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    torch.optim.SGD(layers.parameters())  # from now on this class is annotated, also where another one calls it
    optimizers = UPDATES[name](layers)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recording:
        for step in range(12):
            for _ in range(3):
                layers(torch.ones(2, 16)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if evaluates and step == 6:
                layers(torch.ones(2, 16))
    recording.export_chrome_trace(str(tmp_path / "trace.json"))
    found = profile_of(tmp_path / "trace.json")
    assert len(found.steps) == 11
    of_a_layer = 2 * 2 * 16 * 16
    more = found.flops - 3 * (4 + 4 + 3) * of_a_layer  # forward, gradients of weights, and of inputs but the first
    assert more in (0, 4 * of_a_layer * evaluates)


class Slow(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return STEPS + 2

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.1)
        return torch.ones(64)


def test_a_slow_loader_is_the_first_cause(tmp_path):
    layer = torch.nn.Linear(64, 8)
    marks = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    path = tmp_path / "trace.json"
    with profile(
        activities=[ProfilerActivity.CPU], schedule=marks,
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as recording:  # fmt: skip
        for row_BD in torch.utils.data.DataLoader(Slow(), batch_size=1):
            layer(row_BD).sum().backward()
            recording.step()
    found = profile_of(path)
    assert found.causes[0].name == "waiting for data"
    assert found.causes[0].nanoseconds >= 0.9 * 100_000_000


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_compiled_step_is_read_and_says_what_it_hides(tmp_path, checkpointing):
    run = run_of(activation_checkpointing=checkpointing)
    found = profile_of(recorded(tmp_path, run, compiled=True))
    assert len(found.steps) == STEPS
    for step in found.steps:
        assert sum(step.parts_ns.values()) == step.nanoseconds
    assert sum(each.nanoseconds for each in found.waterfall) == found.step.nanoseconds
    # Matmuls stay operators of their own, and blocks are checkpointed around what is compiled.
    ledger = account(run)
    flops = ledger.by("kind")
    assert found.flops == flops["matmul"] + flops["attention"]
    assert found.model_flops == ledger.model_flops
    assert any("compiled region" in each for each in found.doubts)
