"""Optimizers of torch by name, those of a step as a list, and those whose step evaluates the model by a closure.

Of torch's own, L-BFGS evaluates the model itself as often as values ask for. Fake tensors have no values, so its
decisions are assumed to go as in a descent that continues: every evaluation gives a smaller loss, curvature is
positive, the first step length of each line search is accepted, and no tolerance is reached. That is the most
evaluations that ``max_iter`` and ``max_eval`` allow without longer searches.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.trace.recorder.source_lines import OURS, TORCH, callers

_LATER = "Adagrad RMSprop Adadelta Adafactor NAdam RAdam Adamax ASGD Rprop LBFGS"
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{each.lower(): (each, {}) for each in ("AdamW", "Adam", "SGD")},
    "momentum": ("SGD", {"momentum": 0.9}),
    **{each.lower(): (each, {}) for each in _LATER.split()},
}
WAYS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
aten = torch.ops.aten
_LBFGS = os.path.join(TORCH, "optim", "lbfgs.py")
_MODELS = tuple(os.path.join(TORCH, each) + os.sep for each in ("nn", "autograd"))
_LIMITS, _FEW = ("max_iter", "max_eval"), 2  # iterations that make every kind of state
_EVALUATES: set[Any] = set()  # code of closures: what they call is the model's
_falling = count(0, -1)


def check_optimizer(name: str) -> tuple[str, dict[str, Any]]:
    """The class of an optimizer and its options by its name; raises InvalidInput where it is none."""
    kind, _, way = name.partition("-")
    if kind not in OPTIMIZERS or (way and way not in WAYS):
        known = ["forward", "backward", *OPTIMIZERS, *(f"{each}-{how}" for each in OPTIMIZERS for how in WAYS)]
        rule = f"must be forward, backward or an optimizer ({', '.join(OPTIMIZERS)}), with -fused, -foreach or -loop"
        raise InvalidInput([Problem("--step", name, rule, nearest_text(name, known))])
    class_name, options = OPTIMIZERS[kind]
    return class_name, {**options, **WAYS.get(way, {})}


def optimizer_named(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the trained parameters by name, with its implementation after a dash (``adamw-fused``).

    Without one it is torch's default for the device. Raises InvalidInput.
    """
    class_name, options = check_optimizer(name)
    trained = [each for each in parameters if each.requires_grad]
    if not trained:
        raise InvalidInput([Problem("--step", name, "the model has no parameter to train", "forward")])
    try:
        made: torch.optim.Optimizer = getattr(torch.optim, class_name)(trained, **options)
    except (TypeError, RuntimeError, ValueError) as error:
        raise InvalidInput([Problem("--step", name, f"torch refuses it: {str(error).splitlines()[0]}")]) from error
    return made


def optimizers_in(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Sequence[torch.optim.Optimizer]:
    """The optimizers of a step as a list: none, one, or several."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def that_hold_state(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of a step whose state it is: of one that holds others (torchtitan's container) those."""
    for each in optimizers_in(optimizer):
        yield from getattr(each, "optimizers", (each,))


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step takes a closure and cannot go without."""
    named = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return bool(named) and named[0].name == "closure" and named[0].default is inspect.Parameter.empty


def evaluates(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a closure: an optimizer calls it, but decides nothing in it."""
    _EVALUATES.add(closure.__code__)
    return closure


def closure_note(optimizer: torch.optim.Optimizer, evaluations: int) -> str:
    """The note that a step of this optimizer has called its closure so often."""
    name = type(optimizer).__name__
    first = f"{name} evaluates the model as often as values ask for: {evaluations} evaluations are in this step"
    if not isinstance(optimizer, torch.optim.LBFGS):
        return first
    pairs = max((len(each.get("old_dirs") or ()) for each in optimizer.state.values()), default=0)
    return (
        f"{first}, as many as max_iter and max_eval allow where each line search takes its first step; its history "
        f"ends with {pairs} pairs of vectors as long as all parameters"
    )


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that needs a closure have its state; of L-BFGS a full history."""
    if any(optimizer.state.values()):
        return
    groups = optimizer.param_groups
    asked = [{name: group[name] for name in _LIMITS if name in group} for group in groups]
    for group, limits in zip(groups, asked, strict=True):
        group.update(dict.fromkeys(limits, _FEW + 1))
    try:
        optimizer.step(evaluates(lambda: float(next(_falling))))
    finally:
        for group, limits in zip(groups, asked, strict=True):
            group.update(limits)
    if isinstance(optimizer, torch.optim.LBFGS):
        for state in optimizer.state.values():
            for name in ("old_dirs", "old_stps", "ro"):
                history = state.get(name) or []
                while history and len(history) < groups[0]["history_size"]:
                    history.append(torch.empty_like(history[-1]))


def number_for_lbfgs() -> float | None:
    """What L-BFGS reads where it runs now: each loss smaller than the one before; None anywhere else."""
    return float(next(_falling)) if _lbfgs_asks() else None


def _compared(answer: Callable[[tuple[Any, ...]], bool]) -> Callable[[tuple[Any, ...], Any], Any]:
    def known(args: tuple[Any, ...], out: Any) -> Any:
        if not isinstance(out, Tensor) or out.dim() or not _lbfgs_asks():
            return out
        return torch.tensor(answer(args))

    return known


# What L-BFGS asks by comparing single numbers. ``le`` of two tensors is that a search may end.
DECISIONS: dict[OpOverload, Callable[[tuple[Any, ...], Any], Any]] = {
    # ``ys > 1e-10``: the curvature is positive. ``gtd > -tolerance_change``: it does go down.
    aten.gt.Scalar: _compared(lambda args: bool(args[1] > 0)),
    aten.le.Tensor: _compared(lambda args: True),
    **dict.fromkeys((aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar), _compared(lambda args: False)),
    **dict.fromkeys((aten.gt.Tensor, aten.lt.Tensor, aten.ge.Tensor), _compared(lambda args: False)),
}


def _lbfgs_asks() -> bool:
    """Whether what runs now was called by torch's L-BFGS, and not by the closure that it calls."""
    for each in callers():
        file = each.f_code.co_filename
        if file == _LBFGS:
            return True
        if each.f_code in _EVALUATES or file.startswith(_MODELS) or not file.startswith((TORCH, OURS)):
            return False
    return False
