"""The engine's own step under the recorder: on fake tensors (a rehearsal) or for real (a measurement)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.engine.train.mixed_precision import LossScaler, gradient_buffers
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.precision import build_model, refuse_matmuls, set_fp32_matmuls
from trainledger.engine.train.step import optimizer_step
from trainledger.ledger.ledger import Ledger
from trainledger.observe.measure.few_blocks import from_few_blocks
from trainledger.spec.run import Run
from trainledger.trace.fakes.kernels import kernels_of
from trainledger.trace.fakes.results import results_of
from trainledger.trace.fakes.tensors import make_states
from trainledger.trace.fakes.values import ZeroWhereUnknown
from trainledger.trace.recorder.recorder import Recorder

Batch = tuple[Tensor, Tensor]


def rehearse(run: Run, *, kernels: str = "cpu", blocks: str = "auto") -> Ledger:
    """The ledger of one steady-state optimizer step of a run, traced on fake CPU tensors: nothing is computed.

    ``kernels`` are of `spec.kernels.KERNELS` (`trace.kernels`). Of eight and more equal blocks or micro-batches a few
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
    return model, build_optimizer(model, run.recipe)


def _batches(run: Run) -> list[Batch]:
    shape = (run.device_batch, run.recipe.seq_len)
    tokens = [torch.randint(0, run.model.vocab_size, shape) for _ in range(2 * run.grad_accum)]
    return list(zip(tokens[::2], tokens[1::2], strict=True))


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
    recorder.resident([each for pair in batches for each in pair], "batch")
    recorder.resident(gradient_buffers(optimizer), "gradients")
    scaler = None
    if run.recipe.precision.loss_scaling:
        scaler = LossScaler(batches[0][0].device, first=1.0, read=_as_if_finite)  # no overflow: the step is taken
        recorder.resident([scaler.scale, scaler.good_steps], "optimizer state")
    with recorder:
        optimizer_step(model, optimizer, batches, run.recipe.uncompiled, clock=recorder.phase, scaler=scaler)
    return recorder.ledger(tokens=run.recipe.tokens_per_step, writer=writer)
