"""Files that are there whole or not at all, whenever the power goes, and written by one process at a time."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What the system says when a disk, a quota or a file-size limit is full.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What it says where a file may not be written any longer.
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


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
    with path.open("rb") as file:
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
