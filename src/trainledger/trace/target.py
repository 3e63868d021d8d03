"""What a user names to be traced (``package.module:build``): found, built without weights, and given a step."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainledger.ledger.ledger import Ledger
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.trace.inputs import Inputs
from trainledger.trace.loss import NoScalarLossError, loss_named
from trainledger.trace.optimizers import check_optimizer, optimizer_named
from trainledger.trace.patches import around, replaced
from trainledger.trace.recorder.notes import why_it_stopped
from trainledger.trace.step import trace, trace_step

DEFAULT_STEP = "adamw"
_A_LOSS = "--loss cross_entropy --label {}, --loss mean, or --loss package.module:function"
_A_LABEL = "int64[8,2048]"


@dataclass(frozen=True)
class TrainingStep:
    """A training step as a function, with its models and optimizers: what ``package.module:build`` may return.

    ``run`` is called with the inputs and does everything: forward, backward, the optimizers' steps.
    """

    run: Callable[..., object]
    models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = field(default=())


def _as_module(path: str, name: str) -> str | None:
    """What a file's path and a name are written as; None of what is no path of a Python file."""
    if not path.endswith(".py"):
        return None
    module = path.removesuffix(".py").removeprefix("./").replace("/", ".")
    return f"{module}:{name or 'build'}" if all(each.isidentifier() for each in module.split(".")) else None


def load_target(text: str, field: str = "target") -> object:
    """The object that ``package.module:name`` names, imported from the working directory or an installed package.

    Only that module is imported. Raises InvalidInput with a sentence where there is none or its import fails.
    """
    module_name, _, name = text.partition(":")
    if (
        not module_name
        or not name
        or not all(each.isidentifier() for each in (*module_name.split("."), *name.split(".")))
    ):
        rule = "must name a module and something in it"
        raise InvalidInput([Problem(field, text, rule, _as_module(module_name, name) or "package.module:build")])
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        rule = f"no module {error.name!r} can be imported from here"
        raise InvalidInput([Problem(field, text, rule, _as_module(module_name, name))]) from error
    except (Exception, SystemExit) as error:
        raise InvalidInput([Problem(field, text, why_it_stopped(error, "the import"))]) from error
    for part in name.split("."):
        try:
            has = hasattr(found, part)
        except Exception as error:  # of a module's own __getattr__
            raise InvalidInput([Problem(field, text, why_it_stopped(error, f"looking for {part}"))]) from error
        if not has:
            public = [each for each in dir(found) if not each.startswith("_")]
            rule = f"{module_name} has no {part!r}"
            raise InvalidInput([Problem(field, text, rule, nearest_text(part, public))])
        found = getattr(found, part)
    return found


