"""`MeterCallback`: the meter in the Trainer of transformers, and in those built on it (TRL, sentence-transformers).

from trainledger.observe.meter.hugging_face import MeterCallback
trainer = Trainer(..., callbacks=[MeterCallback("runs/mine")])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trainledger.observe.meter.loop import LoopMeter, meter_loop
from trainledger.observe.meter.phases import CHECKPOINT, DATA, EVALUATION, OTHER

TOGETHER = "forward and backward"  # of a compiled model, whose hooks would be compiled with it
_LOGGED = ("loss", "grad_norm", "learning_rate")


class MeterCallback(TrainerCallback):
    """Meters each step of a Trainer into ``run_dir``; options are those of `trainledger.meter_loop`.

    A Trainer logs the mean loss of several steps, which is kept with the last of them.
    """

    def __init__(self, run_dir: str | Path | None = None, **options: Any) -> None:
        self.meter: LoopMeter | None = None
        self._run_dir, self._options = run_dir, options
        self._compiled = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        optimizer = objects["optimizer"]
        self._compiled = bool(args.torch_compile)
        options = {"first_step": state.global_step + 1, "hear_model": not self._compiled, **self._options}
        # Accelerate wraps the optimizer, and calls the step of its own.
        own = [getattr(optimizer, "optimizer", optimizer)]
        self.meter = meter_loop(objects["model"], own, self._run_dir, **options)
        self.meter.begin(DATA)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._begin(TOGETHER if self._compiled else OTHER)

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._begin(DATA)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
        self._ended(OTHER)
        if self.meter is not None and logs:
            self.meter.log(**{name: logs[name] for name in _LOGGED if isinstance(logs.get(name), int | float)})

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._ended(EVALUATION)

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._ended(CHECKPOINT)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self.meter is not None:
            self.meter.close("finished")

    def _begin(self, phase: str) -> None:
        if self.meter is not None:
            self.meter.begin(phase)

    def _ended(self, phase: str) -> None:
        """What ran since the step, or since what was last said, was of this phase."""
        if self.meter is not None:
            self.meter.was(phase)
            self.meter.begin(DATA)
