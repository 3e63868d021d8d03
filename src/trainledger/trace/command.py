"""A step described in words, as on a command line or in a lock: what it names is found, built and traced."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainledger.ledger.ledger import Ledger
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.trace.distributed import trace_rank
from trainledger.trace.hugging_face import completed, model_of_config
from trainledger.trace.inputs import Inputs, autocast_dtype_named, floating_dtype_named, input_of, inputs_of
from trainledger.trace.loss import loss_named
from trainledger.trace.optimizers import check_optimizer, optimizer_named
from trainledger.trace.script import program_of
from trainledger.trace.target import as_wrong_input, load_target, trace_target

_A_LOSS = "--loss mean, --loss package.module:function, or a loss function that the program returns"


def trace_named(
    module: str = "",
    *,
    hf: str | None = None,
    input: Sequence[str] = (),
    label: str | None = None,
    loss: str | None = None,
    step: str | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    kernels: str = "cpu",
    checkpointing: Sequence[str] = (),
    grad_accum: int = 1,
    first_step: bool = False,
    assume: Sequence[str] = (),
    world_size: int | None = None,
    rank: int = 0,
    args: str = "",
    blocks: str = "auto",
    field: str = "RUN",
) -> tuple[Ledger, str]:
    """The ledger of a step, and what to call it.

    It is that of ``module`` (``package.module:build``) or of ``hf``, a config.json of Hugging Face; with a
    ``world_size`` that of one ``rank`` of a program, or of a script that is run with ``args``. The rest is as in
    `target.trace_target`, by name. Of a model of transformers the first input without a name is its main one, and a
    loss of its own gets labels. Raises `InvalidInput`, of what is wrong with ``module`` by the name of ``field``.
    """
    target: Any
    of_label = None if label is None else input_of(label, "--label")[1]
    of_dtype = None if dtype is None else floating_dtype_named(dtype, "--dtype")
    of_autocast = None if autocast is None else autocast_dtype_named(autocast, "--autocast")
    of_loss: str | Callable[..., Tensor] | None = loss
    if loss and ":" in loss:
        found: Any = load_target(loss, "--loss")
        of_loss = found
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the trace is partial", RuntimeWarning)  # the ledger says it
        if world_size is not None:
            _refuse_in_a_world(
                hf=hf, autocast=autocast, dtype=dtype, grad_accum=grad_accum, checkpointing=tuple(checkpointing)
            )
            is_script = module.endswith(".py") and ":" not in module
            target = program_of(module, shlex.split(args)) if is_script else load_target(module, field)
            ledger = trace_rank_target(
                target, world_size=world_size, rank=rank, inputs=inputs_of(input), step=step,
                loss=of_loss, label=of_label, kernels=kernels, first_step=first_step, assume=assume, field=field,
                named=module,
            )  # fmt: skip
            return ledger, f"rank {rank} of {world_size:,} of {module}"
        if args:
            rule = "are those of a script that runs as a rank of a world"
            raise InvalidInput([Problem("--args", args, rule, "--world-size 8")])
        notes: tuple[str, ...] = ()
        if hf is not None:
            target = model = model_of_config(hf, dtype=of_dtype)
            given = inputs_of(input, main=getattr(model, "main_input_name", "input_ids"))
            inputs, title = completed(model, given), f"{type(model).__name__} of {hf}"
            if isinstance(inputs, dict) and "labels" in inputs and "labels" not in given:
                notes += (f"labels of shape {list(inputs['labels'].shape)} are given to it, as it is trained",)
        else:
            target, title, inputs = load_target(module, field), module, inputs_of(input)
        ledger = trace_target(
            target, inputs=inputs, step=step, loss=of_loss, label=of_label, dtype=of_dtype,
            checkpointing=checkpointing, autocast=of_autocast, grad_accum=grad_accum, kernels=kernels,
            first_step=first_step, blocks=blocks, assume=assume, field=field, named=title if hf is None else "",
        )  # fmt: skip
    return replace(ledger, notes=(*notes, *ledger.notes)), title


def _refuse_in_a_world(**asked: object) -> None:
    """Raise InvalidInput for what a program of many ranks says itself."""
    for name, value in asked.items():
        if value not in (None, 1, ()):
            rule = "cannot be given with a world: the program does it itself, as under torchrun"
            raise InvalidInput([Problem("--" + name.replace("_", "-"), value, rule)])


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
    named: str = "",
    **options: Any,
) -> Ledger:
    """The ledger of one rank's step (`trace_rank`), with words for what the program does not return.

    ``inputs``, ``loss`` and ``step``, the name of an optimizer, are as in `target.trace_target`; the other options
    those of `trace_rank`. Raises InvalidInput.
    """
    if label is not None:
        rule = "cannot be given with a world: let the program return a loss that has its labels"
        raise InvalidInput([Problem("--label", str(tuple(label.shape)), rule)])
    if step == "forward":
        rule = "a rank of a world takes a whole step"
        raise InvalidInput([Problem("--step", step, rule, "backward, or an optimizer such as adamw")])
    if not callable(program):
        raise InvalidInput(
            [Problem(field, named or type(program).__name__, "must be a function that is called without arguments")]
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
