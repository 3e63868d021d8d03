"""Traces a training step of any module: the user's own code runs on fake tensors and gives a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.ledger.ledger import Ledger
from trainledger.trace.compiled import captured, compiled_runs_eagerly, is_compiled, no_word_of_hooks
from trainledger.trace.fakes.kernels import kernels_of
from trainledger.trace.fakes.results import results_of
from trainledger.trace.fakes.rules import Counts
from trainledger.trace.fakes.stored import without_values
from trainledger.trace.fakes.tensors import Gradients, fake_batch, make_states, mode_of, on_fake
from trainledger.trace.fakes.values import AssumedValues, ZeroWhereUnknown, numbers_shown
from trainledger.trace.loss import closure_note, evaluates, loss_named, loss_of, needs_closure, optimizers_in
from trainledger.trace.patches import Kwargs
from trainledger.trace.recorder.attribution import threads_follow
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import Lines, ends_here, quiet_fake_errors, why_it_stopped
from trainledger.trace.recorder.storages import tensors_in
from trainledger.trace.repeat_blocks import BLOCKS, LEAST, LEAST_ASKED, traced_once

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
MOST_ASSUMED = 10_000  # of one line: a loop that waits for a value would never end


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Callable[..., Tensor] | str | None = None,
    label: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    first_step: bool = False,
    autocast: torch.dtype | None = None,
    grad_accum: int = 1,
    backward: bool = True,
    kernels: str = "cpu",
    blocks: str = "auto",
    assume: Sequence[str] = (),
) -> Ledger:
    """The ledger of one training step of ``model``; nothing is computed and nothing changes.

    ``model(**batch)`` is called for a dict, ``model(*batch)`` for a tuple, ``model(batch)`` for a tensor. ``loss``
    makes a scalar of the output, and of the ``label`` where one is given, which is then part of the batch; a name, as
    "mean", "cross_entropy" or ".loss", is one of `loss.loss_named`, as the command's ``--loss``; without it
    the output's own ``loss`` is used, or a scalar output. The parameters may be real, on the meta device, or fake.
    With an optimizer a steady-state step is traced (its state exists before), with ``first_step`` the one that creates
    it; one that takes a closure evaluates the model by it, as often as ``notes`` say (`optimizers`). ``grad_accum``
    micro-batches of this batch make the step; without ``backward`` it is a forward alone. ``kernels`` are those
    of a CPU or, where they differ in what they keep or allocate, of "cuda", "sm70", "sm90", "sm100" or "other".

    ``blocks`` says whether ``all`` identical blocks of a stack are traced or a few of them ``once``, which are then
    multiplied where that is proved to be the same (`blocks.traced_once`); ``auto`` does so for eight and more. The
    ledger's notes say so, and such a ledger has loops and no ``tensors``. Micro-batches are multiplied likewise.

    Where the code needs values that fake tensors lack, the ledger ends there and ``partial`` says why; a number that is
    read off a tensor is assumed to be 0, and ``notes`` say so. How many elements ``nonzero`` and masks find is the most
    that it can be, or what ``assume`` says ("nonzero=1/8", `Counts`). Raises ValueError where no scalar loss can be
    had. Left out: what dispatch does not show (scratch inside a library's kernel, custom C++ memory).
    """

    _check(model, optimizer)
    if not isinstance(grad_accum, int) or grad_accum < 1:
        raise ValueError(f"grad_accum must be a whole number from 1, not {grad_accum!r}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast must be torch.bfloat16 or torch.float16, not {autocast!r}")
    if loss is not None and not callable(loss) and not isinstance(loss, str):
        raise ValueError(f"loss must be a function of the output, such as lambda output: output.mean(), not {loss!r}")
    function = loss_named(loss, label, of="") if isinstance(loss, str) else loss
    if blocks not in BLOCKS:
        raise ValueError(f"blocks must be one of {', '.join(BLOCKS)}, not {blocks!r}")

    def forward(inputs: _Inputs) -> Any:
        with torch.autocast("cpu", dtype=autocast) if autocast is not None else nullcontext():
            value = call(model, inputs.batch)
            return loss_of(value, function, inputs.label) if backward else value

    takes_closure = optimizer is not None and backward and needs_closure(optimizer)

    def passes(inputs: _Inputs, recorder: Recorder, rounds: int) -> Any:
        value = None
        for _ in range(rounds):
            del value
            with recorder.phase("forward"):
                value = forward(inputs)
            if backward:
                with recorder.phase("backward"):
                    value.backward()
        return value if takes_closure else None

    def once_through(inputs: _Inputs) -> None:
        value = forward(inputs)
        if backward:
            value.backward()

    def step(inputs: _Inputs, recorder: Recorder, rounds: int) -> None:
        if optimizer is None or not backward:
            passes(inputs, recorder, rounds)
        elif not takes_closure:
            passes(inputs, recorder, rounds)
            with recorder.phase("optimizer"):
                optimizer.step()
        else:
            evaluations = 0

            def closure() -> Any:
                nonlocal evaluations
                evaluations += 1
                model.zero_grad(set_to_none=True)
                return passes(inputs, recorder, rounds)

            try:
                with recorder.phase("optimizer"):
                    optimizer.step(evaluates(closure))
            finally:
                recorder.notes.append(closure_note(optimizer, evaluations))

    given = _Inputs(batch, () if label is None else (label,))
    one_by_one = blocks == "all" or takes_closure or is_compiled(model)
    options: Kwargs = {"first_step": first_step, "kernels": kernels, "rounds": grad_accum, "assume": assume}
    options |= {
        "once_through": None if one_by_one else once_through,
        "least": LEAST if blocks == "auto" else LEAST_ASKED,
    }
    return _record(model, given, step, optimizers_in(optimizer), **options)


def trace_step(
    step: Callable[..., object],
    models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    batch: Batch = (),
    *,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    first_step: bool = False,
    kernels: str = "cpu",
    assume: Sequence[str] = (),
) -> Ledger:
    """The ledger of a step that is a function of the user's own: several models, optimizers, losses as it likes.

    ``step`` is called with the batch as a model would be and does everything itself: forward, backward, the
    optimizers' steps. Forward and backward are distinguished by whether autograd runs an operation, the optimizers by
    their hooks. The rest is as in `trace`. ``kept_nbytes`` is that of all backward passes of the step.
    """
    if isinstance(models, nn.Module):
        root = models
    elif isinstance(models, Mapping):
        root = nn.ModuleDict(dict(models))
    else:
        root = nn.ModuleList(models)
    several = optimizers_in(optimizers)

    def run(inputs: _Inputs, recorder: Recorder, rounds: int) -> None:
        with phases_of(several, recorder):
            call(step, inputs.batch)

    given = _Inputs(batch)
    return _record(root, given, run, several, first_step=first_step, kernels=kernels, find_phases=True, assume=assume)


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a step: a batch, and no label or one."""

    batch: Any
    label: tuple[Any, ...] = ()


def _record(
    model: nn.Module,
    given: _Inputs,
    step: Callable[[_Inputs, Recorder, int], None],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    first_step: bool,
    kernels: str,
    find_phases: bool = False,
    rounds: int = 1,
    once_through: Callable[[_Inputs], None] | None = None,
    least: int = LEAST,
    assume: Sequence[str] = (),
) -> Ledger:
    """Record a step on fake tensors; with a forward and backward of the model, identical blocks may be multiplied."""
    mode = mode_of(model) or FakeTensorMode()
    assumed = AssumedValues(MOST_ASSUMED)
    counts = Counts(assume, assumed.line)
    with quiet_fake_errors(), mode, on_fake(model, optimizers, mode), kernels_of(kernels):
        inputs = _Inputs(*fake_batch((given.batch, given.label), mode))
        fakes = tensors_in([inputs.batch, inputs.label])
        stateful = [parameter for optimizer in optimizers for parameter, state in optimizer.state.items() if state]

        def cleared() -> None:
            model.zero_grad(set_to_none=True)
            for fake in fakes:
                fake.grad = None

        def run(rounds: int, *, tensors: bool = False) -> Ledger:
            assumed.clear()
            counts.clear()
            gradients = Gradients(model, optimizers, stateful)
            stateless = "" if first_step else _states_made(model, optimizers)
            cleared()
            recorder = Recorder(
                model, optimizers, lines=Lines(), find_phases=find_phases, kernels=kernels, sizes=counts.sizes
            )
            recorder.resident(fakes, "batch")
            recorder.storages.replaced_by_fake(tensors_in([given.batch, given.label]))
            with (
                ZeroWhereUnknown(lambda: recorder.phases.current == "optimizer", assumed.add, results_of(kernels)),
                recorder,
                threads_follow(recorder.attribution),
                without_values(recorder.notes.append),
                numbers_shown(),
                counts.followed(given.batch),
                recorder.random_states(),
                gradients.followed(),
                recorder.as_far_as_it_goes(),
                no_word_of_hooks(),
                captured(model, recorder, mode),
            ):
                step(inputs, recorder, rounds)
            unused = ""
            if not recorder.partial:
                recorder.storages.never_there(gradients.unused_states())
                unused = gradients.note()
            recorder.notes += filter(None, (stateless, *assumed.notes(), *counts.notes(), unused))
            tokens = next((tensor.numel() for tensor in fakes if not tensor.is_floating_point()), 0)
            ledger = recorder.ledger(tokens=tokens, writer="trace", tensors=tensors)
            ledger = replace(ledger, micro_batches=1) if find_phases else ledger
            model.zero_grad(set_to_none=True)
            return ledger

        def probed() -> None:
            assert once_through is not None
            known = ZeroWhereUnknown(lambda: False, assumed.add, results_of(kernels))
            cleared()
            with known, counts.followed(given.batch):
                once_through(inputs)
            cleared()

        once = "" if once_through is None else traced_once(model, optimizers, run, probed, rounds=rounds, least=least)
        if isinstance(once, Ledger):
            return once
        ledger = run(rounds, tensors=True)
        return replace(ledger, notes=(*ledger.notes, once)) if once else ledger


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ValueError for a model and an optimizer that no step can have."""
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}; make one" if isinstance(model, type) else repr(model)[:60]
        raise ValueError(f"model must be an nn.Module, not {found}")
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch optimizer of the model's parameters, not {optimizer!r}")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
        raise ValueError("the optimizer has none of the model's parameters")


def _states_made(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Make the optimizers' states before the step; the sentence why not, where an optimizer cannot."""
    try:
        if optimizers:
            with ZeroWhereUnknown(results=results_of("cpu")), compiled_runs_eagerly():
                make_states(model, *optimizers)
    except Exception as error:
        why = why_it_stopped(error, "its step on zero gradients")
        return f"the optimizer's state could not be made before, so this is a first step: {why}"
    return ""


for _function in (trace, trace_step, _record):
    ends_here(_function)


@contextmanager
def phases_of(optimizers: Sequence[torch.optim.Optimizer], recorder: Recorder) -> Iterator[None]:
    """Inside, the optimizers' own hooks begin and end the recorder's phase ``optimizer``."""
    entered: list[AbstractContextManager[None]] = []
    evaluations = [0]

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        entered.append(recorder.phase("optimizer"))
        entered[-1].__enter__()
        evaluations[0] = 0
        return (args[0], *map(outside, args[1:])), {name: outside(value) for name, value in kwargs.items()}

    def outside(given: Any) -> Any:
        # A closure that an optimizer calls is not part of its own work.
        if not callable(given):
            return given

        def closure() -> Any:
            evaluations[0] += 1
            with recorder.phase("other"):
                return given()

        return evaluates(closure)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        entered.pop().__exit__(None, None, None)
        if evaluations[0] and needs_closure(optimizer):
            recorder.notes.append(closure_note(optimizer, evaluations[0]))

    hooks = [each.register_step_pre_hook(before) for each in optimizers]
    hooks += [each.register_step_post_hook(after) for each in optimizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def call(function: Callable[..., Any], inputs: Any) -> Any:
    """A function of a batch: a dict gives keywords, a tuple positions."""
    if isinstance(inputs, dict):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, (tuple, list)) else function(inputs)
