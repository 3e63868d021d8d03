"""Adam with 8-bit moments: against a plain reference in numpy, against Adam, and over a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import tiny_run
from torch import Tensor, nn

from trainledger.engine.train import saving
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.update_rules import BLOCK, SMALLEST, Adam8bit, _moment, _store, table

Array = np.ndarray[Any, np.dtype[np.float64]]


@pytest.mark.parametrize("signed", [True, False])
def test_a_byte_stands_for_values_over_seven_decades(signed: bool) -> None:
    values = table(signed=signed)
    assert len(values) == len(set(values)) == 256
    assert list(values) == sorted(values)
    assert values[-1] == 1.0
    assert min(each for each in values if each > 0) == pytest.approx(5.5e-7 if signed else 3.25e-7)
    assert 0.0 in values
    assert (min(values) < -0.98) == signed
    # Each decade is cut into twice as many parts as the one below.
    counts = [sum(10.0**-exponent / 10 < each < 10.0**-exponent for each in values) for exponent in range(7)]
    assert counts == [2 ** (6 - exponent if signed else 7 - exponent) for exponent in range(7)]


def reference(weight: Array, gradients: list[Array], decay: float, *, decoupled: bool) -> Array:
    """Adam with moments rounded to the nearest value of the table times the largest of their block."""
    rate, beta1, beta2, epsilon = 0.01, 0.9, 0.95, 1e-8
    moments = [np.zeros_like(weight), np.zeros_like(weight)]
    for step, given in enumerate(gradients, 1):
        gradient = given
        if decoupled:
            weight = weight * (1 - rate * decay)
        else:
            gradient = gradient + decay * weight
        first = beta1 * moments[0] + (1 - beta1) * gradient
        second = beta2 * moments[1] + (1 - beta2) * gradient**2
        weight = weight - rate * (first / (1 - beta1**step)) / (np.sqrt(second / (1 - beta2**step)) + epsilon)
        moments = [rounded(first, np.array(table(signed=True))), rounded(second, np.array(table(signed=False)))]
    return weight


def rounded(moment: Array, values: Array) -> Array:
    flat, result = moment.reshape(-1), np.zeros(moment.size)
    for start in range(0, flat.size, 256):
        block = flat[start : start + 256]
        scale = np.abs(block).max()
        if scale > 0:
            nearest = np.abs(block[:, None] / scale - values[None, :]).argmin(axis=1)
            result[start : start + 256] = values[nearest] * scale
    return result.reshape(moment.shape)


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "adam-8bit"])
@pytest.mark.parametrize("shape", [(64, 64), (70, 71), (7, 11)])
def test_it_steps_as_the_reference_does(optimizer: str, shape: tuple[int, int]) -> None:
    """(70, 71) has a last block that is not full; (7, 11) is small, so that its moments are not rounded."""
    generator = torch.Generator().manual_seed(5)
    weight = nn.Parameter(torch.randn(shape, generator=generator))
    before = weight.detach().double().numpy()
    recipe = tiny_run(optimizer=optimizer, learning_rate=0.01, **{"optimizer.weight_decay": 0.1}).recipe
    stepped = build_optimizer(holder(weight), recipe)
    gradients = [torch.randn(shape, generator=generator) * 10.0 ** (step - 3) for step in range(5)]
    for gradient in gradients:
        weight.grad = gradient.clone()
        stepped.step()
    given = [each.double().numpy() for each in gradients]
    decoupled = optimizer == "adamw-8bit"
    if weight.numel() >= SMALLEST:
        expected = reference(before, given, 0.1, decoupled=decoupled)
    else:
        plain = nn.Parameter(torch.from_numpy(before).float())
        adam = torch.optim.AdamW if decoupled else torch.optim.Adam
        exact = adam([plain], lr=0.01, betas=(0.9, 0.95), eps=recipe.optimizer.epsilon, weight_decay=0.1)
        for gradient in gradients:
            plain.grad = gradient
            exact.step()
        expected = plain.detach().double().numpy()
    # A moment that lies between two values may round the other way in fp32: few do.
    near = np.isclose(weight.detach().double().numpy(), expected, rtol=1e-4, atol=1e-6)
    assert near.mean() > 0.995


def holder(weight: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = weight
    return module


def test_a_stored_moment_is_the_nearest_there_is() -> None:
    moment = torch.randn(40, BLOCK, generator=torch.Generator().manual_seed(1)) ** 3
    moment[3] = 0.0
    kept = moment.clone()
    values = torch.tensor(table(signed=True))
    codes, scales = torch.zeros(40, BLOCK, dtype=torch.uint8), torch.ones(40, 1)
    _store(moment, codes, scales, (values[1:] + values[:-1]) / 2)
    read = _moment(codes, scales, values)
    assert torch.equal(scales, kept.abs().amax(1, keepdim=True))
    assert torch.equal(read[3], torch.zeros(BLOCK))
    nearest = (kept[..., None] / kept.abs().amax(1)[:, None, None].clamp(min=1e-30) - values).abs().amin(-1)
    torch.testing.assert_close((read - kept).abs(), nearest * scales, rtol=1e-3, atol=1e-6)


def losses(optimizer: str, steps: int) -> list[float]:
    """Two layers learn what a random net of theirs says: 96 x 96 matrices, so that their moments are stored."""
    torch.manual_seed(11)
    teacher, student = two_layers(), two_layers()
    x = torch.randn(256, 96)
    target = teacher(x).detach()
    recipe = tiny_run(optimizer=optimizer, learning_rate=3e-3, **{"optimizer.weight_decay": 0.0}).recipe
    stepped = build_optimizer(student, recipe)
    seen = []
    for _ in range(steps):
        stepped.zero_grad()
        loss = (student(x) - target).square().mean()
        loss.backward()
        stepped.step()
        seen.append(loss.item())
    return seen


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96))


def test_training_converges_as_with_adam() -> None:
    exact, stored = losses("adam", 150), losses("adam-8bit", 150)
    assert exact[-1] < 0.02 * exact[0]
    assert stored[-1] < 1.5 * exact[-1]


def test_saved_and_loaded_it_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return two_layers()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for each in model.parameters():
            each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()

    recipe = tiny_run(optimizer="adamw-8bit").recipe
    whole = model()
    optimizer = build_optimizer(whole, recipe)
    assert isinstance(optimizer, Adam8bit)
    step(whole, optimizer, 1)
    step(whole, optimizer, 2)
    saved = saving.save(tmp_path, 2, whole, optimizer, {})
    step(whole, optimizer, 3)

    parts = model()
    resumed = build_optimizer(parts, recipe)
    saving.load(saved, parts, resumed)
    step(parts, resumed, 3)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)
        assert states(optimizer, a) == states(resumed, b)
    assert resumed.state[parts.get_parameter("0.weight")]["exp_avg"].dtype == torch.uint8


def states(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, tuple[torch.dtype, list[Any]]]:
    return {name: (each.dtype, each.tolist()) for name, each in optimizer.state[weight].items()}
