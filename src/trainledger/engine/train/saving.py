"""Writing a checkpoint, in the background where asked, and reading it into the ranks of any layout.

A rank writes what no other rank before it holds, in two files, without a word to the others. Once all are done the
first rank writes the manifest and gives the directory its name: it appears whole. A file is a stream (no second copy of
the tensors), hashed while it is written. It may hold parts of tensors: its header then says where each begins, as
``torch.distributed.checkpoint.hf_storage`` has it. https://github.com/huggingface/safetensors describes the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as read_parts
from torch.distributed.device_mesh import DeviceMesh

from trainledger.engine.nn.weights import OFFSETS, stored_in
from trainledger.engine.train.device import synchronize
from trainledger.engine.train.observer import GuardRecord, TrainingState
from trainledger.engine.train.parallel.mesh import own_parts
from trainledger.engine.train.precision import StandIns
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.run_directory import (
    FORMAT,
    MANIFEST,
    TEMPORARY,
    all_checkpoints,
    checkpoints_dir,
    file_names,
    read_facts,
)
from trainledger.engine.train.stop import CannotSave
from trainledger.spec.durable import is_full, sha256, sync, write_json

FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in FORMATS.items()}
_ALIGNMENT = 8  # of the first tensor's bytes
_AT_ONCE = 64 * 2**20


def write_tensors(path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]) -> tuple[int, str]:
    """Write CPU tensors and have them on the disk; the file's bytes and its SHA-256.

    ``offsets`` are where parts of tensors begin; tensors that are not named there are whole. Raises OSError.
    """
    # Wide formats first, so that each tensor is aligned; then by name, so that equal tensors make an equal file.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    places = {name: {"saved_offsets": list(offsets.get(name, [0] * part.dim()))} for name, part in tensors.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt", OFFSETS: json.dumps(places)}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            file.write(piece)
            digest.update(piece)
        for tensor in tensors.values():
            array: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
            data = memoryview(array)
            for begin in range(0, len(data), _AT_ONCE):
                digest.update(data[begin : begin + _AT_ONCE])
                file.write(data[begin : begin + _AT_ONCE])
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


Files = dict[str, dict[str, Any]]  # size and SHA-256 by name, as the manifest has them


# `named_parameters` names a tied weight once and `state_dict` under each of its names: from the latter a file would
# hold the matrix twice.
def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied one once under its first name; none of a frozen reference."""
    persistent = model.state_dict(keep_vars=True)
    named = {**dict(model.named_parameters()), **{k: v for k, v in model.named_buffers() if k in persistent}}
    return {name: tensor.detach() for name, tensor in named.items() if not name.startswith("reference.")}


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


# The loop stands still 1.3 to 15 ms for a checkpoint of 40 MB in the background on an H200 (torch 2.11); killed and
# resumed, 300 steps end with the same bits.
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

    # Not torch.distributed.checkpoint's writer (2.13): of 400 MB of tensors it holds 782 MB of copies while it writes
    # (`write_tensors`: 1 MB), and the file has to be read again for its hash. Without collectives (`no_dist`) each rank
    # names its file shard-00001, and with them a rank in the background would talk in the midst of others' steps.

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
                on_host = [({name: part.cpu() for name, part in some.items()}, offsets) for some, offsets in parts]
                return _write(directory, names, on_host)

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

    # Steps stand still 3.9 s for a checkpoint of 956 MB in the foreground and 0.18 to 0.26 s in the background; the
    # first time 0.7 to 1.4 s, while the memory of the copies is new (two cores, torch 2.13).
    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host, in the same memory each time."""
        found = {}
        for name, tensor in tensors.items():
            there = self._staged.get(name)
            if there is None or there.shape != tensor.shape:
                there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._staged[name] = there
            found[name] = there.copy_(tensor, non_blocking=True)
        synchronize(self.ranks.device)
        return found


def _empty(directory: Path) -> None:
    """An empty directory to write into."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)


def _write(directory: Path, names: tuple[str, str], parts: Any) -> Files:
    """This rank's two files."""
    files: Files = {}
    for name, (tensors, offsets) in zip(names, parts, strict=True):
        nbytes, digest = write_tensors(directory / name, tensors, offsets)
        files[name] = {"nbytes": nbytes, "sha256": digest}
    return files


# The directory is synced before the rename and its parent after it: a rename that is on the disk before the files would
# show a whole checkpoint with empty ones after a power cut. 306 kills, 61 of them in a save: no resume failed, no
# weights differed.
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


# Reading: torch.distributed.checkpoint puts the parts together. It reads the files' headers, and of their bytes those
# that this rank holds. Nothing is pickled.


def restore(state: TrainingState, path: Path, say: Callable[[str], None]) -> None:
    """Put a checkpoint's tensors and figures in place of those of a run, which may be in the midst of it."""
    state.optimizer.state.clear()  # so that they are not in memory twice
    if isinstance(state.optimizer, StandIns):
        state.optimizer.inner.state.clear()
    facts = load(path, state.model, state.optimizer)
    if state.scaler is not None:
        state.scaler.restore(facts["loss_scale"])
    for name in ("step", "loss", "validation_loss", "seconds"):
        setattr(state, name, facts[name])
    state.initial_weights = facts.get("initial_weights")
    state.guard = GuardRecord(**facts["guard"])
    if facts["threads"] != torch.get_num_threads():
        threads = f"{facts['threads']} threads and goes on with {torch.get_num_threads()}"
        say(f"{path.name} was made with {threads}: the last bits may differ.")


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put this rank's part of a valid checkpoint's weights and optimizer state in place, and give its facts."""
    read_into(path, model_tensors(model))
    states = _states(path, _like(model, optimizer))
    read_into(path, {f"{key}/{name}": tensor for name, own in states.items() for key, tensor in own.items()})
    names = {parameter: name for name, parameter in model.named_parameters()}
    in_order = [names[each] for group in optimizer.param_groups for each in group["params"]]
    by_number = {number: states[name] for number, name in enumerate(in_order) if name in states}
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})
    return read_facts(path)


# `no_dist`: each rank reads its own parts; the coordinated load of torch would gather plans over the default group.
def read_into(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors by name from the safetensors files of a directory; of a DTensor this rank's part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        read_parts(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def _like(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By parameter, a tensor of which this rank stores as much as of its states."""
    named = dict(model.named_parameters())
    if isinstance(optimizer, StandIns):
        return {
            name: optimizer.like(parameter) for name, parameter in named.items() if parameter in optimizer.stand_ins
        }
    return dict(named)


def _states(path: Path, own: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Empty tensors for the stored optimizer state of this rank's parameters, by parameter and state.

    A state with the shape of its parameter is divided among ranks as ``own`` is; others are whole.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, stored in stored_in(sorted(path.glob("optimizer*.safetensors"))).items():
        state, _, name = key.partition("/")
        if name not in own:
            continue
        parameter, dtype = own[name].detach(), FORMATS[stored.format]
        alike = tuple(parameter.shape) == stored.shape
        made = torch.empty_like(parameter, dtype=dtype) if alike else torch.empty(stored.shape, dtype=dtype)
        found.setdefault(name, {})[state] = made
    return found
