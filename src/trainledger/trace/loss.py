"""What a step is made of beside the model, by name: which scalar of the output is the loss, and the optimizers.

Of torch's own optimizers, L-BFGS evaluates the model itself as often as values ask for. Fake tensors have no values, so
its decisions are assumed to go as in a descent that continues: every evaluation gives a smaller loss, curvature is
positive, the first step length of each line search is accepted, and no tolerance is reached. That is the most
evaluations that ``max_iter`` and ``max_eval`` allow without longer searches.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload

from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.trace.patches import Args
from trainledger.trace.recorder.source_lines import OURS, TORCH, callers
from trainledger.trace.recorder.storages import dtype_name

_LONGEST = 6  # parts of an output that a sentence names
_TARGETS = "inputs of which the model makes its loss, such as --input targets=int64[8,2048]"

Loss = Callable[..., Tensor]


class NoScalarLossError(ValueError):
    """What should be the loss is no single number.

    ``sentence`` says so, ``near`` what to say on a command line instead, "" where nothing is known; a scalar of the
    ``output`` is proposed where it has one; ``label`` is a label of its shape, "" where that is not known.
    """

    def __init__(self, sentence: str, output: Any = None, near: str = "") -> None:
        part = next((name for name, each in parts_of(output) if is_scalar(each)), "")
        self.sentence = sentence
        self.near = f"--loss {part}" if part else near
        self.label = _label_of(output)
        python = f"[{part[1:]}]" if isinstance(output, Sequence) else part
        python = f"[{part[1:]!r}]" if isinstance(output, Mapping) else python
        super().__init__(f"{sentence}; give one with loss={f'lambda output: output{python}' if part else ''}")


def _label_of(output: Any) -> str:
    """The labels of an output of classes, [B, C], [B, T, C] or [B, C, H, W]; "" of any other."""
    logits = logits_of(output)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        return ""
    sizes = logits.shape[:-1] if logits.dim() < 4 else (logits.shape[0], *logits.shape[2:])
    return f"int64[{','.join(map(str, sizes))}]"


def loss_of(output: Any, loss: Loss | None = None, label: tuple[Any, ...] = ()) -> Tensor:
    """The loss that a backward begins with: ``loss(output, *label)``, else the output's own ``loss`` or the output.

    Raises `NoScalarLossError` where that is no single number.
    """
    value = own_loss(output) if loss is None else loss(output, *label)
    if is_scalar(value):
        return value
    sentence = f"the loss must be a scalar tensor, not {described(value)}"
    if value is output:
        raise NoScalarLossError(sentence, output)
    raise NoScalarLossError(f"{sentence}, of a model that returned {described(output)}")


def own_loss(output: Any) -> Any:
    """The loss that an output has as its ``loss``, else the output itself."""
    found = None if isinstance(output, Tensor) else _named(output, "loss")
    return output if found is None else found


def _named(output: Any, name: str) -> Any:
    """The key or attribute of an output; None where it has none."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def is_scalar(value: Any) -> bool:
    """Whether a value is a tensor of one number."""
    return isinstance(value, Tensor) and value.numel() == 1


def described(value: Any) -> str:
    """What code returned, in words.

    >>> described((torch.zeros(2, 8), torch.zeros(()))), described({"loss": None}), described(torch.zeros(3))
    ('a tuple of (.0) fp32[2,8], (.1) fp32[]', 'a dict of (.loss) None', 'fp32[3]')
    """
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(map(str, value.shape))}]"
    parts = list(parts_of(value))
    if not parts:
        return "None" if value is None else type(value).__name__
    named = [
        f"({part}) {described(tensor) if tensor is None or isinstance(tensor, Tensor) else type(tensor).__name__}"
        for part, tensor in parts
    ]
    more = ["..."] if len(named) > _LONGEST else []
    return f"a {type(value).__name__} of {', '.join([*named[:_LONGEST], *more])}"


