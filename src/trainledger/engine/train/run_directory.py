"""The directory of a run: one process at a time, one run file, and a state that readers can trust.

- ``run.toml``: the resolved run file
- ``tokenizer.json``: what its text was tokenized with
- ``state.json``: running, finished, interrupted or failed, with the last step known
- ``metrics.jsonl``: one line per step, evaluation and event
- ``checkpoints/step-00000100/``, which `saving` writes and reads into the ranks of any layout:
  ``model.safetensors`` (parameters by name, a tied weight once; of several ranks one file each with its parts,
  ``model-00001-of-00004.safetensors``), ``optimizer.safetensors`` (``<state>/<parameter>``, likewise),
  ``training.json`` (step, losses, seconds, and what run, data and number of threads it is of), ``manifest.json`` (size
  and SHA-256 of each file)
- ``tensorboard/``: the curve once more
- ``lock``: held while a process trains here
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from trainledger.engine.train.facts import CHECKPOINT_NAME, STATES, wrong_fact, wrong_in_state
from trainledger.spec.durable import content_of, held, parse_json, sha256, write_atomically, write_json
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.run_text import Difference, differences
from trainledger.spec.runfile import digest, is_of_the_machine, read, to_toml

# Checkpoints appear whole, carry the hash of each file, and are believed only when it fits. Batches and dropout are
# functions of the step, so no generator state is stored. No file holds pickled objects.


Say = Callable[[str], None]

FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None, f"{path} is not named like a checkpoint"
    return int(match[1])


def is_checkpoint(path: Path) -> bool:
    """Whether a path is named and placed as a run's checkpoint is."""
    return CHECKPOINT_NAME.fullmatch(path.name) is not None and path.parent.name == checkpoints_dir(Path()).name


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Every checkpoint directory of a run, valid or not, oldest first."""
    if not checkpoints_dir(run_dir).is_dir():
        return []
    return sorted(
        (path for path in checkpoints_dir(run_dir).iterdir() if CHECKPOINT_NAME.fullmatch(path.name)), key=step_of
    )


def file_names(rank: int, ranks: int) -> tuple[str, str]:
    """The files of a rank's tensors: the model's and the optimizer's.

    >>> file_names(0, 1), file_names(2, 4)[0]
    (('model.safetensors', 'optimizer.safetensors'), 'model-00003-of-00004.safetensors')
    """
    part = "" if ranks == 1 else f"-{rank + 1:05d}-of-{ranks:05d}"
    return f"model{part}.safetensors", f"optimizer{part}.safetensors"


def model_files(path: Path) -> list[Path]:
    """The files of a checkpoint that hold the model."""
    return sorted(path.glob("model*.safetensors"))


def read_facts(path: Path) -> dict[str, Any]:
    """What training.json of a checkpoint says."""
    facts: dict[str, Any] = parse_json(content_of(path / "training.json"))
    return facts


# A checkpoint that is believed wrongly costs the run: any error in reading its manifest is a damage, and none is an
# exception.
def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, as the rest of a sentence, or None where every file has its hash."""
    try:
        manifest = parse_json(content_of(path / MANIFEST))
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"has format {manifest['format']}, and this version reads {FORMAT}"
        ranks = manifest.get("ranks", 1)
        if type(ranks) is not int or not 1 <= ranks <= len(files):
            return "has a manifest that does not say how many ranks wrote it"
        needed = {"training.json", *(name for rank in range(ranks) for name in file_names(rank, ranks))}
        if not needed <= files.keys():
            return "has a manifest that lacks a file"
        if stray := {file.name for file in path.glob("*.safetensors")} - files.keys():
            return f"holds {min(stray)}, which its manifest does not name"
        return other_file(path, files) or _other_facts(read_facts(path), path)
    except FileNotFoundError as error:
        return f"lacks {Path(error.filename).name}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return (
            f"cannot be read ({type(error).__name__}: {error})"
            if isinstance(error, OSError)
            else "has a damaged manifest"
        )


