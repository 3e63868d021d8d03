"""Whether a run can go on from a checkpoint: every tensor that it needs is there, as the run makes it, and finite.

Right hashes say that a file is as somebody wrote it, not that it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.engine.nn.weights import Stored, stored_in
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.precision import build_model
from trainledger.engine.train.run_directory import damage, model_files, read_facts
from trainledger.engine.train.saving import FORMATS, model_tensors, optimizer_tensors
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput, shown
from trainledger.spec.run import Run
from trainledger.spec.runfile import digest

_NEEDED = ("digest", "data", "threads", "seconds", "loss", "validation_loss", "guard")


def unusable(path: Path, run: Run) -> str | None:
    """Why a run cannot go on from a checkpoint, as the rest of a sentence, or None where it can.

    Reads the bytes of its files twice: for their hashes, and for values that are not finite.
    """
    return damage(path) or unlike(path, run)


def of_another_run(path: Path, run: Run) -> str | None:
    """The rest of a sentence that names both runs, or None where an undamaged checkpoint is of this run."""
    its, own = read_facts(path).get("digest"), digest(run)
    return None if its in (own, None) else f"is a checkpoint of run {str(its)[:8]}, not of {own[:8]}"


def unlike(path: Path, run: Run, *, to_train: bool = True) -> str | None:
    """What an undamaged checkpoint lacks, or has otherwise than the run would have written it.

    Without ``to_train`` only the weights are looked at.
    """
    if (other_run := of_another_run(path, run)) is not None:
        return other_run
    weights, first, later = _as_made(run)
    try:
        other = _difference(weights, stored_in(model_files(path))) or _not_finite(model_files(path), math.isfinite)
        if other is not None or not to_train:
            return other
        facts, files = read_facts(path), sorted(path.glob("optimizer*.safetensors"))
        needed = (*_NEEDED, "loss_scale") if run.recipe.precision.loss_scaling else _NEEDED
        if lacking := [name for name in needed if name not in facts]:
            return f"has a training.json without {lacking[0]}"
        states = stored_in(files)
        if facts["guard"]["skipped_steps"] < facts["step"] or states.keys() != first.keys():
            first = later  # the optimizer has made an update, which is when most of its states begin
        # Moments may overflow, weights not.
        return _difference(first, states) or _not_finite(files, lambda total: not math.isnan(total))
    except (InvalidInput, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"has tensors that cannot be read ({error})"


# A step on the meta device begins every state as the optimizer itself does: names, shapes and formats of no list of
# ours. It costs no memory.
def _as_made(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights, optimizer states before the first update and those after it, without memory, by name."""
    recipe = with_fields(run.recipe, {"optimizer.implementation": "loop"})  # fused kernels have no meta device
    with torch.device("meta"), _AnyNumber():  # type: ignore[no-untyped-call]
        model = build_model(run.model, recipe)
        optimizer = build_optimizer(model, recipe, width_factor=run.width_factor)
        first = optimizer_tensors(model, optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        return model_tensors(model), first, optimizer_tensors(model, optimizer)


class _AnyNumber(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives 1 for a number of a tensor without memory: Adafactor's loop asks for a norm (torch 2.13)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


def _difference(wanted: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> str | None:
    """The first tensor that is missing, surplus, of another shape (or has a hole), or in another format."""
    for name, tensor in wanted.items():
        if (its := stored.get(name)) is None:
            return f"lacks {name}"
        if its.shape != tensor.shape or sum(math.prod(part.shape) for part in its.parts) != tensor.numel():
            return f"has {name} of shape {list(its.shape)}; the run has {list(tensor.shape)}"
        if FORMATS.get(its.format) != tensor.dtype:
            return f"has {name} as {its.format}; the run has {str(tensor.dtype).removeprefix('torch.')}"
    return next((f"has {shown(name)}, which the run has not" for name in stored if name not in wanted), None)


def _not_finite(paths: Iterable[Path], allowed: Any) -> str | None:
    """The first tensor whose sum is not allowed; a sum in fp64 shows any NaN or infinity."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dict)
                if not allowed(file.get_tensor(name).sum(dtype=torch.float64).item()):
                    return f"has values in {name} that are not finite"
    return None
