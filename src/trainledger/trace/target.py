"""What a user names to be traced (``package.module:build``), with inputs (``int64[8,2048]``): found, built, traced."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainledger.ledger.ledger import Ledger
from trainledger.spec.code import as_target
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.units import NotAQuantity, parse_count
from trainledger.trace.loss import NoScalarLossError, check_optimizer, loss_named, optimizer_named
from trainledger.trace.patches import around, replaced
from trainledger.trace.recorder.source_lines import why_it_stopped
from trainledger.trace.recorder.storages import DTYPE_NAMES
from trainledger.trace.step import trace, trace_step

Inputs = dict[str, Tensor] | tuple[Tensor, ...]

_FORM = re.compile(r"(?:([A-Za-z_]\w*)=)?([\w.]+)\[([^\]]*)\]", re.ASCII)
_SHORT = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {"float": torch.float32, "half": torch.float16}
LARGEST = 10**15  # elements: more than any device holds, and far from where sizes overflow
MOST_DIMS = 64  # what torch's kernels take
_FLOATING = ("fp32", "bf16", "fp16", "fp64")


def dtype_named(name: str, field: str) -> torch.dtype:
    """A torch dtype by its own name or the field's short one (``bfloat16``, ``bf16``).

    Raises InvalidInput for what is none, and for formats that torch has a name for but nothing to compute with.
    """
    plain = name.strip().removeprefix("torch.")
    found = _SHORT.get(plain, getattr(torch, plain, None))
    if isinstance(found, torch.dtype):
        if not _can_be_read(found):
            rule = "is a format that torch cannot make or read tensors of on a CPU"
            raise InvalidInput([Problem(field, name, rule, "int8" if "int" in plain else "uint8")])
        return found
    known = [*_SHORT, *(str(dtype_name).removeprefix("torch.") for dtype_name in DTYPE_NAMES)]
    raise InvalidInput([Problem(field, name, "is not a number format that torch knows", nearest_text(plain, known))])


def floating_dtype_named(name: str, field: str) -> torch.dtype:
    """A dtype that a model can be built in, fp32, bf16, fp16 or fp64 by any of their names; InvalidInput otherwise.

    >>> floating_dtype_named("bfloat16", "--dtype")
    torch.bfloat16
    """
    found = dtype_named(name, field)
    if DTYPE_NAMES.get(found) not in _FLOATING:
        rule = f"must be a floating-point format that torch builds modules in: {', '.join(_FLOATING)}"
        raise InvalidInput([Problem(field, name, rule, "bf16")])
    return found


@cache
def _can_be_read(dtype: torch.dtype) -> bool:
    # Torch has names for formats that no CPU kernel makes or reads (float4_e2m1fn_x2 in 2.13): asked by trying.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.zeros(1, dtype=dtype, device="cpu").to(torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def autocast_dtype_named(name: str, field: str) -> torch.dtype:
    """A format that autocast runs in by its name; InvalidInput otherwise."""
    found = _SHORT.get(plain := name.strip().removeprefix("torch."), getattr(torch, plain, None))
    if found in (torch.bfloat16, torch.float16):
        return found
    raise InvalidInput([Problem(field, name, "must be a 16-bit floating format", "bf16")])


def input_of(text: str, field: str = "--input") -> tuple[str, Tensor]:
    """A tensor on the meta device, and its name, empty where it is given by position.

    >>> input_of("labels=int64[8,2048]")[1].shape, input_of("bf16[4]")[0]
    (torch.Size([8, 2048]), '')
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        rule = "must be a format and a shape in brackets, with or without a name in front"
        raise InvalidInput([Problem(field, text, rule, "int64[8,2048] or labels=int64[8,2048]")])
    name, dtype, sizes = match.groups()
    words = [part for part in sizes.split(",") if part.strip()]
    if len(words) > MOST_DIMS:
        raise InvalidInput([Problem(field, text, f"has {len(words):,} dims, and torch computes with {MOST_DIMS}")])
    shape = [_size(word, text, field) for word in words]
    elements = 1
    for each in shape:
        elements *= each
    if elements > LARGEST:
        raise InvalidInput([Problem(field, text, f"has more than {LARGEST:,} elements")])
    return name or "", torch.empty(shape, dtype=dtype_named(dtype, field), device="meta")


def _size(word: str, text: str, field: str) -> int:
    try:
        size = parse_count(word.strip())
    except NotAQuantity:
        size = -1
    if size < 0:
        raise InvalidInput([Problem(field, text, f"has a dim that is no whole number ({word.strip()})")])
    return size


def inputs_of(texts: Sequence[str], field: str = "--input", main: str = "") -> Inputs:
    """Inputs by their names (a dict) or by their positions (a tuple); InvalidInput where both are mixed.

    With ``main`` the first that has no name has this one.

    >>> inputs = inputs_of(["int64[2,8]", "int64[2,8]"])
    >>> len(inputs), sorted(inputs_of(["x=fp32[4]", "y=fp32[4]"]))
    (2, ['x', 'y'])
    """
    read = [input_of(text, field) for text in texts]
    if main and read and not read[0][0]:
        read[0] = main, read[0][1]
    names = [name for name, _ in read]
    if all(names):
        if len(set(names)) < len(names):
            raise InvalidInput([Problem(field, ", ".join(texts), "names one input twice")])
        return dict(read) if read else ()
    if any(names):
        rule = "must all have names or none: positions and names cannot be mixed"
        raise InvalidInput([Problem(field, ", ".join(texts), rule, "a name for each")])
    return tuple(tensor for _, tensor in read)


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
        near = as_target(module_name, name) if module_name.endswith(".py") else "package.module:build"
        raise InvalidInput([Problem(field, text, rule, near)])
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        rule = f"no module {error.name!r} can be imported from here"
        raise InvalidInput(
            [Problem(field, text, rule, as_target(module_name, name) if module_name.endswith(".py") else None)]
        ) from error
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
    # Code that wants values builds its parameters for real; each goes to the meta device as soon as a module registers
    # it.

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
