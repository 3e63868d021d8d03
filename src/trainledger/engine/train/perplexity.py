"""What a model makes of documents: the loss of each, in windows as long as its context.

Shapes: B windows at once, T tokens of the longest of them, V vocab_size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainledger.engine.data.held_out import TokenizedDocument
from trainledger.engine.data.losses import DocumentLoss
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.units import MIB

LOGITS_NBYTES = 256 * MIB  # of the windows that go through the model at once
_IGNORED = -100  # cross entropy's default for targets that do not count
_READ_AHEAD = 64  # windows among which those of like length are put together


def document_losses(
    model: Transformer,
    documents: Iterable[TokenizedDocument],
    *,
    end_id: int,
    context: int,
    stride: int,
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
    by_length = sorted(windows, key=lambda each: len(each.inputs))
    for at in range(0, len(by_length), rows_at_once):
        some = by_length[at : at + rows_at_once]
        longest = len(some[-1].inputs)
        # A causal model's rows do not see what is filled up behind them.
        inputs_BT = torch.zeros(len(some), longest, dtype=torch.int64)
        targets_BT = torch.full((len(some), longest), _IGNORED)
        for row, each in enumerate(some):
            inputs_BT[row, : len(each.inputs)] = torch.from_numpy(each.inputs)
            targets_BT[row, each.first : len(each.targets)] = torch.from_numpy(each.targets[each.first :])
        logits_BTV = model(inputs_BT.to(device))
        for each, nats in zip(some, _sums(logits_BTV, targets_BT.to(device)), strict=True):
            each.total.nats += nats
            each.total.missing -= 1


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
