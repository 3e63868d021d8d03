"""A directory that is either there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainledger.durable import sync
from trainledger.spec.problem import InvalidInput, Problem, shown


@contextmanager
def whole_directory(directory: Path, *, force: bool = False, ours: frozenset[str] = frozenset()) -> Iterator[Path]:
    """An empty directory to write into; on leaving the block it becomes ``directory``, after an error it is gone.

    A ``directory`` with something in it is refused, before the block runs. With ``force`` it is replaced,
    but only if it holds no other names than ``ours``, so that nobody's files are lost.
    """
    directory = directory.resolve()
    refuse_occupied(directory, force=force, ours=ours)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise _refusal(directory, f"cannot be made here: {error.strerror}") from error
    try:
        yield partial
        readable = partial.stat().st_mode & 0o666  # what the umask leaves
        for each in partial.iterdir():
            each.chmod(readable)  # safetensors makes files that only their owner may read
            sync(each)
        sync(partial)
        refuse_occupied(directory, force=force, ours=ours)
        _put(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_occupied(directory: Path, *, force: bool, ours: frozenset[str]) -> None:
    """Raise `InvalidInput` where writing ``directory`` would cost somebody a file."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise _refusal(directory, "exists and is not a directory")
    names = sorted(each.name for each in directory.iterdir())
    strangers = [name for name in names if name not in ours]
    if names and not force:
        raise _refusal(directory, "exists and is not empty; --force replaces it")
    if strangers:
        rule = f"holds {shown(strangers[0])}, which this command did not write; it replaces only what it wrote itself"
        raise _refusal(directory, rule)


def _put(partial: Path, directory: Path) -> None:
    """Give ``partial`` its name; what had the name before goes only after that worked."""
    former = None
    if directory.is_dir():
        if any(directory.iterdir()):
            former = directory.with_name(f".{directory.name}.former-{os.getpid()}")
            directory.rename(former)
        else:
            directory.rmdir()
    try:
        partial.rename(directory)
    except OSError:
        if former is not None:
            former.rename(directory)
        raise
    sync(directory.parent)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)


def _refusal(directory: Path, rule: str) -> InvalidInput:
    return InvalidInput([Problem(directory.name, None, rule)], str(directory.parent))
