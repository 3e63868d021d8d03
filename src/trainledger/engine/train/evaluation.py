"""The loss on held-out text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from trainledger.engine.nn.loss import run_loss
from trainledger.engine.train.observer import TrainingState
from trainledger.engine.train.precision import autocast
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.reading import Reading
from trainledger.engine.train.step import ALONE, Batch, Feed, Together
from trainledger.spec.recipe import Recipe


def losses_by_source(state: TrainingState, feed: Feed, reading: Reading, ranks: Ranks) -> dict[str, float]:
    """The mean loss on the held-out text of each source, by name; raises on all ranks what one could not read."""
    found = {
        source: evaluate(
            state.model, reading.held_out(feed.validation(source), sequences), state.run.recipe,
            together=state.together, ranks=ranks, part=state.data_rank, parts=state.data_ranks,
        )
        for source, sequences in feed.validation_sequences.items()
    }  # fmt: skip
    reading.refuse()
    return found


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
    try:
        with torch.no_grad(), together.around():
            for batch, counts in _in_turn(batches, parts, part):
                inputs_BT, targets_BT = together.own(batch)
                loss: Tensor | None
                if together.pipeline is not None:
                    loss = together.pipeline.evaluate(inputs_BT, targets_BT)
                else:
                    with autocast(recipe.precision, inputs_BT.device):
                        loss = run_loss(model, inputs_BT, targets_BT, recipe)
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
