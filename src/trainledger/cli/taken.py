"""What a model that is named without a run file was given, and nobody said."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainledger.spec.run import Run

# What a default run says beside its model (`loaded.named_run`, `loaded.run_to_spread`).
_FIELDS = ("seq_len", "global_batch", "steps", "tokens", "precision", "attention")


def taken_by_default(args: argparse.Namespace, run: Run) -> tuple[str, ...]:
    """The fields of the run's recipe that stand in no run file and no override, each as ``--set`` takes it."""
    from trainledger.loaded import is_run_file, said
    from trainledger.plan.difference import as_override

    if is_run_file(args.run):
        return ()

    given, known = said(args.set), type(run.recipe).__dataclass_fields__
    return tuple(
        as_override(f"recipe.{name}", value)
        for name in _FIELDS
        if f"recipe.{name}" not in given and (value := getattr(run.recipe, name)) != known[name].default
    )
