"""The state of a replica on its way to another: a file of tensors and one of JSON, next to the run's directory.

torchft's own ways send a pickle through a port that is open to the network. All replicas share the folder of runs
anyway, and what reads safetensors and JSON runs nothing. A replica of another run finds the files too, and is refused.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from safetensors.torch import load

from trainledger.engine.train import tensor_file
from trainledger.engine.train.checkpoint import TEMPORARY
from trainledger.spec.durable import parse_json, write_json

_TENSORS, _REST = "tensors.safetensors", "state.json"
_KINDS = ("model", "optimizer")  # of a state (`handing_over.give`), what is tensors by name
_SECONDS_BETWEEN_LOOKS = 0.02


class HandedFiles:
    """torchft's ``CheckpointTransport``: each process writes under a name of its own, of which it keeps the last."""

    def __init__(self, run_dir: Path, index: int) -> None:
        self._folder = run_dir.parent / ".handed-over"
        replica = f"{run_dir.name}-{index:05d}-"
        self._remove(f"{replica}*")  # of an earlier process of this replica
        self._name = f"{replica}{secrets.token_hex(8)}"

    def metadata(self) -> str:
        """The name that the process that comes is told."""
        return self._name

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        """Write the state of this moment; raises OSError."""
        given = state_dict["user"]["run"]
        tensors = {f"{kind}/{name}": each.cpu() for kind in _KINDS for name, each in given[kind].items()}
        rest = {name: each for name, each in given.items() if name not in _KINDS}
        final = self._folder / f"{self._name}-{step}"
        self._remove(f"{self._name}-*")
        writing = self._folder / f"{TEMPORARY}{final.name}"
        writing.mkdir(parents=True)
        tensor_file.write(writing / _TENSORS, tensors, {})
        write_json(writing / _REST, {"run": rest, "torchft": state_dict["torchft"]})
        os.rename(writing, final)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """The state that another process has written under its name; raises `TimeoutError` where it does not come."""
        path = self._folder / f"{Path(metadata).name}-{step}"
        deadline = time.monotonic() + timeout.total_seconds()
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} does not come: do all replicas see the same directory?")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        found = parse_json((path / _REST).read_bytes())
        given: dict[str, Any] = {**found["run"], **{kind: {} for kind in _KINDS}}
        # Read and not mapped: the sender removes the file, which not every shared file system allows a map of.
        for name, each in load((path / _TENSORS).read_bytes()).items():
            kind, _, own = name.partition("/")
            given[kind][own] = each
        return {"user": {"run": given}, "torchft": found["torchft"]}

    def disallow_checkpoint(self) -> None:
        """Nothing: a file does not change with the run."""

    def shutdown(self, wait: bool = True) -> None:
        """Remove what this process has written."""
        self._remove(f"{self._name}-*")

    def _remove(self, pattern: str) -> None:
        for each in (*self._folder.glob(pattern), *self._folder.glob(f"{TEMPORARY}{pattern}")):
            shutil.rmtree(each, ignore_errors=True)
        with suppress(OSError):  # others have files in it
            self._folder.rmdir()
