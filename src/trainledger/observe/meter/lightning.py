"""`MeterCallback`: the meter in the Trainer of Lightning.

from trainledger.observe.meter.lightning import MeterCallback
trainer = Trainer(..., callbacks=[MeterCallback("runs/mine")])
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from trainledger.observe.meter.loop import LoopMeter, meter_loop
from trainledger.observe.meter.phases import BACKWARD, CHECKPOINT, CLIP, DATA, EVALUATION, FORWARD, OPTIMIZER

# Two packages of the same code: a Trainer takes the callbacks of its own.
_PACKAGE = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
Callback: Any = import_module(_PACKAGE).Callback


class MeterCallback(Callback):  # type: ignore[misc]
    """Meters each step of a Trainer into ``run_dir``; options are those of `trainledger.meter_loop`.

    Phases are those that Lightning announces: the loss is part of forward, clipping of the optimizer.
    """

    def __init__(self, run_dir: str | Path | None = None, **options: Any) -> None:
        self.meter: LoopMeter | None = None
        self._run_dir, self._options = run_dir, options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        options = {"first_step": trainer.global_step + 1, "hear_model": False, **self._options}
        self.meter = meter_loop(pl_module, list(trainer.optimizers), self._run_dir, **options)
        self.meter.begin(DATA)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._begin(FORWARD)
        if self.meter is not None:
            self.meter.count(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._begin(BACKWARD)
        if self.meter is not None:
            self.meter.log(loss=loss.detach() * trainer.accumulate_grad_batches)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._begin(CLIP)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._begin(OPTIMIZER)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._begin(DATA)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(EVALUATION)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._begin(DATA)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._begin(CHECKPOINT)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close("interrupted" if isinstance(exception, KeyboardInterrupt) else "failed")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close("finished")

    def _begin(self, phase: str) -> None:
        if self.meter is not None:
            self.meter.begin(phase)

    def _close(self, state: str) -> None:
        if self.meter is not None:
            self.meter.close(state)
