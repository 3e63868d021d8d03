"""The fields in which two runs differ, and a difference as the override that makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainledger.spec import runfile
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.parts import chosen
from trainledger.spec.recompute import checkpointed
from trainledger.spec.run import Run
from trainledger.spec.setting import NONE


@frozen
class Difference:
    """One field of a run file in which two runs differ; None where it is absent."""

    field: str
    a: Any
    b: Any


def differences(a: Run, b: Run) -> tuple[Difference, ...]:
    """Every field that differs, in the order of the run file; of parts of two kinds those that were chosen."""
    ours, theirs = runfile.flat(a), runfile.flat(b)
    own = {f"{name}.{path}" for run in (a, b) for name in runfile.SECTIONS for path in chosen(getattr(run, name))}
    return tuple(
        Difference(path, ours.get(path, NONE), theirs.get(path, NONE))
        for path in dict.fromkeys([*ours, *theirs])
        if path in own and ours.get(path, NONE) != theirs.get(path, NONE)
    )


def changed(run: Run, changes: Mapping[str, Any]) -> Run:
    """The run after overrides (``{"recipe.micro_batch": 2}``); raises InvalidInput where it is none that works."""
    return runfile.parse(runfile.resolved(run), changes)


def as_override(field: str, value: Any) -> str:
    """A change as ``--set`` takes it.

    >>> as_override("layout.stage_layers", (2, 2)), as_override("recipe.compile", True)
    ('layout.stage_layers=[2,2]', 'recipe.compile=true')
    """
    return f"{field}={_text(value)}"


def overrides(a: Run, b: Run) -> tuple[str, ...]:
    """The overrides that turn one run into the other, each as ``--set`` takes it."""
    theirs, found = runfile.flat(b), {}
    for each in differences(a, b):
        path = each.field
        while path not in theirs:  # a field of a part that the other run has in another kind, or not at all
            path = path.rpartition(".")[0]
        found[path] = theirs[path]
    return tuple(as_override(path, value) for path, value in found.items())


def pasted_overrides(a: Run, b: Run) -> tuple[str, ...]:
    """The overrides that turn one run into the other, also where they are pasted before the search for its layout."""
    if not a.origin.searched:
        return overrides(a, b)
    asked = replace(a, layout=Layout(auto=True), recipe=checkpointed(replace(a.recipe, micro_batch=None), "none"))
    return tuple(dict.fromkeys((*overrides(asked, b), *overrides(a, b))))


def layout_overrides(a: Run, b: Run) -> tuple[str, ...]:
    """Those of `pasted_overrides` that spread a run over devices."""
    fields = ("layout.", "cluster.count", "recipe.micro_batch", "recipe.activation_checkpointing")
    return tuple(each for each in pasted_overrides(a, b) if each.startswith(fields))


def found_layout(run: Run) -> tuple[str, ...]:
    """The overrides that lay a run out as the search for its layout did; none where there was no search."""
    return layout_overrides(run, run)


def _text(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ",".join(_toml(each) for each in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}={_toml(each)}" for name, each in value.items()) + "}"
    return str(value)


def _toml(value: Any) -> str:
    """A value inside of another one."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _text(value)