def build(
    target: object, *, dtype: torch.dtype | None = None, field: str = "target", named: str = ""
) -> nn.Module | TrainingStep:
    """The model or step of a target, called where it is a function or class; its parameters take no memory.

    It is built on the meta device and, where its code wants values, once more with parameters that are moved to it as
    soon as a module registers them. ``dtype`` is the format of what is made without one. Raises InvalidInput otherwise,
    of ``field`` and what it was ``named``.
    """
    if isinstance(target, (nn.Module, TrainingStep)):
        return target
    name = named or getattr(target, "__name__", type(target).__name__)
    if not callable(target):
        rule = "must be a module, a function that builds one, or a TrainingStep"
        raise InvalidInput([Problem(field, name, rule)])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        try:
            with torch.device("meta"):
                built = target()
        except Exception:
            with _parameters_on_meta():
                built = target()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        why = why_it_stopped(error, "building")
        in_a_world = "RANK expected" in why or "process group" in why
        near = "--world-size 8, which traces one rank of a program" if in_a_world else None
        raise InvalidInput([Problem(field, name, why, near)]) from error
    finally:
        torch.set_default_dtype(before)
    if not isinstance(built, (nn.Module, TrainingStep)):
        rule = f"must give an nn.Module or a trainledger.TrainingStep, not {type(built).__name__}"
        raise InvalidInput([Problem(field, name, rule)])
    return built


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules keep their parameters on the meta device, whatever they were made of."""

    def register(before: Callable[..., None], module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and type(parameter) is nn.Parameter:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        before(module, name, parameter)

    with replaced(nn.Module, "register_parameter", around(register)):
        yield


def trace_target(
    target: object,
    *,
    inputs: Inputs = (),
    step: str | None = None,
    loss: str | Callable[..., Tensor] | None = None,
    label: Tensor | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: Sequence[str] = (),
    field: str = "target",
    named: str = "",
    **options: Any,
) -> Ledger:
    """The ledger of a target's step (`build`), with ``inputs`` of `inputs_of`.

    ``step`` is ``forward``, ``backward`` (forward and backward) or an optimizer of `optimizers.OPTIMIZERS`, by itself
    AdamW; a TrainingStep has its own. ``loss`` and ``label`` are as in `loss.loss_named`: without them the output has
    one of its own. ``checkpointing`` are patterns of modules to recompute in backward. The other options are those of
    `trace`. Raises InvalidInput.
    """
    if step not in (None, "forward", "backward"):
        check_optimizer(step)
    of_loss = loss_named(loss, label)
    built = build(target, dtype=dtype, field=field, named=named)
    if isinstance(built, TrainingStep):
        given = {"--step": step, "--loss": loss, "--label": label, "--checkpointing": tuple(checkpointing)}
        given |= {"--autocast": options.get("autocast"), "--grad-accum": options.get("grad_accum", 1) - 1}
        for flag, value in given.items():
            if value is not None and value != () and value != 0:
                rule = "is not used with a TrainingStep, which does everything itself"
                raise InvalidInput([Problem(flag, None, rule)])
        allowed = {name: value for name, value in options.items() if name in ("first_step", "kernels", "assume")}
        with as_wrong_input(field):
            return trace_step(built.run, built.models, inputs, optimizers=built.optimizers, **allowed)
    model, step = built, step or DEFAULT_STEP
    if checkpointing:
        checkpoint_modules(model, checkpointing)
    _refuse_unknown(model, inputs)
    optimizer = None if step in ("forward", "backward") else optimizer_named(step, model.parameters())
    with as_wrong_input("--input"):
        backward = step != "forward"
        return trace(model, inputs, loss=of_loss, label=label, optimizer=optimizer, backward=backward, **options)


@contextmanager
def as_wrong_input(field: str, what: str = "the step", a_loss: str = _A_LOSS) -> Iterator[None]:
    """Whatever the traced code raises before anything ran, and what has no scalar loss, as a sentence."""
    try:
        yield
    except (KeyboardInterrupt, InvalidInput):
        raise
    except NoScalarLossError as error:
        raise InvalidInput(
            [Problem("--loss", None, error.sentence, error.near or a_loss.format(error.label or _A_LABEL))]
        ) from error
    except BaseException as error:
        raise InvalidInput([Problem(field, None, why_it_stopped(error, what))]) from error


def _refuse_unknown(model: nn.Module, inputs: Inputs) -> None:
    """Raise InvalidInput where the inputs cannot be arguments of the model's forward."""
    asked = inspect.signature(model.forward)
    try:
        asked.bind(**inputs) if isinstance(inputs, dict) else asked.bind(*inputs)
    except TypeError as error:
        takes = ", ".join(asked.parameters)
        first = next(iter(asked.parameters), "x")
        rule = f"{error}; forward takes {takes}, each with its format and shape, such as --input {first}=fp32[8,512]"
        raise InvalidInput([Problem("--input", None, rule)]) from error


def checkpoint_modules(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Recompute modules whose path matches a pattern (``layers.*``) in backward; returns the paths.

    A star matches one part of a path. A model of transformers checkpoints its own blocks where the pattern is
    ``blocks``. Raises InvalidInput where nothing matches.
    """
    found = []
    for pattern in patterns:
        if pattern == "blocks" and hasattr(model, "gradient_checkpointing_enable"):
            enable: Any = model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            found.append(pattern)
            continue
        matching = [name for name, _ in model.named_modules() if name and matches(name, pattern)]
        if not matching:
            stacks = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each)]
            near = f"{stacks[0]}.*" if stacks else None
            raise InvalidInput([Problem("--checkpointing", pattern, "no module of the model has such a path", near)])
        for name in matching:
            module = model.get_submodule(name)
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                rule = "contains modules and is never called itself"
                raise InvalidInput([Problem("--checkpointing", pattern, rule, f"{name}.*")])
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        found += matching
    return tuple(found)


def matches(path: str, pattern: str) -> bool:
    """Whether a path has as many parts as a pattern, and each fits.

    >>> matches("layers.3", "layers.*"), matches("layers.3.mlp", "layers.*"), matches("h.0.mlp", "h.?.mlp")
    (True, False, True)
    """
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
