"""Activation checkpointing of chosen modules: their forward keeps its inputs alone and runs again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainledger.spec.problem import InvalidInput, Problem


def checkpoint_modules(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Let the modules whose path matches a pattern (``layers.*``) run again in backward; the paths.

    A star stands for one part of a path. A model of transformers does it itself where the pattern is ``blocks``.
    Raises InvalidInput where nothing matches.
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
                rule = "holds modules and is never called itself"
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
