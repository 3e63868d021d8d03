"""One optimizer step, its batches and its seeds. The trace follows it, and the closed form accounts for it.

Seeds are derived apart by use, so that changing one stream of chance leaves the others as they were. The order of the
data has its key from the same seed in `trainledger.engine.data.mixture`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor, nn

from trainledger.engine.nn.float8 import weights_cast_once
from trainledger.engine.nn.loss import weighing
from trainledger.engine.nn.objective import loss_of_batch
from trainledger.engine.train.precision import LossScaler, MasterWeights, autocast, stepped
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

Clock = Callable[[str], AbstractContextManager[None]]
Batch = tuple[Tensor, ...]  # inputs_BT and targets_BT, int64; of preferences also what `objective` says
# Whether the update is left out; a tensor says so on the device (1, else 0), for a kernel that `leaves_out_on_device`.
Judge = Callable[[Tensor, Tensor | None], bool | Tensor]


class Feed(Protocol):
    """The source of batches: pure functions of the run and of data that ``fingerprint`` names.

    That of a run file's data is `trainledger.engine.data.loader.Loader`.
    """

    @property
    def fingerprint(self) -> str:
        """Equal for data that gives equal batches; a run is not resumed on other data."""

    @property
    def tokenizer_definition(self) -> str | None:
        """The text of the tokenizer.json that is kept in the run directory, if there is one."""

    @property
    def unigram_entropy(self) -> float | None:
        """Loss in nats of a model that knows only how often each token occurs, if known."""

    @property
    def end_id(self) -> int | None:
        """The token that ends each document, if known."""

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences that are said when a run begins or goes on."""

    @property
    def shares(self) -> Mapping[str, float]:
        """The share of the sequences that are from each source, by name; text that is not mixed has the empty name."""

    @property
    def validation_sequences(self) -> Mapping[str, int]:
        """How many sequences `validation` gives of each source, by name."""

    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        """The micro-batches of step index ``first_step`` (0 is the first), of the next step, and so on."""

    def documents(self, step: int) -> Sequence[str]:
        """The documents that the global batch of step index ``step`` has tokens of, with their places, if known."""

    def validation(self, source: str) -> Iterable[Batch]:
        """The held-out batches of a source, the same each time."""

    def close(self) -> None:
        """Close files and end threads."""


class OpenFeed(Protocol):
    """What opens the feed of a run on a device."""

    def __call__(self, run: Run, device: torch.device, /, *, rank: int, ranks: int, progress: bool) -> Feed:
        """The feed of data rank ``rank`` among ``ranks``, which gets its rows of every global batch.

        With ``progress`` long work shows how far it is.
        """


class InStages(Protocol):
    """A model of which this process has some stages of a pipeline."""

    def step(self, batches: Sequence[Batch], clock: Clock) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss on ranks with the last stage, 0 on others."""

    def evaluate(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        """The mean loss of a batch on ranks with the last stage."""


class Together(Protocol):
    """How the ranks of a layout take a step together; `Alone` is a process without others."""

    @property
    def pipeline(self) -> InStages | None:
        """What runs the micro-batches where no rank has the whole model."""

    def around(self) -> AbstractContextManager[object]:
        """Entered around all micro-batches of a step or an evaluation."""

    def called(self, model: nn.Module) -> nn.Module:
        """What is called in the model's place."""

    def own(self, batch: Batch) -> Batch:
        """This rank's tokens of a micro-batch."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Entered around forward and backward of a micro-batch; the ``last`` may send gradients."""

    def finish_gradients(self, model: nn.Module, clock: Clock) -> None:
        """Add up over ranks what no backward has added up, as a part of the ``backward`` phase."""

    def clip(self, parameters: list[nn.Parameter], most: float) -> Tensor:
        """Scale the gradients to a joint norm of at most ``most``; the norm before, over all ranks."""


class Alone:
    """A step of one process."""

    pipeline = None

    def around(self) -> AbstractContextManager[object]:
        return nullcontext()

    def called(self, model: nn.Module) -> nn.Module:
        return model

    def own(self, batch: Batch) -> Batch:
        return batch

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def finish_gradients(self, model: nn.Module, clock: Clock) -> None:
        pass

    def clip(self, parameters: list[nn.Parameter], most: float) -> Tensor:
        # One kernel for all tensors where launches cost more than arithmetic; on a CPU it would gain nothing.
        foreach = parameters[0].device.type != "cpu"
        return torch.nn.utils.clip_grad_norm_(parameters, most, foreach=foreach)


ALONE = Alone()


