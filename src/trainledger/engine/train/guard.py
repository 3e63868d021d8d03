"""What a run does about steps whose loss or gradient is not finite: what it remembers of them, and the way back.

Everything here is a function of the steps since the start of the run, and a checkpoint keeps what has been counted: a
resumed run leaves out the same steps and rolls back at the same step as one that was never stopped.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainledger.engine.train.checkpoint import TEMPORARY, all_checkpoints, damage, step_of
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.stop import STOP_SIGNALS
from trainledger.spec.layout import Layout
from trainledger.spec.recipe import Guard


class NotFinite(Exception):  # noqa: N818 - the loop decides what it leads to
    """A step, the same on all ranks, after which a run does not simply go on; the text says what it gave."""


@dataclass(frozen=True)
class Agreed:
    """What a rank knows of a step before its update, and then all of them: the mean loss, the joint gradient norm, a
    signal that asks for the end, whether a rank still writes a checkpoint, whether one could not read its batch, and
    the signal that asks this process alone to leave."""

    loss: float
    grad_norm: float | None
    finite: bool
    signum: int | None = None
    writing: bool = False
    unread: bool = False
    leaves: int | None = None


def agree(ranks: Ranks, layout: Layout, own: Agreed) -> Agreed:
    """What all ranks know of a step, so that all make its update or none does: ``finite`` where it is to be made."""
    bad = not_finite(own.loss, own.grad_norm)
    if ranks.alone:
        return replace(own, finite=not bad)
    asked = [float(own.signum == each) for each in STOP_SIGNALS]
    flags = (float(bad), float(own.writing), float(own.unread))
    total, n_bad, n_writing, n_unread, *asked = ranks.settled(own.loss, *flags, *asked)
    signum = next((each for each, n_ranks in zip(STOP_SIGNALS, asked, strict=True) if n_ranks), None)
    ends = ranks.ends(sum(asked))
    leaves = None if ends else own.signum
    mean = total * layout.pipeline / layout.devices if ranks.size > 1 else total  # replicas have parts of the mean
    finite = n_bad == n_unread == 0
    return Agreed(mean, own.grad_norm, finite, signum if ends else None, n_writing > 0, n_unread > 0, leaves)


@dataclass
class GuardRecord:
    """What a run remembers: steps that were left out (counted from 1) in the window, and totals since its start.

    The batches of step index k are those of index k + ``batches_left_out`` of the data.
    """

    recent: list[int] = field(default_factory=list)
    skipped_steps: int = 0
    roll_backs: int = 0
    batches_left_out: int = 0

    def skip(self, step: int, guard: Guard) -> bool:
        """Count a step that is left out; whether it is one too many."""
        self.skipped_steps += 1
        self.recent = [each for each in self.recent if each > step - guard.window] + [step]
        return len(self.recent) > guard.skips

    def rolled_back(self, step: int, to: GuardRecord, at: int) -> None:
        """Go on as after step ``at``, of which ``to`` is what was known, past the data up to step ``step``."""
        self.recent = to.recent
        self.roll_backs += 1
        self.batches_left_out += step - at

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return asdict(self)


def not_finite(loss: float, grad_norm: float | None) -> bool:
    """Whether a step's update would not be finite; without clipping (None) the loss alone tells."""
    return not (math.isfinite(loss) and math.isfinite(grad_norm or 0.0))


def to_go_back_to(run_dir: Path, first_bad: int, every: int | None) -> Path | None:
    """The newest checkpoint from before the first bad step, or where that is deleted by now, the oldest that is kept.

    Every file of it has its hash, and it is one of those that are due ``every`` so many steps: a run that was not
    stopped has no others.
    """
    due = [each for each in all_checkpoints(run_dir) if every and step_of(each) % every == 0]
    before = [each for each in due if step_of(each) < first_bad]
    after = [each for each in due if step_of(each) >= first_bad]
    return next((each for each in (*reversed(before), *after) if damage(each) is None), None)


def forget_after(run_dir: Path, step: int) -> None:
    """Delete the checkpoints of later steps, which the run makes anew with other data."""
    for each in reversed(all_checkpoints(run_dir)):
        if step_of(each) > step:
            # Renamed first: a deletion cut short must not leave a directory that looks like a checkpoint.
            going = each.with_name(f"{TEMPORARY}old-{each.name}")
            os.rename(each, going)
            shutil.rmtree(going)


def ordinal(number: int) -> str:
    """A number as a place in an order.

    >>> [ordinal(each) for each in (1, 2, 3, 4, 11, 21)]
    ['1st', '2nd', '3rd', '4th', '11th', '21st']
    """
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def all_finite(model: nn.Module) -> bool:
    """Whether no parameter holds a NaN or an infinity."""
    with torch.no_grad():
        return all(math.isfinite(each.sum(dtype=torch.float64).item()) for each in model.parameters())
