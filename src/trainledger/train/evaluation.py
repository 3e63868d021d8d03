"""The mean loss on held-out text, taken without leaving a trace in the training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trainledger.nn.loss import next_token_loss
from trainledger.spec.precision import Precision
from trainledger.train.precision import autocast
from trainledger.train.step import Batch


def evaluate(model: nn.Module, batches: Iterable[Batch], precision: Precision) -> float:
    """Mean loss in nats per token over all batches, weighted by their tokens; dropout off, no gradients.

    The sum is kept in fp64, so that it does not depend on how the sequences are cut into batches beyond rounding.
    """
    was_training = model.training
    model.eval()
    total, n_tokens = 0.0, 0
    try:
        with torch.no_grad():
            for inputs_BT, targets_BT in batches:
                with autocast(precision, inputs_BT.device):
                    loss = next_token_loss(model(inputs_BT), targets_BT)
                total += loss.item() * targets_BT.numel()
                n_tokens += targets_BT.numel()
    finally:
        model.train(was_training)
    assert n_tokens > 0, "an evaluation needs at least one held-out sequence"
    return total / n_tokens
