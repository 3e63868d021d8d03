"""Checkpoints: directories that appear whole, carry the hash of each file, and are believed only when it fits.

``<run_dir>/checkpoints/step-00000100/`` holds

- ``model.safetensors``: parameters by name (a tied weight once); of several ranks one file each, with its parts of
  them (``model-00001-of-00004.safetensors``)
- ``optimizer.safetensors``: optimizer state as ``<state>/<parameter>``, likewise
- ``training.json``: step, losses, seconds, and what run, data and number of threads it is of
- ``manifest.json``: size and SHA-256 of each file above

Batches and dropout are functions of the step, so no generator state is stored. No file holds pickled objects.
`saving` writes it, and reads it into the ranks of any layout.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any

from trainledger.spec.durable import parse_json, sha256

Say = Callable[[str], None]

FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{8,})")
_LOSS = (int, float, NoneType)
# What a run needs of training.json to go on, as it is written.
_FACTS: dict[str, type | tuple[type, ...]] = {
    "digest": str, "data": str, "threads": int, "seconds": (int, float), "loss": _LOSS, "validation_loss": _LOSS,
}  # fmt: skip


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, f"{path} is not named like a checkpoint"
    return int(found[1])


def is_checkpoint(path: Path) -> bool:
    """Whether a path is named and placed as a run's checkpoint is."""
    return _NAME.fullmatch(path.name) is not None and path.parent.name == checkpoints_dir(Path()).name


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Every checkpoint directory of a run, valid or not, oldest first."""
    if not checkpoints_dir(run_dir).is_dir():
        return []
    return sorted((each for each in checkpoints_dir(run_dir).iterdir() if _NAME.fullmatch(each.name)), key=step_of)


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
    facts: dict[str, Any] = parse_json((path / "training.json").read_text(encoding="utf-8"))
    return facts


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, as the rest of a sentence, or None where every file has its hash."""
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"has format {manifest['format']}, and this version reads {FORMAT}"
        ranks = manifest.get("ranks", 1)
        if type(ranks) is not int or not 1 <= ranks <= len(files):
            return "has a manifest that does not say how many ranks wrote it"
        needed = {"training.json", *(name for rank in range(ranks) for name in file_names(rank, ranks))}
        if not needed <= files.keys():
            return "has a manifest that lacks a file"
        if stray := {each.name for each in path.glob("*.safetensors")} - files.keys():
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
    if not isinstance(facts, dict):
        return "has a training.json that is no table"
    named = _NAME.fullmatch(path.resolve().name)
    if named is not None and facts.get("step") != int(named[1]):
        return f"has a training.json of step {facts.get('step')}"
    for name, kinds in _FACTS.items():
        if name in facts and (not isinstance(facts[name], kinds) or isinstance(facts[name], bool)):
            return f"has a training.json in which {name} is a {type(facts[name]).__name__}"
    return None


def latest_valid(run_dir: Path, say: Say, refused: Callable[[Path], str | None] = lambda path: None) -> Path | None:
    """The newest checkpoint whose every file has its hash, and of which ``refused`` has nothing to say; ``say`` gets a
    sentence for each newer one that is passed over."""
    for each in reversed(all_checkpoints(run_dir)):
        wrong = damage(each) or refused(each)
        if wrong is None:
            return each
        say(f"{each} {wrong}; skipped.")
    return None


def set_aside(run_dir: Path, after: int, say: Say) -> None:
    """Rename unusable checkpoints newer than step ``after``: they neither count as kept nor stand in the way."""
    for each in all_checkpoints(run_dir):
        if step_of(each) > after:
            number = 1
            while (aside := each.with_name(f"damaged-{number}-{each.name}")).exists():
                number += 1
            os.rename(each, aside)
            say(f"{each.name} is now {aside}; delete it when you have seen it.")


def prune(run_dir: Path, keep_last: int, keep_every: int | None, every: int | None = None) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and those at multiples of ``keep_every`` steps.

    Where they are due ``every`` so many steps, one that a stop has made in between is kept besides, while it is the
    newest: a run that was stopped has the same checkpoints to go back to as one that was not.
    """
    found = all_checkpoints(run_dir)
    due = [each for each in found if every is None or step_of(each) % every == 0]
    kept = {*due[-keep_last:], *found[-1:]}
    for each in found:
        if each not in kept and (keep_every is None or step_of(each) % keep_every):
            # Renamed first: a deletion cut short must not leave a directory that looks like a checkpoint.
            going = each.with_name(f"{TEMPORARY}old-{each.name}")
            os.rename(each, going)
            shutil.rmtree(going)


def clean(run_dir: Path) -> None:
    """Delete what a process that was killed while saving or pruning left; only for the holder of the run's lock."""
    if checkpoints_dir(run_dir).is_dir():
        for each in checkpoints_dir(run_dir).iterdir():
            if each.name.startswith(TEMPORARY):
                shutil.rmtree(each)
