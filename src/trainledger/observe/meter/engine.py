"""The watch over a run of the engine: its findings are said, and kept among the lines of its metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainledger.engine.train.observer import EvaluationRecord, Observer, StepRecord, TrainingState
from trainledger.forecast.predict.forecast import Forecast
from trainledger.observe.meter.usage import Usage
from trainledger.observe.meter.watch import Finding, Seen, Watch
from trainledger.spec.plain import read_json
from trainledger.spec.problem import InvalidInput


class Watching(Observer):
    """Sees each step that no meter slows, against the forecast that stands in the run's directory."""

    def __init__(self, metered: Callable[[], frozenset[int]], say: Callable[[str], None]) -> None:
        self._metered, self._say = metered, say
        self._outside: dict[str, float] = {}
        self._saved_nbytes: int | None = None

    def on_start(self, state: TrainingState) -> None:
        self._state = state
        self._usage = Usage(state.device)
        expected = Forecast()
        with suppress(InvalidInput):  # none, or a damaged one
            expected = read_json(Forecast, state.run_dir / "forecast.json")
        self._watch = Watch(expected.step_seconds, expected.step_seconds_by_phase)

    def on_step_end(self, record: StepRecord) -> None:
        usage = self._usage.now()
        outside, self._outside = self._outside, {}
        saved, self._saved_nbytes = self._saved_nbytes, None
        if record.step in self._metered() or record.skipped:
            return
        known = {name: usage.get(name) for name in ("memory_nbytes", "others", "slowdown")}
        phases = record.phase_seconds
        for finding in self._watch.see(
            Seen(record.step, record.seconds, phases, outside=outside, saved_nbytes=saved, **known)
        ):
            self._find(finding)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._outside["evaluation"] = sum(record.phase_seconds.values())

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        if not self._state.run.recipe.checkpoints.asynchronous:
            self._outside["checkpoint"] = seconds
            self._saved_nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def _find(self, finding: Finding) -> None:
        self._say(finding.sentence)
        event = {"event": "finding", "step": finding.step, "name": finding.name, "sentence": finding.sentence}
        with (self._state.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(event) + "\n")
