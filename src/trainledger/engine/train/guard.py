"""What a run does about steps whose loss or gradient is not finite: what it remembers of them, and the way back.

Everything here is a function of the steps since the start of the run, and a checkpoint keeps what has been counted: a
resumed run leaves out the same steps and rolls back at the same step as one that was never stopped.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.engine.train import run_directory
from trainledger.engine.train.checkpoint_contents import unusable
from trainledger.engine.train.observer import TrainingState
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.records import MOST_KEPT, Records, listed
from trainledger.engine.train.run_directory import TEMPORARY, Say, all_checkpoints, step_of
from trainledger.engine.train.saving import restore
from trainledger.engine.train.stop import STOP_SIGNALS, Diverged
from trainledger.spec.layout import Layout
from trainledger.spec.recipe import Stop, learning_rate
from trainledger.spec.run import Run


class NotFinite(Exception):  # noqa: N818 - the loop decides what it leads to
    """A step, the same on all ranks, after which a run does not simply go on; the text says what it gave."""


@dataclass(frozen=True)
class Agreed:
    """What a rank knows of a step before its update, and then all of them: the mean loss, the joint gradient norm, a
    signal that asks for the end, whether a rank still writes a checkpoint, and whether one could not read its
    batch."""

    loss: float
    grad_norm: float | None
    finite: bool
    signum: int | None = None
    writing: bool = False
    unread: bool = False


# All ranks make an update or none does: one that left it out alone would go on with other weights, and nothing later
# would notice.
def agree(ranks: Ranks, layout: Layout, own: Agreed) -> Agreed:
    """What all ranks know of a step, so that all make its update or none does: ``finite`` where it is to be made."""
    bad = not_finite(own.loss, own.grad_norm)
    if ranks.alone:
        return replace(own, finite=not bad)
    asked = [float(own.signum == stop_signal) for stop_signal in STOP_SIGNALS]
    flags = (float(bad), float(own.writing), float(own.unread))
    total, n_bad, n_writing, n_unread, *asked = ranks.summed(own.loss, *flags, *asked)
    signum = next((stop_signal for stop_signal, n_ranks in zip(STOP_SIGNALS, asked, strict=True) if n_ranks), None)
    mean = total * layout.pipeline / layout.devices
    return Agreed(mean, own.grad_norm, n_bad == n_unread == 0, signum, n_writing > 0, n_unread > 0)


def not_finite(loss: float, grad_norm: float | None) -> bool:
    """Whether a step's update would not be finite; without clipping (None) the loss alone tells."""
    return not (math.isfinite(loss) and math.isfinite(grad_norm or 0.0))


# PaLM (Chowdhery et al. 2022, section 5.1) went back some 100 steps and left out 200 to 500 batches. The same batches,
# from weights of another moment, gave no spike.
def to_go_back_to(run_dir: Path, first_bad: int, run: Run) -> Path | None:
    """The newest checkpoint from before the first bad step, or where that is deleted by now, the oldest that is kept.

    The run can go on from it, and it is one of those that are due ``recipe.checkpoints.every`` so many steps: a run
    that was not stopped has no others.
    """
    every = run.recipe.checkpoints.every
    due = [
        all_checkpoint for all_checkpoint in all_checkpoints(run_dir) if every and step_of(all_checkpoint) % every == 0
    ]
    before = [path for path in due if step_of(path) < first_bad]
    after = [path for path in due if step_of(path) >= first_bad]
    return next((path for path in (*reversed(before), *after) if unusable(path, run) is None), None)


def forget_after(run_dir: Path, step: int) -> None:
    """Delete the checkpoints of later steps, which the run makes anew with other data."""
    for all_checkpoint in reversed(all_checkpoints(run_dir)):
        if step_of(all_checkpoint) > step:
            # Renamed first: a deletion cut short must not leave a directory that looks like a checkpoint.
            going = all_checkpoint.with_name(f"{TEMPORARY}old-{all_checkpoint.name}")
            os.rename(all_checkpoint, going)
            shutil.rmtree(going)


def ordinal(number: int) -> str:
    """A number as a place in an order.

    >>> [ordinal(each) for each in (1, 2, 3, 4, 11, 21)]
    ['1st', '2nd', '3rd', '4th', '11th', '21st']
    """
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


# A sum in fp64 of fp32 values cannot overflow, and one NaN or infinity makes it one: no tensor of booleans is needed
# beside each parameter.
def all_finite(model: nn.Module) -> bool:
    """Whether no parameter holds a NaN or an infinity."""
    with torch.no_grad():
        return all(math.isfinite(parameter.sum(dtype=torch.float64).item()) for parameter in model.parameters())


AgreeOn = Callable[[float, float | None], Agreed]  # by loss and gradient norm


class JudgedByHost:
    """A judge of one step that waits for the device; the update runs while the host writes down what was read."""

    def __init__(self, agree_on: AgreeOn) -> None:
        self._agree_on = agree_on

    def __call__(self, loss: Tensor, grad_norm: Tensor | None) -> bool:
        with _disable_current_modes():  # a meter that records the step does not see this
            norm = None if grad_norm is None else grad_norm.item()
            self._agreed = self._agree_on(loss.item(), norm)
        return not self._agreed.finite

    def read(self) -> Agreed:
        return self._agreed


