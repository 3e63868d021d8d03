"""Files that are whole or not there: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainledger.spec.durable import content_of, is_full, opened, parse_json, sync
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import MIB

# A CRC for each MiB: a damaged block is named to the MiB, and a start reads only what it trains on (SHA-256 of a whole
# shard would be 1 GiB).
BLOCK_NBYTES = MIB
WRITTEN_HERE = 1024 * MIB  # the most that is read of an index or a memory of ours


@dataclass(frozen=True)
class FileRecord:
    """What a written file must be: its size, its SHA-256, and a CRC-32 per MiB that shows where it differs."""

    name: str
    nbytes: int
    sha256: str
    crc32: tuple[int, ...]


class Checksum:
    """SHA-256 over everything and CRC-32 over each MiB of what is fed to it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sha256 = hashlib.sha256()
        self._crc32: list[int] = []

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._sha256.update(view)
        while view:
            room = BLOCK_NBYTES - self.nbytes % BLOCK_NBYTES
            if room == BLOCK_NBYTES:
                self._crc32.append(0)
            self._crc32[-1] = zlib.crc32(view[:room], self._crc32[-1])
            self.nbytes += min(room, len(view))
            view = view[room:]

    def record(self, name: str) -> FileRecord:
        return FileRecord(name, self.nbytes, self._sha256.hexdigest(), tuple(self._crc32))


class FileWriter:
    """Writes one file under a temporary name; `finish` makes it durable and gives it its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._checksum = Checksum()
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by finish or abandon

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._checksum.update(data)

    def finish(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        return self._checksum.record(self.path.name)

    def abandon(self) -> None:
        """Close and remove what was written so far; nothing where it is already finished."""
        with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file durably: afterwards ``path`` holds all of ``data`` or what it held before."""
    writer = FileWriter(path)
    try:
        writer.write(data)
        writer.finish()
    finally:
        writer.abandon()
    sync(path.parent)


def file_problem(field: str, path: Path | str, rule: str, remedy: str = "") -> Problem:
    """What is wrong with a file; the sentence has its whole path, which `Problem` would cut short as a value."""
    return Problem(field, None, f"{path} {rule}" + (f"; {remedy}" if remedy else ""))


def check_file(path: Path, wanted: FileRecord) -> Problem | None:
    """What is wrong with a whole file, read from end to end, naming the first differing MiB."""
    wrong = check_size(path, wanted.nbytes)
    if wrong:
        return wrong
    seen = Checksum()
    with opened(path) as file:
        while block := file.read(BLOCK_NBYTES):
            seen.update(block)
    record = seen.record(wanted.name)
    if record.sha256 == wanted.sha256:
        return None
    differing = [n for n, (a, b) in enumerate(zip(record.crc32, wanted.crc32, strict=False)) if a != b]
    place = ""
    if differing:
        start = differing[0] * BLOCK_NBYTES
        place = f" between byte {start} and byte {min(start + BLOCK_NBYTES, wanted.nbytes)}"
    rule = f"is corrupt: its SHA-256 is not the recorded one, and it differs{place}"
    return file_problem("data.cache", path, rule, REMEDY)


REMEDY = "remove this file and prepare again, which makes this shard again"


def check_size(path: Path, nbytes: int) -> Problem | None:
    """What is wrong with a file's size, which a truncation changes."""
    try:
        present = path.stat().st_size
    except OSError as error:
        return file_problem("data.cache", path, f"cannot be read: {error.strerror}", REMEDY)
    if present == nbytes:
        return None
    how = f"is truncated: it ends at byte {present}, not" if present < nbytes else f"has {present} bytes, not"
    return file_problem("data.cache", path, f"{how} {nbytes}", REMEDY)


def problem_of_writing(path: Path | str, error: OSError) -> InvalidInput | OSError:
    """A cache that cannot be written, as a sentence; a full disk as the error that it is, with the name of the file."""
    place = error.filename if isinstance(error.filename, str) else str(path)
    if is_full(error):
        return OSError(error.errno, error.strerror, place)
    rule = f"cannot be written: {error.strerror or error}"
    return InvalidInput([file_problem("data.cache", place, rule, "name a directory on a disk that takes more")])


# Files of a token store that this machine has found whole are remembered by inode, size and modification time: bytes
# are compared with the recorded CRC-32 of each MiB when they are first read, and no more once every block was, until
# the file changes. Another machine, whose memory or network may harm what this one reads well, remembers its own.


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
        known = parse_json(content_of(path, WRITTEN_HERE))
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
