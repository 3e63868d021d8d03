"""Output files of a verb: none over what the verb reads, over source, or over one another."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainledger.spec.plain import check_target
from trainledger.spec.problem import InvalidInput, Problem

SOURCES = (".py", ".pyi", ".ipynb", ".toml", ".lock")
_LARGEST_NBYTES = 2**20  # of a run file whose own files are looked for
_MOST_TRIED = 1000


class Output(argparse.Action):
    """An argument that names a file to write.

    The path is kept for `outputs.check_outputs`. ``suffix`` is that of what is written; ``ours`` says which
    files of source or settings may be written anew, and ``check`` raises where none can be written.
    """

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, suffix: str, ours: Callable[[Path], bool] | None = None,
        check: Callable[[str, str], None] = check_target, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(option_strings, dest, **options)
        self.suffix, self.ours, self.check = suffix, ours, check

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.outputs = [*getattr(namespace, "outputs", []), (flag or self.dest, self)]


def check_outputs(args: dict[str, Any], outputs: list[tuple[str, Output]]) -> None:
    """Raise InvalidInput where a file to be written is one that the command reads, is source, or is named twice."""
    asked: dict[str, tuple[str, Output]] = {action.dest: (flag, action) for flag, action in outputs}
    values = {name: value for name, value in args.items() if name not in asked}
    problems, taken = [], set[str]()
    for name, (flag, action) in asked.items():
        file = args[name]
        if not file:
            continue
        path, where = Path(file), os.path.realpath(file)
        if where in taken:
            rule: str | None = "is the name of two output files"
        else:
            rule = _why_not(path, action, values) if path.is_file() else None
        taken.add(where)
        if rule is not None:
            problems.append(Problem(flag, file, rule, _free(path, action, taken)))
    if problems:
        raise InvalidInput(problems)
    for name, (flag, action) in asked.items():
        action.check(args[name], flag)


def _why_not(path: Path, action: Output, values: dict[str, Any]) -> str | None:
    """What is lost where an existing file is written anew; None where nothing is."""
    for each in _named(values):
        if each.is_file() and each.samefile(path):
            return "is a file that this command reads, and would be overwritten"
        if each.is_dir() and each.resolve() in path.resolve().parents and path.suffix != Path(action.suffix).suffix:
            return f"is a file of {os.fspath(each)}, which this command reads, and would be overwritten"
    for each in (each for given in _named(values) for each in _named_in(given)):
        if each.is_file() and each.samefile(path):
            return "is a file that the run file names, and would be overwritten"
    if path.suffix in SOURCES and not (action.ours is not None and action.ours(path)):
        return "exists already, and source and settings are not overwritten"
    return None


def _named(values: object) -> Iterator[Path]:
    """The paths that values may be: each text, what follows its ``=`` and, of ``package.module:name``, its file."""
    if isinstance(values, Path):
        yield values
    elif isinstance(values, str):
        for each in {values, values.partition("=")[2]} - {""}:
            if "\0" not in each and len(each) < 4096:
                yield Path(each)
    elif isinstance(values, dict):
        for each in values.values():
            yield from _named(each)
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _named(each)


def _named_in(run_file: Path) -> Iterator[Path]:
    """The paths that a run file may name, from where it lies and from the working directory."""
    try:
        if run_file.suffix != ".toml" or run_file.stat().st_size > _LARGEST_NBYTES:
            return
        table = tomllib.loads(run_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # whoever reads it says what is wrong
    for each in _named(table):
        yield from (each, run_file.parent / each)


def _free(path: Path, action: Output, taken: set[str]) -> str | None:
    """The nearest name, with the suffix of what is written, that no file has."""
    stem = path.name.removesuffix(action.suffix) if path.name.endswith(action.suffix) else path.stem
    for number in range(1, _MOST_TRIED):
        name = path.with_name(f"{stem}{f'-{number}' if number > 1 else ''}{action.suffix}")
        if not os.path.lexists(name) and os.path.realpath(name) not in taken:
            return os.fspath(name)
    return None
