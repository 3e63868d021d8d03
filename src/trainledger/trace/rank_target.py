"""One rank of a program that a user names (``package.module:program``), under a fake process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainledger.ledger.ledger import Ledger
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.trace.distributed import trace_rank
from trainledger.trace.inputs import Inputs
from trainledger.trace.optimizers import check_optimizer, optimizer_named
from trainledger.trace.target import as_wrong_input, loss_named

_A_LOSS = "--loss mean, --loss package.module:function, or a loss function that the program returns"


def trace_rank_target(
    program: Any,
    *,
    world_size: int,
    rank: int = 0,
    inputs: Inputs = (),
    step: str | None = None,
    loss: str | Callable[..., Tensor] | None = None,
    label: Tensor | None = None,
    field: str = "RUN",
    **options: Any,
) -> Ledger:
    """The ledger of one rank's step (`trace_rank`), with words for what the program does not return.

    ``inputs``, ``loss`` and ``step``, the name of an optimizer, are as in `target.trace_target`; the other options
    those of `trace_rank`. Raises InvalidInput.
    """
    if label is not None:
        rule = "is not taken with a world: let the program return a loss that holds its labels"
        raise InvalidInput([Problem("--label", str(tuple(label.shape)), rule)])
    if step == "forward":
        rule = "a rank of a world takes a whole step"
        raise InvalidInput([Problem("--step", step, rule, "backward, or an optimizer such as adamw")])
    if not callable(program):
        raise InvalidInput(
            [Problem(field, type(program).__name__, "must be a function that is called without arguments")]
        )
    optimizer = None
    if step not in (None, "", "backward"):
        name = step
        check_optimizer(name)

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return optimizer_named(name, parameters)

    with as_wrong_input(field, "the program", _A_LOSS):
        return trace_rank(
            program, world_size=world_size, rank=rank, batch=inputs or None, loss=loss_named(loss, None),
            optimizer=optimizer, **options,
        )  # fmt: skip
