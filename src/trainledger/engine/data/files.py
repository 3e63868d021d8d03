"""Files that are whole or not there: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from trainledger.spec.durable import is_full, sync
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import MIB

BLOCK_NBYTES = MIB


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
    with open(path, "rb") as file:
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