@dataclass(frozen=True)
class StepResult:
    """Mean loss over the micro-batches in nats, and the joint gradient norm before clipping (None = no clipping).

    ``skipped``: the weights were left as they were, because of the judge or because scaled gradients overflowed; False
    where only the device knows.
    """

    loss: Tensor
    grad_norm: Tensor | None
    skipped: bool = False


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    recipe: Recipe,
    *,
    clock: Clock | None = None,
    seeds: Sequence[int] | None = None,
    scaler: LossScaler | None = None,
    together: Together = ALONE,
    judge: Judge | None = None,
) -> StepResult:
    """Forward and backward of each micro-batch, joint clipping, one step of the optimizer.

    ``clock(phase)`` is entered around ``forward``, ``backward``, ``clip`` and ``optimizer``; ``seeds`` has one
    seed per micro-batch for dropout (None leaves the generator alone); ``scaler`` belongs to fp16; ``together`` is what
    other ranks have to do with it, and the loss is that of this rank's tokens. ``judge`` is asked before the update
    whether it is left out, by loss and gradient norm (None where there is none or a scaler saw them overflow). Nothing
    here waits for the device, but for a judge that does and a scaler's look for overflow, and nothing keeps logits or a
    graph beyond its own backward.
    """
    clock = clock or (lambda phase: nullcontext())
    with ExitStack() as stack:
        stack.enter_context(together.around())
        with clock("optimizer"):
            optimizer.zero_grad(set_to_none=True)
            if recipe.precision.weight_caching:
                stack.enter_context(weights_cast_once(model))
        if together.pipeline is not None:
            loss = together.pipeline.step(batches, clock)
        else:
            loss = _micro_batches(model, batches, recipe, clock, seeds, scaler, together)
        together.finish_gradients(model, clock)
    if isinstance(optimizer, MasterWeights) or scaler is not None:
        with clock("optimizer"):
            if isinstance(optimizer, MasterWeights):
                optimizer.take_gradients()
            if scaler is not None:
                scaler.unscale(parameter.grad for parameter in stepped(model, optimizer) if parameter.grad is not None)
    grad_norm: Tensor | None = None
    if recipe.grad_clip is not None:
        with clock("clip"):
            grad_norm = together.clip(stepped(model, optimizer), recipe.grad_clip)
    overflowed = False
    if scaler is not None:
        with clock("optimizer"):
            overflowed = scaler.overflowed()
    left_out = False if judge is None else judge(loss, None if overflowed else grad_norm)
    skipped = overflowed or left_out is True
    with clock("optimizer"):
        if isinstance(left_out, Tensor):
            # The kernel leaves weights and state as they are where `left_out` is 1, as for a loss scaler.
            optimizer.found_inf = left_out  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        elif not skipped:
            optimizer.step()
        if scaler is not None:
            scaler.adapt()
    return StepResult(loss, grad_norm, skipped)


def _micro_batches(
    model: nn.Module,
    batches: Sequence[Batch],
    recipe: Recipe,
    clock: Clock,
    seeds: Sequence[int] | None,
    scaler: LossScaler | None,
    together: Together,
) -> Tensor:
    """Forward and backward of one micro-batch after the other; their mean loss."""
    # `loss` starts as None and not as a tensor of zeros: the first addition would be an operation more in each step,
    # which the account does not have.
    loss: Tensor | None = None
    for index, batch in enumerate(batches):
        if seeds is not None:
            torch.manual_seed(seeds[index])
        with together.micro_batch(last=index == len(batches) - 1):
            part = _forward_backward(together.called(model), batch, len(batches), recipe, clock, scaler)
        loss = part if loss is None else loss + part
        del part  # in the last round as in all others, which a trace relies on
    assert loss is not None, "a step needs at least one micro-batch"
    return loss


def _forward_backward(
    model: nn.Module, batch: Batch, n_batches: int, recipe: Recipe, clock: Clock, scaler: LossScaler | None
) -> Tensor:
    """One micro-batch: gradients added to the parameters', its share of the mean loss returned without a graph."""
    with clock("forward"):
        scale = None if scaler is None else scaler.scale
        with autocast(recipe.precision, batch[0].device), weighing(scale, n_batches):
            loss = loss_of_batch(model, batch, recipe)
            if n_batches > 1:
                loss = loss / n_batches
        scaled = loss if scaler is None else scaler.scaled(loss)
    with clock("backward"):
        scaled.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


# Not `hash`: Python salts that of a text, so it differs from process to process.
def derive(seed: int, use: str, *indices: int) -> int:
    """A seed of 63 bits for one use of a run's seed, by hashing (BLAKE2b) the use and its indices.

    >>> derive(0, "init") == derive(0, "init"), derive(0, "dropout") == derive(0, "init")
    (True, False)
    """
    text = ":".join([str(seed), use, *map(str, indices)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def dropout_seeds(seed: int, step: int, n_batches: int) -> list[int]:
    """One seed per micro-batch of a global batch: dropout needs no generator state in a checkpoint."""
    return [derive(seed, "dropout", step, index) for index in range(n_batches)]
