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

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from trainledger.engine.train.checkpoint import all_checkpoints, checkpoints_dir, is_checkpoint, read_facts
from trainledger.spec.durable import held, write_atomically, write_json
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.spec.run import Run
from trainledger.spec.run_text import Difference, differences
from trainledger.spec.runfile import digest, is_of_the_machine, read, to_toml

STATES = ("running", "finished", "interrupted", "failed")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory, created where missing; `InvalidInput` where another process holds it.

    The system releases the lock when the process ends, however it ends.
    """
    with ExitStack() as stack:
        if not taken(run_dir, stack):
            rule = "another process is training in this directory; wait for it or choose another directory"
            raise InvalidInput([Problem("run directory", str(run_dir), rule)])
        yield


def taken(run_dir: Path, stack: ExitStack) -> bool:
    """Hold a run directory, created where missing, until ``stack`` ends; False where another process holds it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        stack.enter_context(held(run_dir / "lock", wait=False))
    except BlockingIOError:
        return False
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise InvalidInput([Problem("run directory", str(run_dir), rule)]) from error
    return True


def is_begun(run_dir: Path) -> bool:
    """Whether a run was begun in a directory."""
    return (run_dir / "state.json").exists() or bool(all_checkpoints(run_dir))


def changes(begun: Run, given: Run) -> list[Difference]:
    """Each field in which two runs differ; where and on how many devices they are trained makes no other run."""
    return [each for each in differences(begun, given) if not is_of_the_machine(each.field, given)]


def nearest_begun(folder: Path, run: Run) -> tuple[Path, list[Difference]] | None:
    """The begun run in a folder that differs from ``run`` in the fewest fields, and those; None where there is none."""
    found = []
    for each in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (each / "run.toml").is_file() and is_begun(each):
            with suppress(InvalidInput):
                found.append((each, changes(read(each / "run.toml"), run)))
    return min(found, key=lambda pair: len(pair[1]), default=None)


def begin_or_match(run_dir: Path, run: Run, say: Callable[[str], None]) -> bool:
    """True where this run was begun here before, False where not; its run file is written down.

    Where it goes on with another layout or on another machine, the forecast of the old one is deleted. A run file that
    is damaged or gone is written anew where the checkpoints are of this run. Raises `InvalidInput` naming each field in
    which the run differs from the one that was begun.
    """
    path = run_dir / "run.toml"
    if not is_begun(run_dir):
        write_atomically(path, to_toml(run))
        return False
    try:
        begun = read(path)
    except InvalidInput:
        if not all(each == digest(run) for each in _digests(run_dir)):
            raise
        say(f"{path} was damaged and is written anew: the checkpoints are of this run.")
        write_atomically(path, to_toml(run))
        return True
    problems = [
        Problem(each.field, each.b, "is not what the run was begun with", each.a) for each in changes(begun, run)
    ]
    if problems:
        raise InvalidInput(problems, f"{path} holds another run")
    if begun != run:
        write_atomically(path, to_toml(run))
        (run_dir / "forecast.json").unlink(missing_ok=True)
    return True


def remove_unbegun(run_dir: Path) -> None:
    """Remove the directory of a run that was refused before its first step, unless there is more in it."""
    if is_begun(run_dir):
        return
    for name in ("run.toml", "tokenizer.json", "lock"):
        (run_dir / name).unlink(missing_ok=True)
    with suppress(OSError):
        run_dir.rmdir()


def already(run_dir: Path, earlier: dict[str, Any] | None) -> Problem:
    """Why a begun run is not begun again."""
    if earlier is not None and earlier["state"] == "finished":
        return Problem("run directory", str(run_dir), f"is already finished ({earlier['step']} steps)")
    if earlier is not None and earlier["state"] == "failed":
        rule = f"holds this run, which failed: {earlier.get('why', 'it did not say why')} --resume tries again"
        return Problem("run directory", str(run_dir), rule)
    return Problem("run directory", str(run_dir), "holds this run, begun and not finished; --resume goes on with it")


def _digests(run_dir: Path) -> Iterator[str]:
    """Of which run each readable checkpoint of a directory says that it is."""
    for each in all_checkpoints(run_dir):
        with suppress(OSError, ValueError, KeyError, TypeError):
            yield str(read_facts(each)["digest"])


def write_state(run_dir: Path, state: str, **facts: object) -> None:
    """Replace the state of a run, in one motion."""
    assert state in STATES
    write_json(run_dir / "state.json", {"state": state, **facts})


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run, None where none was begun; `InvalidInput` where the file is not what was written."""
    try:
        state = json.loads((run_dir / "state.json").read_text(encoding="utf-8"))
        wrong = _wrong_in(state)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong is not None:
        rule = f"is damaged ({wrong}); delete this file to resume from the checkpoints"
        raise InvalidInput([Problem("state.json", str(run_dir / "state.json"), rule)])
    found: dict[str, Any] = state
    return found


def _wrong_in(state: object) -> str | None:
    """What in a state.json is not as it was written, or None."""
    if not isinstance(state, dict):
        return "not a table"
    if state.get("state") not in STATES:
        return "no state that a run has" if state.get("state") is None else f"unknown state {shown(state['state'])}"
    of_engine = "loop" not in state  # a metered loop has no checkpoints of ours
    for name in _NEEDED if state["state"] == "finished" and of_engine else ("step",):
        if name not in state:
            return f"lacks {name}"
    for name, (what, fits) in _FACTS.items():
        if name in state and not fits(state[name]):
            return f"{name} = {shown(state[name])} is not {what}"
    return None


def _is_amount(value: Any, *types: type) -> bool:
    return type(value) in types and bool(value >= 0)


def _is_loss(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_weights(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("file", "sha256")))


# What the result of a finished run is made of.
_NEEDED = ("step", "tokens", "seconds", "loss", "validation_loss", "unigram_entropy", "checkpoint")
_FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("a number of steps", lambda value: _is_amount(value, int)),
    "tokens": ("a number of tokens", lambda value: _is_amount(value, int)),
    "seconds": ("a time", lambda value: _is_amount(value, int, float)),
    "loss": ("a loss", _is_loss),
    "validation_loss": ("a loss", _is_loss),
    "unigram_entropy": ("a loss", _is_loss),
    "checkpoint": (
        "the name of a checkpoint",
        lambda value: isinstance(value, str) and is_checkpoint(checkpoints_dir(Path()) / value),
    ),
    "initial_weights": ("a file and its sha256", _is_weights),
    "why": ("a text", lambda value: isinstance(value, str)),
}
