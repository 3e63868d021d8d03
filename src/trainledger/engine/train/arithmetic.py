"""The process-wide switches under which a run's numbers come out the same each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from trainledger.engine.train.device import keep_freed_memory, return_freed_memory
from trainledger.engine.train.precision import set_fp32_matmuls
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe

_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_SAME_BITS = (":4096:8", ":16:8")  # cuBLAS documentation, Results reproducibility


@contextmanager
def arithmetic(recipe: Recipe, device: torch.device, *, keeps: bool) -> Iterator[None]:
    """Inside, matmuls are in the precision of a recipe, and kernels those that it asks for; ``keeps``: freed memory.

    On a GPU ``recipe.deterministic`` takes kernels that give the same bits each time. Raises `InvalidInput` where torch
    has none for an operation.
    """
    set_fp32_matmuls(recipe.precision)
    if device.type == "cpu":
        keep_freed_memory() if keeps else return_freed_memory()
    # Compiled CPU kernels add up in an order that depends on timing by default; eager ones do not.
    if not (recipe.compiles if device.type == "cpu" else recipe.deterministic):
        yield
        return
    if device.type == "cuda":
        os.environ.setdefault(_VARIABLE, _SAME_BITS[0])  # read when the first matmul is made
    before = torch.are_deterministic_algorithms_enabled()
    filling: Any = torch.utils.deterministic
    filled = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        rule = f"has no such kernel on {device.type} here: {str(error).split(' does not')[0]}"
        raise InvalidInput([Problem("recipe.deterministic", True, rule, False)]) from error
    finally:
        torch.use_deterministic_algorithms(before)
        filling.fill_uninitialized_memory = filled


def refuse_workspace(recipe: Recipe, device: str) -> None:
    """Raises InvalidInput where the environment has cuBLAS use workspaces that do not give the same bits each time."""
    given = os.environ.get(_VARIABLE, _SAME_BITS[0])
    if recipe.deterministic and device.startswith("cuda") and given not in _SAME_BITS:
        rule = f"needs {_VARIABLE}={_SAME_BITS[0]}, or none, in the environment, which has {given}"
        raise InvalidInput([Problem("recipe.deterministic", True, rule, False)])
