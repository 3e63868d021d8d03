"""The numbers of a metered step in the trackers that the loop itself uses; those it does not use are left alone."""

from __future__ import annotations

import sys
from typing import Any

_PREFIX = "trainledger/"
_REFUSED: set[str] = set()  # trackers that failed once get nothing more


def send(scalars: dict[str, float], step: int) -> None:
    """Send numbers to the run of W&B, of MLflow that is active in this process. A tracker's failure ends nothing."""
    named = {f"{_PREFIX}{name}": value for name, value in scalars.items()}
    for name, tracker in (("wandb", _wandb), ("mlflow", _mlflow)):
        module = sys.modules.get(name)
        if module is None or name in _REFUSED:
            continue
        try:
            tracker(module, named, step)
        except Exception:  # trackers raise classes of their own, and of the network's
            _REFUSED.add(name)


def _wandb(wandb: Any, scalars: dict[str, float], step: int) -> None:
    if getattr(wandb, "run", None) is not None:  # wandb's own step counter is the loop's
        wandb.run.log({f"{_PREFIX}step": step, **scalars}, commit=False)


def _mlflow(mlflow: Any, scalars: dict[str, float], step: int) -> None:
    if mlflow.active_run() is not None:
        mlflow.log_metrics(scalars, step=step)
