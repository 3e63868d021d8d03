"""A measured ledger of anybody's loop, and of one step in an engine's run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from counting_compiler import CountingCompiler
from models import spec_of
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.observer import PhaseClock, StepRecord, TrainingState
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.step import optimizer_step
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.observe.measure.meter import StepMeter, meter
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.trace import trace

torch.set_num_threads(1)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))


@pytest.mark.parametrize("way", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_a_loop_of_ones_own_equals_its_trace(way: dict[str, bool]) -> None:
    model, x, targets = two_layers(), torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), **way)
    step(model, optimizer, x, targets)
    optimizer.zero_grad(set_to_none=True)
    with meter(model, optimizer) as metered:
        step(model, optimizer, x, targets)
    measured = metered.ledger
    traced = trace(model, x, loss=lambda y: F.cross_entropy(y, targets), optimizer=optimizer)
    assert operations(measured) == operations(traced)
    assert measured.parameters == traced.parameters
    assert measured.kept_nbytes == traced.kept_nbytes
    assert measured.micro_batches == 1
    assert measured.uncounted == traced.uncounted == ()
    assert measured.peak().nbytes == pytest.approx(traced.peak().nbytes, abs=targets.nbytes)
    assert dict(measured.resident)["parameters"] == 4 * measured.parameters
    assert dict(measured.resident)["optimizer state"] == 8 * measured.parameters + 4 * 4


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, targets: torch.Tensor) -> None:
    F.cross_entropy(model(x), targets).backward()
    optimizer.step()


def operations(ledger: Ledger) -> list[tuple[object, ...]]:
    return [(each.name, each.phase, each.flops, each.written, each.kept) for each in ledger]


def test_every_operation_has_a_time() -> None:
    model = two_layers()
    with meter(model) as metered:
        model(torch.randn(8, 64)).sum().backward()
    assert metered.ledger.writer == "measure"
    assert all(each.seconds is not None and each.seconds >= 0 for each in metered.ledger)


def test_micro_batches_are_told_apart() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with meter(model, optimizer) as metered:
        for _ in range(3):
            model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    with meter(model, optimizer) as once:
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(8, 64)).sum().backward()
    assert metered.ledger.micro_batches == 3
    assert metered.ledger.kept_nbytes == once.ledger.kept_nbytes > 0
    assert metered.ledger.matmul_flops == 3 * once.ledger.matmul_flops


def test_the_optimizers_hooks_are_gone_afterwards() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), meter(model, optimizer):
        _ = 1 / 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    with meter(model) as metered:
        pass
    assert len(metered.ledger) == 0


def metered_run(steps: int, **recipe: Any) -> tuple[Run, StepMeter]:
    """A run's steps as the engine takes them, watched by a meter."""
    spec = spec_of(V=512, D=128, L=2, H=4, KV=2, F=256, T=64)
    run = Run(
        model=spec,
        recipe=from_fields(Recipe, {"seq_len": 64, "global_batch": 4, "micro_batch": 2, "steps": steps, **recipe}),
    )
    model, watch = build(run.model, run.recipe), StepMeter()
    state = TrainingState(run, Path(), torch.device("cpu"), model, build_optimizer(model, run.recipe))
    clock = PhaseClock(state.device, [watch])
    watch.on_start(state)
    for number in range(1, steps + 1):
        with watch.around_step(number):
            with clock("data"):
                tokens = [torch.randint(0, 512, (2, 65)) for _ in range(2)]
                batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
                del tokens
            optimizer_step(model, state.optimizer, batches, run.recipe, clock=clock)
        watch.on_step_end(StepRecord(number, 0.0, 0, 0.0, 0.0, None, 0.0))
    return run, watch


@pytest.mark.parametrize("recipe", [{}, {"precision": "bf16-mixed"}, {"ema.decay": 0.99}], ids=str)
def test_a_metered_step_equals_the_closed_form(recipe: dict[str, Any]) -> None:
    run, watch = metered_run(5, **recipe)
    predicted, measured = account(run), watch.ledger
    assert watch.metered == {3, 4}
    assert measured is not None
    assert measured.parameters == predicted.parameters
    assert measured.tokens == predicted.tokens
    assert measured.kept_nbytes == predicted.kept_nbytes
    assert measured.model_flops == predicted.model_flops
    assert predicted.diff(measured) == {}
    assert measured.peak().nbytes == pytest.approx(predicted.peak().nbytes, rel=1e-3)
    mine, theirs = predicted.peak().by_category, measured.peak().by_category
    assert {name: theirs[name] for name in mine} == pytest.approx(mine, rel=1e-2)
    assert watch.allocator_peak_nbytes == predicted.peak().nbytes


def test_what_the_allocator_gives_more_than_the_account_is_sums_of_bf16_matmuls() -> None:
    run, watch = metered_run(5, precision="bf16-mixed", activation_checkpointing="full")
    peak = account(run).peak().nbytes
    assert watch.allocator_peak_nbytes is not None
    assert 0 <= watch.allocator_peak_nbytes - peak - watch.matmul_sums_nbytes <= 1024  # pads of oneDNN


def test_a_run_too_short_to_warm_up_is_metered_in_its_last_step() -> None:
    run, watch = metered_run(1)
    assert watch.metered == {1}
    assert watch.ledger is not None
    assert watch.ledger.matmul_flops == account(run).matmul_flops
    assert watch.allocator_peak_nbytes is None


@pytest.fixture
def among_ranks() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.up(x))


def compiled_layers(compiler: CountingCompiler) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    model = nn.Sequential(Block(), Block())
    for layer in model:
        layer.compile(backend=compiler)
    return model, F.cross_entropy


def compiled_loss(compiler: CountingCompiler) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    return two_layers(), torch.compile(lambda y, targets: F.cross_entropy(y, targets), backend=compiler)


@pytest.mark.usefixtures("among_ranks")
@pytest.mark.parametrize(("made", "regions"), [(compiled_layers, 2), (compiled_loss, 1)])
def test_what_is_metered_eagerly_is_compiled_again_in_the_next_step(made: Any, regions: int) -> None:
    compiler = CountingCompiler()
    model, loss = made(compiler)
    x, targets = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    calls = []
    for step in range(4):
        if step == 2:
            with meter(model) as metered:
                loss(model(x), targets).backward()
        else:
            loss(model(x), targets).backward()
        calls.append(compiler.calls)
    assert calls == [regions, 2 * regions, 2 * regions, 3 * regions]
    assert metered.ledger.uncounted == ()
