"""Which scalar of a model's output is the loss: a function of it, a part of it, or a loss of torch by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.trace.recorder.tensor_facts import dtype_name

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
    """The labels of an output of classes, [B, C] or [B, T, C]; "" of any other."""
    if not isinstance(output, Tensor) or output.dim() not in (2, 3):
        return ""
    return f"int64[{','.join(map(str, output.shape[:-1]))}]"


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
        f"({part}) {described(each) if each is None or isinstance(each, Tensor) else type(each).__name__}"
        for part, each in parts
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
        yield from ((f".{name}", each) for name, each in vars(output).items() if not name.startswith("_"))


def loss_named(loss: str | Loss | None, label: Tensor | None) -> Loss | None:
    """A function of what a model returned, and of its label where there is one, by the name of a loss.

    A function is called with exactly what the model returned. ``.loss`` or ``.1`` is a part of it: an attribute, key or
    position. ``mean``, ``sum`` and losses of ``torch.nn.functional`` take its logits (`logits_of`); ``cross_entropy``
    flattens leading dims. None without a name. Raises InvalidInput.
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
        raise InvalidInput([Problem("--label", None, rule, "--input targets=int64[8,2048]")])
    if loss is None or not hasattr(F, loss):
        losses = [each for each in dir(F) if each.endswith(("loss", "entropy", "entropy_with_logits"))]
        near = nearest_text(loss or "", losses) or "cross_entropy"
        rule = "is no loss of torch.nn.functional, nor mean, sum, or a part of the output such as .loss or .1"
        raise InvalidInput([Problem("--loss", loss, rule, near)])
    if label is None:
        raise InvalidInput([Problem("--label", None, f"{loss} needs one to compare the output with", "int64[8,2048]")])
    function = getattr(F, loss)

    def of(output: Any, label: Tensor) -> Tensor:
        x = logits_of(output)
        flat = loss == "cross_entropy" and x.dim() == label.dim() + 1 and x.dim() > 2
        value: Tensor = function(x.flatten(0, -2), label.flatten()) if flat else function(x, label)
        return value

    return of


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