# A judge that waits empties the queue: a step of GPT-2 124M, compiled on an H200, took 50.1 ms with the question
# whether loss and norm are finite and 43.1 ms without it (torch 2.11), as the host was too late for the kernels of the
# next forward.
class JudgedOnDevice:
    """A judge of one step that does not wait: the device finds out whether its update is left out.

    The host reads loss and norm when it has launched the next step: the device would have no work while the host comes
    to that.
    """

    def __init__(self, agree_on: AgreeOn) -> None:
        self._agree_on = agree_on

    def __call__(self, loss: Tensor, grad_norm: Tensor | None) -> Tensor:
        # One copy to the host for both numbers; `.item()` of each would wait twice.
        figures = torch.stack([tensor.detach().float() for tensor in (loss, grad_norm) if tensor is not None])
        self._on_host = figures.to("cpu", non_blocking=figures.is_cuda)  # into pinned memory
        self._copied = torch.cuda.current_stream().record_event() if figures.is_cuda else None
        return figures.isfinite().all().logical_not().float()

    def read(self) -> Agreed:
        if self._copied is not None:
            self._copied.synchronize()
        loss, *norm = self._on_host.tolist()
        return self._agree_on(loss, norm[0] if norm else None)


# Gradients that overflow at this loss scale overflow without one.
SMALLEST_SCALE = 2.0**-10


# A step that overflowed at the loss scale of fp16 is left out as well, and is not counted in the window: a smaller
# scale is its remedy.
@dataclass(frozen=True)
class NonFiniteSteps:
    """What one process does about such steps, the same on all ranks, by ``recipe.guard`` (`guard` keeps the counts)."""

    state: TrainingState
    ranks: Ranks
    records: Records
    say: Say

    def leave_out(self, told: Agreed, number: int) -> None:
        """Count a step whose update was left out; raises `NotFinite` where the run does not go on from it."""
        state, guard = self.state, self.state.run.recipe.guard
        too_many = state.guard.skip(number, guard)
        n_recent = len(state.guard.recent)
        norm = "" if told.grad_norm is None else f", gradient norm {told.grad_norm}"
        gave = f"Step {number} gave loss {told.loss}{norm} at {self._rate(number)}"
        documents = self.records.documents(number)
        self.records.metrics.event("skip", number, documents=documents[:MOST_KEPT])
        if not self._weights_are_finite():
            raise NotFinite(f"{gave}, from weights that are not finite")
        if too_many:
            often = f"the {ordinal(n_recent)} such step of the last {guard.window}"
            raise NotFinite(f"{gave}, {often}; {listed(documents)}")
        most = f"{n_recent} of at most {guard.skips} in {guard.window} steps"
        self.say(f"{gave}; its update was left out ({most}); {listed(documents)}.")

    def scale_down(self, number: int) -> None:
        """Count a step that overflowed in fp16, after which the loss scale is smaller; raises `Diverged` at the end."""
        assert self.state.scaler is not None
        self.state.guard.skipped_steps += 1
        if self.state.scaler.scale.item() < SMALLEST_SCALE:
            raise self._diverged(f"Step {number} gave a loss scale below {SMALLEST_SCALE}: every step overflows")

    def require_finite_weights(self) -> None:
        """Raise `NotFinite` where the run's step gave weights that are not finite."""
        step = self.state.step
        if not self._weights_are_finite():
            raise NotFinite(f"Step {step} gave weights that are not finite at {self._rate(step)}")

    def go_back(self, why: str) -> None:
        """Take up a checkpoint from before the steps that were left out, past their data, or raise `Diverged`."""
        state, recipe = self.state, self.state.run.recipe
        beyond = recipe.guard.beyond
        if isinstance(beyond, Stop):
            raise self._diverged(why)
        if state.guard.roll_backs >= beyond.times:
            raise self._diverged(f"{why}, after {state.guard.roll_backs} roll-backs (recipe.guard.beyond.times)")
        first = min(state.guard.recent, default=state.step + 1)
        name = self.ranks.of_first(lambda: Path(to_go_back_to(state.run_dir, first, state.run) or "").name)
        if not name:
            raise self._diverged(f"{why}, and there is no checkpoint to go back to")
        step, seconds, guard = state.step, state.seconds, state.guard
        self.ranks.together(lambda: restore(state, run_directory.checkpoints_dir(state.run_dir) / name, self.say))
        guard.rolled_back(step, state.guard, state.step)
        state.guard, state.seconds = guard, seconds
        if self.ranks.first:
            forget_after(state.run_dir, state.step)
            self.records.open()
        # Of the step that is tried anew: a resume from before it writes this again, one from after it keeps it.
        facts = {"to": name, "from": step, **guard.facts(), "why": why}
        self.records.metrics.event("roll-back", state.step + 1, **facts)
        self.records.write_state("running")
        left_out = f"the batches of steps {state.step + 1} to {step} are left out"
        self.say(f"{why}; back to {name}, {left_out} (roll-back {guard.roll_backs} of at most {beyond.times}).")

    def _weights_are_finite(self) -> bool:
        """Whether those of all ranks are."""
        return not any(self.ranks.summed(float(not all_finite(self.state.model))))

    def _rate(self, number: int) -> str:
        """The learning rate of a step."""
        return f"learning rate {learning_rate(self.state.run.recipe, number - 1):.3g}"

    def _diverged(self, why: str) -> Diverged:
        """The sentence with the step that diverged and the checkpoint that is still good."""
        good = self.ranks.of_first(lambda: str(run_directory.latest_valid(self.state.run_dir, self.say) or ""))
        kept = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        other = "The same run does so again; a smaller recipe.learning_rate or another recipe.seed makes another run"
        return Diverged(f"{why}; {kept}. {other}.")
