"""Batches as a rank reads them, the loss on held-out text, and the losses of documents.

Shapes: B sequences or windows at once, T tokens (of the longest window), V vocab_size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainledger.engine.data.losses import DocumentLoss, TokenizedDocument
from trainledger.engine.nn.objective import loss_of_batch
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.observer import TrainingState
from trainledger.engine.train.precision import autocast
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.step import ALONE, Batch, Feed, Together
from trainledger.spec.objective import NextToken
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.units import MIB


class Reading:
    """Reads batches for one rank; ``failed`` once it could not, until `refuse` has told all.

    What one rank cannot read ends all of them with its exit code. The others are in a step already that it has a part
    in: it takes that step with a stand-in, and says what went wrong where ranks next agree, before any update.
    """

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self._run, self._ranks = run, ranks
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def step(self, batches: Iterator[Sequence[Batch]]) -> Sequence[Batch]:
        """The next step's micro-batches, or others of their shapes; one rank alone raises what went wrong."""
        try:
            return next(batches)
        except Exception as error:
            self._keep(error)
            return [self._stand_in(self._run.device_batch)] * self._run.grad_accum

    def held_out(self, batches: Iterable[Batch], sequences: int) -> Iterator[Batch]:
        """Batches of so many sequences, or others of their shapes from where they cannot be read."""
        left = sequences
        try:
            for batch in batches:
                left -= len(batch[0])
                yield batch
        except Exception as error:
            self._keep(error)
            while left > 0:
                rows = min(self._run.device_batch, left)
                left -= rows
                yield self._stand_in(rows)

    def refuse(self) -> None:
        """Raise on all ranks where one has failed: there its own error, elsewhere `EndedElsewhere`.

        All ranks must call this at the same point.
        """

        def own() -> None:
            if self._error is not None:
                raise self._error

        self._ranks.together(own)

    def _keep(self, error: Exception) -> None:
        if self._ranks.size == 1:
            raise error
        self._error = error

    def _stand_in(self, rows: int) -> Batch:
        ids_BT = torch.zeros(rows, self._run.recipe.seq_len, dtype=torch.int64, device=self._ranks.device)
        return ids_BT, ids_BT


def losses_by_source(state: TrainingState, feed: Feed, reading: Reading, ranks: Ranks) -> dict[str, float]:
    """The mean loss on the held-out text of each source, by name; raises on all ranks what one could not read."""
    found = {
        source: evaluate(
            state.model,
            reading.held_out(feed.validation(source), sequences),
            state.run.recipe,
            together=state.together,
            ranks=ranks,
            part=state.data_rank,
            parts=state.data_ranks,
        )
        for source, sequences in feed.validation_sequences.items()
    }
    reading.refuse()
    return found


# An evaluation that took all logits at once ended a run under a limit that a step with a loss in chunks fitted in; as
# it is it needs 0.43 to 0.92 of the step's account.
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    recipe: Recipe,
    *,
    together: Together = ALONE,
    ranks: Ranks | None = None,
    part: int = 0,
    parts: int = 1,
) -> float:
    """Mean loss in nats per token over all batches, weighted by their tokens; dropout off, no gradients.

    The loss of a batch is taken as in a step, so that nothing here needs more memory than a step's forward does.
    The ``parts`` data ranks take batches in turn, of which this process is ``part``. Sums are kept in fp64, so that the
    loss does not depend on how the sequences are cut into batches, or on how many ranks there are, beyond rounding.
    """
    was_training = model.training
    model.eval()
    total, n_tokens = 0.0, 0
    if recipe.objective.kind == "distillation":  # a student is compared with other models by the loss of the next token
        recipe = replace(recipe, objective=NextToken())
    try:
        with torch.no_grad(), together.around():
            for batch, counts in _in_turn(batches, parts, part):
                inputs_BT, targets_BT, *_ = own = together.own(batch)
                loss: Tensor | None
                if together.pipeline is not None:
                    loss = together.pipeline.evaluate(inputs_BT, targets_BT)
                else:
                    with autocast(recipe.precision, inputs_BT.device):
                        loss = loss_of_batch(model, own, recipe)
                if counts and loss is not None:
                    total += loss.item() * targets_BT.numel()
                    n_tokens += targets_BT.numel()
    finally:
        model.train(was_training)
    total, n_all = (ranks or Ranks()).summed(total, n_tokens)
    assert n_all > 0, "an evaluation needs at least one held-out sequence"
    return total / n_all


