"""Checkpoints: directories that appear whole, carry the hash of each file, and are believed only when it fits.

``<run_dir>/checkpoints/step-00000100/`` holds

- ``model.safetensors``: parameters by name (a tied weight once)
- ``optimizer.safetensors``: optimizer state as ``<state>/<parameter>``
- ``training.json``: step, losses, seconds, and what run, data and number of threads it is of
- ``manifest.json``: size and SHA-256 of each file above

Batches and dropout are functions of the step, so no generator state is stored. No file holds pickled objects.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainledger.durable import is_full, parse_json, sha256, sync, write_json
from trainledger.train.stop import CannotSave

Say = Callable[[str], None]

FORMAT = 1
MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{8,})")


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


def save(
    run_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, object]
) -> Path:
    """Write the checkpoint of a step and give its directory; a reader sees all of it or none.

    Raises `CannotSave` where the disk is full; earlier checkpoints are not touched.
    """
    parent = checkpoints_dir(run_dir)
    final = parent / f"step-{step:08d}"
    temporary = parent / f"{_TEMPORARY}{final.name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_file(model_tensors(model), temporary / "model.safetensors")
        save_file(optimizer_tensors(model, optimizer), temporary / "optimizer.safetensors")
        write_json(temporary / "training.json", {"format": FORMAT, "step": step, **facts})
        files = sorted(temporary.iterdir())
        for each in files:
            # safetensors makes files that only their owner may read; a checkpoint is as readable as any file here.
            shutil.copymode(temporary / "training.json", each)
            sync(each)
        hashes = {each.name: {"nbytes": each.stat().st_size, "sha256": sha256(each)} for each in files}
        write_json(temporary / MANIFEST, {"format": FORMAT, "files": hashes})
        sync(temporary)
        os.rename(temporary, final)
        sync(parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not is_full(error):
            raise
        kept = all_checkpoints(run_dir)
        newest = f"the newest checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise CannotSave(f"No space to save step {step} under {parent} ({error}); {newest}, untouched.") from error
    return final


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, on the CPU, a tied one once under its first name."""
    persistent = model.state_dict(keep_vars=True)
    named = {**dict(model.named_parameters()), **{k: v for k, v in model.named_buffers() if k in persistent}}
    return {name: each.detach().cpu().contiguous() for name, each in named.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state as ``<state>/<parameter>``, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            assert isinstance(value, Tensor), f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}"
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return tensors


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a valid checkpoint's weights and optimizer state in place and give its facts."""
    stored = load_file(path / "model.safetensors")
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in stored.items():
            own[name].copy_(value)
    names = {parameter: name for name, parameter in model.named_parameters()}
    index = {
        names[parameter]: number
        for number, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"])
    }
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in load_file(path / "optimizer.safetensors").items():
        part, _, name = key.partition("/")
        state.setdefault(index[name], {})[part] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return read_facts(path)


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
        if not {"model.safetensors", "optimizer.safetensors", "training.json"} <= files.keys():
            return "has a manifest that lacks a file"
        for name, listed in files.items():
            nbytes = (path / name).stat().st_size
            if nbytes != listed["nbytes"]:
                return f"has {nbytes} bytes in {name}, and the manifest says {listed['nbytes']}"
            if sha256(path / name) != listed["sha256"]:
                return f"has a {name} whose SHA-256 is not the manifest's"
    except FileNotFoundError as error:
        return f"lacks {Path(error.filename).name}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    return None


def latest_valid(run_dir: Path, say: Say) -> Path | None:
    """The newest checkpoint whose every file has its hash; ``say`` gets a sentence for each damaged newer one."""
    for each in reversed(all_checkpoints(run_dir)):
        wrong = damage(each)
        if wrong is None:
            return each
        say(f"{each} {wrong}; skipped.")
    return None


def set_aside(run_dir: Path, after: int, say: Say) -> None:
    """Rename damaged checkpoints newer than step ``after``, so that they neither count as kept nor stand in the way."""
    for each in all_checkpoints(run_dir):
        if step_of(each) > after:
            number = 1
            while (aside := each.with_name(f"damaged-{number}-{each.name}")).exists():
                number += 1
            os.rename(each, aside)
            say(f"{each.name} is now {aside}; delete it when you have seen it.")


def prune(run_dir: Path, keep_last: int, keep_every: int | None) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and those at multiples of ``keep_every`` steps."""
    for each in all_checkpoints(run_dir)[:-keep_last]:
        if keep_every is None or step_of(each) % keep_every:
            # Renamed first: a deletion cut short must not leave a directory that looks like a checkpoint.
            going = each.with_name(f"{_TEMPORARY}old-{each.name}")
            os.rename(each, going)
            shutil.rmtree(going)


def clean(run_dir: Path) -> None:
    """Delete what a process that was killed while saving or pruning left; only for the holder of the run's lock."""
    if checkpoints_dir(run_dir).is_dir():
        for each in checkpoints_dir(run_dir).iterdir():
            if each.name.startswith(_TEMPORARY):
                shutil.rmtree(each)