def other_file(path: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What is wrong with the files that a manifest lists, as the rest of a sentence; raises OSError where one is
    missing."""
    for name, listed in files.items():
        nbytes = (path / name).stat().st_size
        if nbytes != listed["nbytes"]:
            return f"has {nbytes} bytes in {name}, and the manifest says {listed['nbytes']}"
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # a hash leaves the interpreter to others
        hashes = threads.map(sha256, [path / name for name in files])
        for (name, listed), found in zip(files.items(), hashes, strict=True):
            if found != listed["sha256"]:
                return f"has a {name} whose SHA-256 is not the manifest's"
    return None


def _other_facts(facts: object, path: Path) -> str | None:
    """What training.json says that the run which wrote it would not have said."""
    named = CHECKPOINT_NAME.fullmatch(path.resolve().name)
    if isinstance(facts, dict) and named is not None and facts.get("step") != int(named[1]):
        return f"has a training.json of step {facts.get('step')}"
    wrong = wrong_fact(facts)
    return None if wrong is None else f"has a damaged training.json ({wrong})"


def latest_valid(run_dir: Path, say: Say, refused: Callable[[Path], str | None] = lambda path: None) -> Path | None:
    """The newest checkpoint whose every file has its hash, and of which ``refused`` has nothing to say; ``say`` gets a
    sentence for each newer one that is passed over."""
    for all_checkpoint in reversed(all_checkpoints(run_dir)):
        wrong = damage(all_checkpoint) or refused(all_checkpoint)
        if wrong is None:
            return all_checkpoint
        say(f"{all_checkpoint} {wrong}; skipped.")
    return None


def set_aside(run_dir: Path, after: int, say: Say) -> None:
    """Rename unusable checkpoints newer than step ``after``: they neither count as kept nor stand in the way."""
    for all_checkpoint in all_checkpoints(run_dir):
        if step_of(all_checkpoint) > after:
            number = 1
            while (aside := all_checkpoint.with_name(f"damaged-{number}-{all_checkpoint.name}")).exists():
                number += 1
            os.rename(all_checkpoint, aside)
            say(f"{all_checkpoint.name} is now {aside}; delete it when you have seen it.")


def prune(run_dir: Path, keep_last: int, keep_every: int | None, every: int | None = None) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and those at multiples of ``keep_every`` steps.

    Where they are due ``every`` so many steps, one that a stop has made in between is kept besides, while it is the
    newest: a run that was stopped has the same checkpoints to go back to as one that was not.
    """
    paths = all_checkpoints(run_dir)
    due = [path for path in paths if every is None or step_of(path) % every == 0]
    kept = {*due[-keep_last:], *paths[-1:]}
    for path in paths:
        if path not in kept and (keep_every is None or step_of(path) % keep_every):
            # Renamed first: a deletion cut short must not leave a directory that looks like a checkpoint.
            going = path.with_name(f"{TEMPORARY}old-{path.name}")
            os.rename(path, going)
            shutil.rmtree(going)


def clean(run_dir: Path) -> None:
    """Delete what a process that was killed while saving or pruning left; only for the holder of the run's lock."""
    if checkpoints_dir(run_dir).is_dir():
        for path in checkpoints_dir(run_dir).iterdir():
            if path.name.startswith(TEMPORARY):
                shutil.rmtree(path)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory, created where missing; `InvalidInput` where another process holds it.

    The system releases the lock when the process ends, however it ends.
    """
    with ExitStack() as stack:
        if str(run_dir) != os.fsencode(run_dir).decode(errors="replace"):
            rule = "must be UTF-8 text: safetensors (0.8) opens no other paths, so that nothing could be resumed"
            raise InvalidInput([Problem("run directory", str(run_dir), rule)])
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
    return [difference for difference in differences(begun, given) if not is_of_the_machine(difference.field, given)]


def nearest_begun(folder: Path, run: Run) -> tuple[Path, list[Difference]] | None:
    """The begun run in a folder that differs from ``run`` in the fewest fields, and those; None where there is none."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (path / "run.toml").is_file() and is_begun(path):
            with suppress(InvalidInput):
                found.append((path, changes(read(path / "run.toml"), run)))
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
        if set(_digests(run_dir).values()) - {digest(run)}:
            raise
        say(f"{path} was damaged and is written anew: the checkpoints are of this run.")
        write_atomically(path, to_toml(run))
        return True
    problems = [
        Problem(change.field, change.b, "is not what the run was begun with", change.a)
        for change in changes(begun, run)
    ]
    if problems:
        raise InvalidInput(problems, f"{path} holds another run")
    done = max((step for step, of in _digests(run_dir).items() if of == digest(run)), default=0)
    if done > run.recipe.total_steps:
        raise InvalidInput([Problem("recipe.steps", run.recipe.total_steps, "is less than the run has done", done)])
    for difference in differences(begun, run):
        if difference.field in ("recipe.micro_batch", "recipe.steps", "recipe.tokens"):
            say(
                f"{difference.field} is now {difference.b}, before {difference.a}: "
                f"{_effect(difference.field, run.recipe)}."
            )
    if begun != run:
        write_atomically(path, to_toml(run))
        (run_dir / "forecast.json").unlink(missing_ok=True)
    return True


def _effect(field: str, recipe: Recipe) -> str:
    """What a change of a field does to the steps that follow."""
    if field != "recipe.micro_batch":
        return "the steps are the same"
    effects = {
        "sums are rounded otherwise": True,
        "dropout draws other masks": recipe.dropout or recipe.attention_dropout or recipe.adapter_dropout,
        "experts are balanced over other tokens": recipe.load_balance_loss or recipe.expert_dispatch.factor,
    }
    return ", ".join(effect for effect, there in effects.items() if there)


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


def _digests(run_dir: Path) -> dict[int, str]:
    """Of which run each readable checkpoint of a directory says that it is, by its step."""
    digests = {}
    for checkpoint in all_checkpoints(run_dir):
        with suppress(OSError, ValueError, KeyError, TypeError):
            digests[step_of(checkpoint)] = str(read_facts(checkpoint)["digest"])
    return digests


def write_state(run_dir: Path, state: str, **facts: object) -> None:
    """Replace the state of a run, in one motion."""
    assert state in STATES
    write_json(run_dir / "state.json", {"state": state, **facts})


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run, None where none was begun; `InvalidInput` where the file is not what was written."""
    try:
        state = json.loads(content_of(run_dir / "state.json"))
        wrong = wrong_in_state(state)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong is not None:
        rule = f"is damaged ({wrong}); delete this file to resume from the checkpoints"
        raise InvalidInput([Problem("state.json", str(run_dir / "state.json"), rule)])
    found: dict[str, Any] = state
    return found
