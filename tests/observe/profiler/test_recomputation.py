"""What activation checkpointing runs again, in traces of its two ways, beside what was counted as it ran."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from trainledger.observe.profiler.profile import profile_of
from trainledger.observe.profiler.read import read_profile
from trainledger.observe.profiler.step_time import recomputed

ROWS, SIZE, LAYERS = 24, 16, 3
FORWARD = 2 * ROWS * SIZE * SIZE  # FLOPs of one layer


class Layer(nn.Module):
    """Its last operator is a sum, so that a region is not broken off before its matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        return x_RD + self.linear(x_RD).sin().tanh()


def recorded(folder: Path, step) -> Path:  # type: ignore[no-untyped-def]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recording:
        step()
    recording.export_chrome_trace(str(folder / "trace.json"))
    return folder / "trace.json"


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_run_again_are_found_and_no_others(tmp_path, reentrant):
    layers = [Layer() for _ in range(LAYERS)]

    def step() -> None:
        x_RD = torch.ones(ROWS, SIZE, requires_grad=True)
        for at, layer in enumerate(layers):
            x_RD = checkpoint(layer, x_RD, use_reentrant=reentrant) if at else layer(x_RD)
        x_RD.sum().backward()

    found = profile_of(recorded(tmp_path, step))
    assert found.model_flops == 3 * LAYERS * FORWARD
    assert found.flops - found.model_flops == (LAYERS - 1) * FORWARD
    assert sum(found.step.parts_ns.values()) == found.step.nanoseconds
    recording = read_profile(tmp_path / "trace.json")
    again = recording.operators.where(recomputed(recording).operators)
    names = [recording.names[each] for each in again.names]
    assert names.count("aten::sin") == names.count("aten::linear") == names.count("aten::addmm") == LAYERS - 1
    assert not any("Backward" in each for each in names)
    assert not [each for each in found.doubts if "checkpointing" in each]


def test_a_backward_that_is_itself_recorded_is_a_doubt(tmp_path):
    layer = Layer()

    def step() -> None:
        x_RD = torch.ones(ROWS, SIZE, requires_grad=True)
        (gradient_RD,) = torch.autograd.grad(layer(x_RD).square().sum(), x_RD, create_graph=True)
        gradient_RD.square().sum().backward()

    found = profile_of(recorded(tmp_path, step))
    assert any("the backward is recorded itself" in each for each in found.doubts)
    assert found.flops == found.model_flops


def test_a_compiled_backward_is_a_doubt(tmp_path):
    @torch.compile(backend="aot_eager")
    def compiled(x_RD: torch.Tensor) -> torch.Tensor:
        return x_RD.sin().tanh().sum()

    found = profile_of(recorded(tmp_path, lambda: compiled(torch.ones(ROWS, SIZE, requires_grad=True)).backward()))
    assert any("compiled region" in each for each in found.doubts)
