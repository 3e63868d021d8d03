"""Files that are there whole or not at all, whenever the power goes, and written by one process at a time."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISREG
from typing import Any

LARGEST_NBYTES = 2**26  # of a file that is read whole: a ledger of a large model has some 10 MB
_KINDS = ((S_ISFIFO, "a pipe"), (S_ISCHR, "a device"), (S_ISBLK, "a device"))
# What the system says when a disk, a quota or a file-size limit is full.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What it says where a file may not be written any longer.
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


def opened(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file to be read; OSError with a sentence for what is no regular file: a pipe would be waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"it is no path: {error}", os.fspath(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not S_ISREG(mode):
        os.close(descriptor)
        if S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "a socket")
        raise OSError(errno.EINVAL, f"it is not a regular file but {kind}", os.fspath(path))
    return open(descriptor, "rb")


def content_of(path: str | os.PathLike[str], most: int = LARGEST_NBYTES) -> str:
    """The text of a file in UTF-8; OSError where it is no regular file or longer, else UnicodeDecodeError."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
    return content.decode()


def sync(path: Path) -> None:
    """Have the system write a file's bytes, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by new text in one motion."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def parse_json(text: str | bytes) -> Any:
    """JSON text as plain data; ValueError also where it is nested more deeply than the reader can follow."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Replace a JSON file in one motion."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def held(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold a file, made where missing, or a directory, against all who ask for it in this way.

    Where another process holds it: ``wait`` until it is free, else BlockingIOError. The system releases it when the
    process ends, however it ends. Raises OSError where it cannot be opened, or its file system has no locks.
    """
    import fcntl

    flags = os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """The SHA-256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_full(error: Exception) -> bool:
    """An error says that the disk, the quota or the size limit of files is reached."""
    if isinstance(error, OSError):
        return error.errno in FULL
    # safetensors wraps the system's error in its own and keeps only the text.
    return any(f"os error {code}" in str(error) for code in FULL)
