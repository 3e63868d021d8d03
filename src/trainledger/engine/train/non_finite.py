"""Steps whose loss or gradient is not finite: their update is left out, the run goes back past them, or it ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainledger.engine.train import checkpoint
from trainledger.engine.train.checkpoint import Say
from trainledger.engine.train.guard import Agreed, NotFinite, all_finite, forget_after, ordinal, to_go_back_to
from trainledger.engine.train.loading import restore
from trainledger.engine.train.observer import TrainingState
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.records import Records
from trainledger.engine.train.stop import Diverged
from trainledger.engine.train.watch import MOST_KEPT, listed
from trainledger.spec.recipe import Stop, learning_rate

# Gradients that overflow at this loss scale overflow without one.
SMALLEST_SCALE = 2.0**-10


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
        beyond, every = recipe.guard.beyond, recipe.checkpoints.every
        if isinstance(beyond, Stop):
            raise self._diverged(why)
        if state.guard.roll_backs >= beyond.times:
            raise self._diverged(f"{why}, after {state.guard.roll_backs} roll-backs (recipe.guard.beyond.times)")
        first = min(state.guard.recent, default=state.step + 1)
        name = self.ranks.of_first(lambda: Path(to_go_back_to(state.run_dir, first, every) or "").name)
        if not name:
            raise self._diverged(f"{why}, and there is no checkpoint to go back to")
        step, seconds, guard = state.step, state.seconds, state.guard
        self.ranks.together(lambda: restore(state, checkpoint.checkpoints_dir(state.run_dir) / name, self.say))
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
        good = self.ranks.of_first(lambda: str(checkpoint.latest_valid(self.state.run_dir, self.say) or ""))
        kept = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        other = "The same run does so again; a smaller recipe.learning_rate or another recipe.seed makes another run"
        return Diverged(f"{why}; {kept}. {other}.")
