"""The curve of a run: one JSON object per line, written as things happen (`trackers` sends it elsewhere too).

On resume the file is cut back to the checkpoint's step, so that it has each step once.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainledger.engine.train.observer import EvaluationRecord, StepRecord
from trainledger.spec.durable import parse_json, sync, write_atomically
from trainledger.spec.plain import finite

Lines = deque[Mapping[str, object]]  # the last ones, kept in memory


class Metrics:
    """Appends lines to ``metrics.jsonl``; each is handed to the system before the next step begins."""

    def __init__(self, run_dir: Path, *, after: int, kept: Lines | None = None) -> None:
        """Open the file for a session that begins ``after`` that many steps; later lines are cut off.

        The ``kept`` lines take the place of those of the same steps, and all later ones are kept as well.
        """
        self.path = run_dir / "metrics.jsonl"
        self.damaged = cut_back(self.path, after)  # lines that were left out
        if kept:
            _put(self.path, kept)
        self._file = self.path.open("a", encoding="utf-8")
        self.kept = kept

    def step(self, record: StepRecord) -> None:
        self.write(asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        fields = asdict(record)
        del fields["unigram_entropy"]
        if not record.by_source:
            del fields["by_source"]
        self.write(fields)

    def event(self, event: str, step: int, **facts: object) -> None:
        """start, resume, checkpoint, finish, interrupted or failed."""
        self.write({"event": event, "step": step, **facts})

    def sync(self) -> None:
        """Have the lines on the disk, so that no checkpoint is ahead of its curve."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def write(self, fields: Mapping[str, object]) -> None:
        """Append a line."""
        if self.kept is not None:
            self.kept.append(fields)
        self._append(fields)

    def _append(self, fields: Mapping[str, object]) -> None:
        self._file.write(_line(fields))
        self._file.flush()


class NoMetrics(Metrics):
    """The metrics of a rank that is not the first: nothing is written."""

    damaged = 0

    def __init__(self, kept: Lines | None = None) -> None:
        """No file; lines are ``kept``."""
        self.kept = kept

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _append(self, fields: Mapping[str, object]) -> None:
        pass


def _line(fields: Mapping[str, object]) -> str:
    # JSON has no NaN and no infinity; what is not finite is written as null.
    return json.dumps(finite(dict(fields))) + "\n"


def _put(path: Path, kept: Lines) -> None:
    """Write kept lines in the place of those that say the same of the same step, and the others among them, by step.

    A replica that was lost may have written a step that the others have then taken again, and one that came again
    knows of changes that were none to the others.
    """
    left = {_place(each): each for each in kept}
    lines = [left.pop(_place(each), each) for each in read(path)]
    in_order = sorted([*lines, *left.values()], key=lambda each: _place(each)[0])
    write_atomically(path, "".join(map(_line, in_order)))


def _place(line: Mapping[str, Any]) -> tuple[int, str]:
    """Which line of a run this is: the step, and what is said of it."""
    return line.get("step", 0), line.get("event") or ("evaluation" if "validation_loss" in line else "step")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; what a crash cut short, or what has no whole number of steps, is left out."""
    return (each for each in _lines(path) if each is not None)


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a metrics file, None for each that is damaged."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                fields = parse_json(line)
            except ValueError:
                if not line.endswith("\n"):
                    return  # the last one, torn by a crash
                fields = None
            yield fields if isinstance(fields, dict) and _is_step(fields.get("step", 0)) else None


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 0


def cut_back(path: Path, after: int) -> int:
    """Drop the lines of steps beyond ``after`` and damaged ones, in one motion; how many were damaged."""
    if not path.exists():
        return 0
    lines = list(_lines(path))
    kept = [json.dumps(each) + "\n" for each in lines if each is not None and each.get("step", 0) <= after]
    write_atomically(path, "".join(kept))
    sync(path)
    return lines.count(None)
