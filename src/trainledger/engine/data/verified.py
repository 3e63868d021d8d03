"""Which files of a token store this machine has found whole, remembered by inode, size and modification time.

A file's bytes are compared with its recorded CRC-32 of each MiB when they are read for the first time. Once every block
of it was, it is remembered here, and read without comparing until it changes. Another machine, whose memory or network
may harm what this one reads well, keeps a separate memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainledger.engine.data.files import BLOCK_NBYTES, REMEDY, FileRecord, file_problem, write_whole
from trainledger.spec.durable import parse_json
from trainledger.spec.problem import InvalidInput

SECONDS_OF_A_TIMESTAMP = 2  # a change within them may leave the same modification time

Identity = list[int]  # inode, size, modification time in ns


def identity(path: Path) -> Identity:
    """What changes when somebody writes to a file or puts another in its place."""
    status = os.stat(path)
    return [status.st_ino, status.st_size, status.st_mtime_ns]


class Verified:
    """The memory of this machine for the files of one store."""

    def __init__(self, directory: Path) -> None:
        machine = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
        self.path = directory / f"verified-{machine}.json"
        self._known = _read(self.path)

    def knows(self, name: str, found: Identity) -> bool:
        """Whether the present file of that name was found whole."""
        return self._known.get(name) == found

    def remember(self, name: str, found: Identity) -> None:
        """Keep that a file was whole, where the directory can be written."""
        if time.time() - found[2] / 1e9 <= SECONDS_OF_A_TIMESTAMP:
            return
        self._known = _read(self.path) | self._known | {name: found}  # other processes verify other files
        with suppress(OSError):
            write_whole(self.path, json.dumps(self._known).encode())


def _read(path: Path) -> dict[str, Identity]:
    """What is remembered; of a damaged memory nothing."""
    try:
        known = parse_json(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {name: each for name, each in known.items() if isinstance(each, list)}


class Blocks:
    """The blocks of one open file that are not compared yet."""

    def __init__(self, path: Path, record: FileRecord, verified: Verified) -> None:
        self._path, self._record, self._verified = path, record, verified
        self._identity = identity(path)
        known = verified.knows(record.name, self._identity)
        self._left = set() if known else set(range(len(record.crc32)))

    def check(self, data: npt.NDArray[Any], start: int, count: int) -> None:
        """Compare the blocks with ``count`` elements of a file from ``start`` on.

        ``data`` is the whole file. InvalidInput names the first block that differs.
        """
        if not self._left or not count:
            return
        nbytes = data.view(np.uint8)
        start, stop = start * data.itemsize, (start + count) * data.itemsize
        for block in range(start // BLOCK_NBYTES, (stop - 1) // BLOCK_NBYTES + 1):
            if block not in self._left:
                continue
            begin = block * BLOCK_NBYTES
            part = nbytes[begin : begin + BLOCK_NBYTES]
            if zlib.crc32(part.data) != self._record.crc32[block]:
                rule = f"is corrupt: its CRC-32 is not the recorded one between byte {begin} and {begin + len(part)}"
                raise InvalidInput([file_problem("data.cache", self._path, rule, REMEDY)])
            self._left.discard(block)
        if not self._left:
            self._verified.remember(self._record.name, self._identity)
