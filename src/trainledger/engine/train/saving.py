"""Writing a checkpoint: each rank its own tensors, in the background where asked; the directory appears whole.

A rank writes what no other rank before it holds, in two files, without a word to the others. Once all are done the
first rank writes the manifest and gives the directory its name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainledger.engine.train import tensor_file
from trainledger.engine.train.checkpoint import (
    FORMAT,
    MANIFEST,
    TEMPORARY,
    all_checkpoints,
    checkpoints_dir,
    file_names,
)
from trainledger.engine.train.device import synchronize
from trainledger.engine.train.mixed_precision import StandIns
from trainledger.engine.train.parallel.parts import own_parts
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.stop import CannotSave
from trainledger.spec.durable import is_full, sha256, sync, write_json

Files = dict[str, dict[str, Any]]  # size and SHA-256 by name, as the manifest has them


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied one once under its first name."""
    persistent = model.state_dict(keep_vars=True)
    named = {**dict(model.named_parameters()), **{k: v for k, v in model.named_buffers() if k in persistent}}
    return {name: each.detach() for name, each in named.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state as ``<state>/<parameter>``."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        stored = optimizer.stored(parameter) if isinstance(optimizer, StandIns) else optimizer.state.get(parameter, {})
        for key, value in stored.items():
            if value is None:
                continue
            assert isinstance(value, Tensor), f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}"
            tensors[f"{key}/{name}"] = value.detach()
    return tensors


def save(
    run_dir: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, object]
) -> Path:
    """Write the checkpoint of one process and give its directory; raises `CannotSave` where it cannot be written."""
    saver = Saver(run_dir, Ranks(), None, background=False)
    saver.begin(step, model, optimizer, facts)
    return saver.finish()


@dataclass(frozen=True)
class _Begun:
    """A checkpoint that is being written."""

    step: int
    facts: Mapping[str, object]
    write: Callable[[], Files]  # gives this rank's files once they are written; in the foreground it writes them
    written: Callable[[], bool]  # whether nothing is being written in the background


class Saver:
    """The checkpoints of a run, one at a time. All ranks call its methods at the same points.

    ``mesh`` is that of the run's layout (None: one process). In the ``background`` the step loop stands still only
    while tensors are copied to the host, into memory that is kept for the next checkpoint (pinned for a GPU).
    """

    def __init__(self, run_dir: Path, ranks: Ranks, mesh: DeviceMesh | None, *, background: bool) -> None:
        self.run_dir, self.ranks, self.mesh, self.background = run_dir, ranks, mesh, background
        self._begun: _Begun | None = None
        self._staged: dict[str, Tensor] = {}
        self._writer = ThreadPoolExecutor(1, "trainledger checkpoint") if background else None

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was begun that `finish` has not named yet."""
        return self._begun is not None

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing its files; false also where writing failed."""
        return self._begun is not None and not self._begun.written()

    def begin(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, object]) -> None:
        """Take the tensors of this moment. In the background they may change when it returns, else after `finish`.

        Raises `CannotSave` on all ranks where the directory cannot be written.
        """
        assert self._begun is None, "one checkpoint at a time"
        final = checkpoints_dir(self.run_dir) / f"step-{step:08d}"
        directory = final.with_name(f"{TEMPORARY}{final.name}")
        self.ranks.of_first(lambda: _or_cannot_save(lambda: _empty(directory), final))
        parts = [own_parts(each, self.mesh) for each in (model_tensors(model), optimizer_tensors(model, optimizer))]
        names = file_names(self.ranks.rank, self.ranks.size)
        if self._writer is None:

            def write() -> Files:
                return _write(directory, names, [(_on_host(tensors), offsets) for tensors, offsets in parts])

            self._begun = _Begun(step, facts, write, lambda: True)
        else:
            copies = [(self._copied(tensors), offsets) for tensors, offsets in parts]
            files = self._writer.submit(_write, directory, names, copies)
            self._begun = _Begun(step, facts, files.result, files.done)

    def finish(self) -> Path:
        """Wait until all ranks have written, give the checkpoint its name, and give its directory.

        Raises `CannotSave` on all ranks where one cannot write; earlier checkpoints are not touched.
        """
        assert self._begun is not None
        begun, self._begun = self._begun, None
        final = checkpoints_dir(self.run_dir) / f"step-{begun.step:08d}"
        temporary = final.with_name(f"{TEMPORARY}{final.name}")

        def written() -> Files:
            files: Files = _or_cannot_save(begun.write, final)
            return files

        try:
            files = {name: each for by_rank in self.ranks.together(written) for name, each in by_rank.items()}
            facts = {"format": FORMAT, "step": begun.step, **begun.facts}

            def named() -> None:
                _or_cannot_save(lambda: _name(temporary, final, facts, files, self.ranks.size), final)

            self.ranks.of_first(named)
        except BaseException:
            if self.ranks.first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def close(self) -> None:
        """Wait for what is being written and end the thread; an unfinished checkpoint stays without a name."""
        if self._writer is not None:
            self._writer.shutdown(wait=True)

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host, in the same memory each time."""
        found = {}
        for name, each in tensors.items():
            there = self._staged.get(name)
            if there is None or there.shape != each.shape:
                there = torch.empty(each.shape, dtype=each.dtype, pin_memory=each.is_cuda)
                self._staged[name] = there
            found[name] = there.copy_(each, non_blocking=True)
        synchronize(self.ranks.device)
        return found


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.cpu() for name, each in tensors.items()}


def _empty(directory: Path) -> None:
    """An empty directory to write into."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)


def _write(directory: Path, names: tuple[str, str], parts: Any) -> Files:
    """This rank's two files."""
    files: Files = {}
    for name, (tensors, offsets) in zip(names, parts, strict=True):
        nbytes, digest = tensor_file.write(directory / name, tensors, offsets)
        files[name] = {"nbytes": nbytes, "sha256": digest}
    return files


def _name(temporary: Path, final: Path, facts: Mapping[str, object], files: Files, ranks: int) -> None:
    """Write what is left and give the directory its name: the last thing that happens to a checkpoint."""
    training = temporary / "training.json"
    write_json(training, facts)
    listed = {**files, training.name: {"nbytes": training.stat().st_size, "sha256": sha256(training)}}
    in_order = {name: listed[name] for name in sorted(listed)}
    write_json(temporary / MANIFEST, {"format": FORMAT, "ranks": ranks, "files": in_order})
    sync(temporary)
    os.rename(temporary, final)
    sync(final.parent)


def cannot_record(run_dir: Path, step: int, error: OSError) -> CannotSave:
    """Why a run ends whose metrics or state cannot be written, and what it has been saved until."""
    newest = all_checkpoints(run_dir)
    where = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint yet"
    what = "No space for the records" if is_full(error) else "The records cannot be written"
    return CannotSave(f"{what} of step {step} ({error}); {where}.")


def _or_cannot_save(make: Callable[[], Any], final: Path) -> Any:
    """What ``make`` gives; what the system refuses as `CannotSave`."""
    try:
        return make()
    except OSError as error:
        kept = all_checkpoints(final.parent.parent)
        newest = f"the newest checkpoint is {kept[-1]}, untouched" if kept else "there is no checkpoint yet"
        step = int(final.name.removeprefix("step-"))
        what = f"No space to save step {step}" if is_full(error) else f"Step {step} cannot be saved"
        raise CannotSave(f"{what} under {final.parent} ({error}); {newest}.") from error
