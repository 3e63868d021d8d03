"""The engine's own step under the recorder: on fake tensors (a rehearsal) or for real (a measurement).

A rehearsal of a deep model is made from rehearsals of shallow ones: equal layers and micro-batches once, multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.engine.train.device import set_fp32_matmuls
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.precision import LossScaler, add_reference, build_model, gradient_buffers, refuse_matmuls
from trainledger.engine.train.step import Batch, optimizer_step
from trainledger.ledger.ledger import Ledger
from trainledger.spec.layers import LayerRun, group_size, layer_runs
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.savings import Segments
from trainledger.trace.extrapolate import MICRO_BATCHES, Counts, counted, proved, with_rounds
from trainledger.trace.fakes.kernels import kernels_of
from trainledger.trace.fakes.results import results_of
from trainledger.trace.fakes.tensors import make_states
from trainledger.trace.fakes.values import ZeroWhereUnknown
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.repeat_blocks import LEAST

_LAYER = re.compile(r"^layers\.(\d+)\b")


def from_few_blocks(run: Run, rehearsed: Callable[[Run], Ledger]) -> Ledger | None:
    """The ledger of a run's step, ``rehearsed`` with few of its equal blocks and micro-batches.

    None where it has no eight equal rounds of either, or where these do not prove to go on alike.
    """
    longest = _longest(run)
    several = run.grad_accum >= LEAST
    if longest is None and not several:
        return None
    short = replace(run, recipe=replace(run.recipe, global_batch=MICRO_BATCHES * run.device_batch)) if several else run
    notes = []
    ledger = rehearsed(short) if longest is None else _multiplied(short, longest, rehearsed)
    if longest is not None:
        size = len(longest.kinds)
        rounds = f" in rounds of {size}" if size > 1 else ""
        notes.append(f"{longest.count * size} layers are alike{rounds}: traced once and multiplied by {longest.count}")
    if several and ledger is not None:
        n = run.grad_accum
        ledger = with_rounds(ledger, n)
        notes.append(f"{n} micro-batches are alike: {MICRO_BATCHES} were traced and one of them multiplied")
    if ledger is None:
        return None
    ledger = _with_batches(ledger, run) if several else ledger
    return replace(counted(ledger), notes=(*ledger.notes, *notes))


def _longest(run: Run) -> LayerRun | None:
    """The run of layers with the most equal rounds behind the leading dense ones, which a shorter model has too."""
    runs = layer_runs(run.model, run.recipe)
    best = max(runs, key=lambda layer_run: int(layer_run.count))
    if best.count < LEAST or _shorter(run, best, LEAST) is None:
        return None
    return best


def _shorter(run: Run, longest: LayerRun, rounds: int) -> Run | None:
    """The same run with so many of these rounds; None where its layers are then not the others of the model."""
    model: ModelSpec = replace(run.model, n_layers=run.model.n_layers - (longest.count - rounds) * len(longest.kinds))
    recipe: Recipe = run.recipe
    if recipe.activation_checkpointing.kind == "segments":
        recipe = replace(recipe, activation_checkpointing=Segments(n_blocks=group_size(run.model, recipe)))
    shorter = replace(run, model=model, recipe=recipe)
    wanted = [
        replace(layer_run, count=rounds) if layer_run == longest else layer_run
        for layer_run in layer_runs(run.model, run.recipe)
    ]
    dense = 0 if model.experts is None else model.experts.n_dense_layers
    if model.n_layers < max(1, dense) or list(layer_runs(model, recipe)) != wanted:
        return None
    return shorter


def _multiplied(run: Run, longest: LayerRun, rehearsed: Callable[[Run], Ledger]) -> Ledger | None:
    known: dict[Counts, Ledger] = {}
    size = len(longest.kinds)
    runs = layer_runs(run.model, run.recipe)
    first = sum(len(layer_run.kinds) * layer_run.count for layer_run in runs[: runs.index(longest)])

    def at(counts: Counts) -> Ledger:
        if counts not in known:
            shorter = _shorter(run, longest, *counts)
            known[counts] = Ledger(()) if shorter is None else rehearsed(shorter)
        return known[counts]

    def stars(path: str) -> str:
        return _LAYER.sub("layers.*", path)

    folded = proved(at, (longest.count,), stars)
    if folded is None:
        return None
    (rounds,) = folded.counts

    def placed(path: str) -> str:
        match = _LAYER.match(path)
        if match is None or int(match[1]) < first + (rounds + 1) // 2 * size:
            return path
        return _LAYER.sub(f"layers.{int(match[1]) + (longest.count - rounds) * size}", path)

    return folded.at((longest.count,), placed=placed)


def _with_batches(ledger: Ledger, run: Run) -> Ledger:
    """The ledger of a step of all micro-batches, whose tokens are there all the time."""
    resident = tuple(
        (name, nbytes // MICRO_BATCHES * run.grad_accum if name == "batch" else nbytes)
        for name, nbytes in ledger.resident
    )
    return replace(ledger, resident=resident, tokens=run.recipe.tokens_per_step, micro_batches=run.grad_accum)


def rehearse(run: Run, *, kernels: str = "cpu", blocks: str = "auto") -> Ledger:
    """The ledger of one steady-state optimizer step of a run, traced on fake CPU tensors: nothing is computed.

    ``kernels`` are of `spec.device.KERNELS` (`trace.kernels`). Of eight and more equal blocks or micro-batches a few
    are traced and multiplied (`few_blocks`), unless ``blocks`` is ``all``.
    """
    mode = FakeTensorMode()

    def rehearsed(run: Run) -> Ledger:
        with mode, ZeroWhereUnknown(results=results_of(kernels)), kernels_of(kernels):
            return metered_step(run, *_build(run), _batches(run), writer="trace")

    few = from_few_blocks(run, rehearsed) if blocks != "all" else None
    return rehearsed(run) if few is None else few


def rehearse_really(run: Run, device: str = "cpu") -> Ledger:
    """The same step with real tensors and random tokens on a device, recorded as it runs."""
    refuse_matmuls(run.recipe.precision, device)
    set_fp32_matmuls(run.recipe.precision)
    with torch.device(device):
        model, optimizer = _build(run)
        batches = _batches(run)
    return metered_step(run, model, optimizer, batches, writer="measure", clocked=True)


def _build(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model(run.model, run.recipe)
    if (beside := run.reference) is not None:
        add_reference(model, beside)
    return model, build_optimizer(model, run.recipe)


def _batches(run: Run) -> list[Batch]:
    shape = (run.device_batch, run.recipe.seq_len)
    objective = run.recipe.objective

    def rows() -> tuple[Tensor, Tensor]:
        return torch.randint(0, run.model.vocab_size, shape), torch.randint(0, run.model.vocab_size, shape)

    def batch() -> Batch:
        single = (torch.rand(run.device_batch), *rows()) if objective.mismatched else ()
        known = 1 + objective.mismatched if objective.reference == "precomputed" else 0
        return (*rows(), *single, *(torch.rand(run.device_batch) for _ in range(known)))

    return [batch() for _ in range(run.grad_accum)]


def _as_if_finite(found: Tensor) -> float:
    """The overflow flag of a step; on fake tensors, which have no values, there was none."""
    if isinstance(found, FakeTensor):
        with _disable_current_modes():
            found.constant = torch.zeros(())
    return found.item()


def metered_step(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    writer: str,
    clocked: bool = False,
) -> Ledger:
    """One optimizer step under the recorder, as a ledger; nothing is compiled, as no operation could be told apart.

    The optimizer's state is made before, so that the step is like every one but the first.
    """
    make_states(model, optimizer)
    # The closed form has what dispatch shows.
    recorder = Recorder(model, optimizer, clocked=clocked, hidden=False)
    recorder.resident([tensor for pair in batches for tensor in pair], "batch")
    recorder.resident(gradient_buffers(optimizer), "gradients")
    scaler = None
    if run.recipe.precision.loss_scaling:
        scaler = LossScaler(batches[0][0].device, first=1.0, read=_as_if_finite)  # no overflow: the step is taken
        recorder.resident([scaler.scale, scaler.good_steps], "optimizer state")
    with recorder:
        optimizer_step(model, optimizer, batches, run.recipe.uncompiled, clock=recorder.phase, scaler=scaler)
    return recorder.ledger(tokens=run.recipe.tokens_per_step, writer=writer)