def _in_turn(batches: Iterable[Batch], parts: int, part: int) -> Iterator[tuple[Batch, bool]]:
    """This part's batches, and whether each counts: all parts run equally many, the last one perhaps another's."""
    remaining = iter(batches)
    while round_of_all := list(islice(remaining, parts)):
        counts = part < len(round_of_all)
        yield round_of_all[part if counts else 0], counts


LOGITS_NBYTES = 256 * MIB  # of the windows that go through the model at once
_IGNORED = -100  # cross entropy's default for targets that do not count
_READ_AHEAD = 64  # windows among which those of like length are put together


def document_losses(
    model: Transformer, documents: Iterable[TokenizedDocument], *, end_id: int, context: int, stride: int
) -> Iterator[DocumentLoss]:
    """The losses of documents, in their order.

    The first token is predicted from an end token, which stands before every document in training; the end token after
    it is predicted too. A document longer than ``context`` is cut into windows that each predict the next ``stride``
    tokens; what is left of the context are tokens before them (Hugging Face, "Perplexity of fixed-length models").
    """
    rows_at_once = max(1, LOGITS_NBYTES // (4 * context * model.spec.vocab_size))
    was_training = model.training
    model.eval()
    try:
        waiting: deque[_Sum] = deque()
        windows: list[_Window] = []
        for document in documents:
            found = list(_windows(document, end_id, context, stride))
            waiting.append(found[0].total)
            windows += found
            if len(windows) >= _READ_AHEAD:
                _fill(model, windows, rows_at_once)
                windows = []
                yield from _finished(waiting)
        _fill(model, windows, rows_at_once)
        yield from _finished(waiting)
    finally:
        model.train(was_training)


class _Sum:
    """The loss of a document as its windows come in."""

    def __init__(self, document: TokenizedDocument, windows: int) -> None:
        self.document, self.missing = document, windows
        self.nats = 0.0


@dataclass(frozen=True)
class _Window:
    """Inputs and, of the same length, targets of which those before ``first`` do not count."""

    total: _Sum
    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    first: int


def _windows(document: TokenizedDocument, end_id: int, context: int, stride: int) -> Iterator[_Window]:
    ids = np.concatenate([[end_id], document.ids, [end_id]])
    predicted = len(ids) - 1
    begins = [0, *range(context, predicted, stride)]  # the first target of each window
    total = _Sum(document, len(begins))
    for begin, end in zip(begins, [*begins[1:], predicted], strict=True):
        start = max(0, end - context) if begin else 0
        yield _Window(total, ids[start:end], ids[start + 1 : end + 1], begin - start)


@torch.no_grad()
def _fill(model: Transformer, windows: list[_Window], rows_at_once: int) -> None:
    device = model.embed_tokens.weight.device
    by_length = sorted(windows, key=lambda window: len(window.inputs))
    for at in range(0, len(by_length), rows_at_once):
        some = by_length[at : at + rows_at_once]
        longest = len(some[-1].inputs)
        # A causal model's rows do not see what is filled up behind them.
        inputs_BT = torch.zeros(len(some), longest, dtype=torch.int64)
        targets_BT = torch.full((len(some), longest), _IGNORED)
        for row, window in enumerate(some):
            inputs_BT[row, : len(window.inputs)] = torch.from_numpy(window.inputs)
            targets_BT[row, window.first : len(window.targets)] = torch.from_numpy(window.targets[window.first :])
        logits_BTV = model(inputs_BT.to(device))
        for window, nats in zip(some, _sums(logits_BTV, targets_BT.to(device)), strict=True):
            window.total.nats += nats
            window.total.missing -= 1


def _sums(logits_BTV: Tensor, targets_BT: Tensor) -> list[float]:
    """Of each row the sum of its losses, added in fp64."""
    losses_BT = torch.nn.functional.cross_entropy(
        logits_BTV.float().transpose(1, 2), targets_BT, reduction="none", ignore_index=_IGNORED
    )
    sums: list[float] = losses_BT.cpu().double().sum(dim=1).tolist()
    return sums


def _finished(waiting: deque[_Sum]) -> Iterator[DocumentLoss]:
    while waiting and not waiting[0].missing:
        done = waiting.popleft()
        document = done.document
        yield DocumentLoss(document.place, len(document.ids) + 1, document.text_nbytes, done.nats, document.source)