def parts_of(output: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an output by what ``--loss`` calls them: fields and keys (``.loss``), or positions (``.1``)."""
    if isinstance(output, Mapping):
        yield from ((f".{name}", each) for name, each in output.items())
    elif isinstance(output, (tuple, list)):
        yield from ((f".{place}", each) for place, each in enumerate(output))
    elif hasattr(output, "__dict__") and not isinstance(output, (type, Tensor)):
        yield from ((f".{name}", var) for name, var in vars(output).items() if not name.startswith("_"))


def loss_named(loss: str | Loss | None, label: Any, *, of: str = "--") -> Loss | None:
    """A function of what a model returned, and of its label where there is one, by the name of a loss.

    A function is called with exactly what the model returned. ``.loss`` or ``.1`` is a part of it: an attribute, key or
    position. ``mean``, ``sum`` and losses of ``torch.nn.functional`` take its logits (`logits_of`); ``cross_entropy``
    flattens leading dims. None without a name. Raises InvalidInput, with ``of`` before the names of what is wrong.
    """
    if (loss is None and label is None) or callable(loss):
        return loss
    if loss and loss.startswith(".") and label is None:
        return lambda output: _part(output, loss)
    if loss in ("mean", "sum") and label is None:
        reduce = getattr(torch, loss)
        return lambda output: reduce(logits_of(output))
    if loss and loss.startswith("."):
        rule = f"{loss} is a part of what the model returned and takes no label; give the model its targets as an input"
        raise InvalidInput([Problem(f"{of}label", None, rule, "--input targets=int64[8,2048]" if of else None)])
    if loss is None or not hasattr(F, loss):
        losses = [each for each in dir(F) if each.endswith(("loss", "entropy", "entropy_with_logits"))]
        near = nearest_text(loss or "", losses) or "cross_entropy"
        rule = "is no loss of torch.nn.functional, nor mean, sum, or a part of the output such as .loss or .1"
        raise InvalidInput([Problem(f"{of}loss", loss, rule, near)])
    if label is None and not of:
        raise InvalidInput([Problem("label", None, f"{loss} needs one to compare the output with")])
    function = getattr(F, loss)

    def unlabelled(output: Any) -> Tensor:  # whose shape says that of the label
        shape = _label_of(output) if loss == "cross_entropy" else described(logits_of(output))
        raise NoScalarLossError(f"{loss} needs a label to compare the output with", output, f"--label {shape}")

    def compared(output: Any, label: Tensor) -> Tensor:
        x = logits_of(output)
        flat = loss == "cross_entropy" and x.shape[:-1] == label.shape and x.dim() > 2
        value: Tensor = function(x.flatten(0, -2), label.flatten()) if flat else function(x, label)
        return value

    return unlabelled if label is None else compared


def logits_of(output: Any) -> Any:
    """The tensor of an output: itself, its ``logits``, or the first of several."""
    if isinstance(output, Tensor):
        return output
    logits = _named(output, "logits")
    if logits is not None:
        return logits
    return output[0] if isinstance(output, (tuple, list)) and output else output


def _part(output: Any, name: str) -> Any:
    """The part of an output that ``--loss`` names; raises `NoScalarLossError` where that is no scalar."""
    if isinstance(output, (tuple, list)) and name[1:].lstrip("-").isdigit():
        place = int(name[1:])
        found = output[place] if -len(output) <= place < len(output) else None
    else:
        found = _named(output, name[1:])
    if is_scalar(found):
        return found
    sentence = f"{name} is no scalar of what the model returned, {described(output)}"
    raise NoScalarLossError(sentence, output, _TARGETS if found is None else "")


_LATER = "Adagrad RMSprop Adadelta Adafactor NAdam RAdam Adamax ASGD Rprop LBFGS"
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{each.lower(): (each, {}) for each in ("AdamW", "Adam", "SGD")},
    "momentum": ("SGD", {"momentum": 0.9}),
    **{part.lower(): (part, {}) for part in _LATER.split()},
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
        known = [
            "forward",
            "backward",
            *OPTIMIZERS,
            *(f"{optimizer}-{how}" for optimizer in OPTIMIZERS for how in WAYS),
        ]
        rule = f"must be forward, backward or an optimizer ({', '.join(OPTIMIZERS)}), with -fused, -foreach or -loop"
        raise InvalidInput([Problem("--step", name, rule, nearest_text(name, known))])
    class_name, options = OPTIMIZERS[kind]
    return class_name, {**options, **WAYS.get(way, {})}


def optimizer_named(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the trained parameters by name, with its implementation after a dash (``adamw-fused``).

    Without one it is torch's default for the device. Raises InvalidInput.
    """
    class_name, options = check_optimizer(name)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
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


def _compared(answer: Callable[[tuple[Any, ...]], bool]) -> Callable[[Args, Any], Any]:
    def known(args: Args, out: Any) -> Any:
        if not isinstance(out, Tensor) or out.dim() or not _lbfgs_asks():
            return out
        return torch.tensor(answer(args))

    return known


# What L-BFGS asks by comparing single numbers. ``le`` of two tensors is that a search may end.
DECISIONS: dict[OpOverload, Callable[[Args, Any], Any]] = {
    # ``ys > 1e-10``: the curvature is positive. ``gtd > -tolerance_change``: it does go down.
    aten.gt.Scalar: _compared(lambda args: bool(args[1] > 0)),
    aten.le.Tensor: _compared(lambda args: True),
    **dict.fromkeys((aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar), _compared(lambda args: False)),
    **dict.fromkeys((aten.gt.Tensor, aten.lt.Tensor, aten.ge.Tensor), _compared(lambda args: False)),
}


def _lbfgs_asks() -> bool:
    """Whether what runs now was called by torch's L-BFGS, and not by the closure that it calls."""
    for frame in callers():
        file = frame.f_code.co_filename
        if file == _LBFGS:
            return True
        if frame.f_code in _EVALUATES or file.startswith(_MODELS) or not file.startswith((TORCH, OURS)):
            return False
    return False
