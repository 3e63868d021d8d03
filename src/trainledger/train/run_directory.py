"""The directory of a run: one process at a time, one run file, and a state that readers can trust.

- ``run.toml``: the resolved run file
- ``tokenizer.json``: what its text was tokenized with
- ``state.json``: running, finished, interrupted or failed, with the last step known
- ``metrics.jsonl``: one line per step, evaluation and event
- ``checkpoints/``: see `checkpoint`
- ``tensorboard/``: the curve once more
- ``lock``: held while a process trains here
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.runfile import read, resolved, to_toml
from trainledger.train.checkpoint import all_checkpoints
from trainledger.train.durable import write_atomically, write_json

STATES = ("running", "finished", "interrupted", "failed")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory, created where missing; `InvalidInput` where another process holds it.

    The system lets go of the lock when the process ends, however it ends.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / "lock").open("a")
    except OSError as error:
        raise InvalidInput([Problem("run directory", str(run_dir), f"cannot be written: {error.strerror}")]) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            rule = "another process is training in this directory; wait for it or choose another directory"
            raise InvalidInput([Problem("run directory", str(run_dir), rule)]) from error
        yield


def begin_or_match(run_dir: Path, run: Run) -> bool:
    """True where this run was begun here before, False after writing its run file down.

    Raises `InvalidInput` naming each field in which the run differs from the one that was begun.
    """
    path = run_dir / "run.toml"
    if not (run_dir / "state.json").exists() and not all_checkpoints(run_dir):
        write_atomically(path, to_toml(run))
        return False
    begun, given = _fields(read(path)), _fields(run)
    problems = [
        Problem(name, given[name], "is not what the run was begun with", begun[name])
        for name in given
        if begun[name] != given[name]
    ]
    if problems:
        raise InvalidInput(problems, f"{path} holds another run")
    return True


def _fields(run: Run) -> dict[str, Any]:
    """Every field that makes a run what it is; where this machine keeps its token stores does not."""
    flat = {f"{part}.{name}": value for part, fields in resolved(run).items() for name, value in fields.items()}
    del flat["data.cache"]
    return flat


def write_state(run_dir: Path, state: str, **facts: object) -> None:
    """Put down how a run stands, in one motion."""
    assert state in STATES
    write_json(run_dir / "state.json", {"state": state, **facts})


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """How a run stands, or None where none was begun; `InvalidInput` where the file is not what was written."""
    try:
        state: dict[str, Any] = json.loads((run_dir / "state.json").read_text(encoding="utf-8"))
        if state["state"] not in STATES:
            raise ValueError(f"unknown state {state['state']!r}")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        rule = f"is damaged ({error}); delete this file to resume from the checkpoints"
        raise InvalidInput([Problem("state.json", str(run_dir / "state.json"), rule)]) from error
    return state
