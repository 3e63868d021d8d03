"""Which files a corpus consists of, what identifies them, and how they are dealt out to shards.

A corpus is an ordered list of files. Its identity is their kinds, sizes and SHA-256, not where they lie, so
that the same text elsewhere on the machine is the same data.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from trainledger.engine.data.documents import Segment, problem_of_reading, row_groups
from trainledger.engine.data.files import WRITTEN_HERE, write_whole
from trainledger.spec.durable import content_of, opened, parse_json, sha256
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.run import STANDARD_LIBRARY
from trainledger.spec.units import GIB, KIB, MIB, round_up

RECORD_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".json": "json"}
# Formats whose bytes are no text to train on, with what is read in their place.
_TABLES = dict.fromkeys((".csv", ".tsv", ".xls", ".xlsx", ".ods", ".arrow", ".feather", ".orc", ".avro"), "a table")
_STORED = dict.fromkeys((".npy", ".npz", ".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".h5"), "stored arrays")
_PACKED = dict.fromkeys((".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".rar"), "an archive")
_LAID_OUT = dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".epub"), "a laid-out document")
_NO_TEXT = _TABLES | _STORED | _PACKED | _LAID_OUT | dict.fromkeys((".db", ".sqlite", ".sqlite3"), "a database")
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
LEFT_OUT_OF_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
PIECES_OF_A_CUT_FILE = 256


@dataclass(frozen=True)
class Source:
    """One file of a corpus: ``kind`` is text, jsonl, json (an array) or parquet, ``compression`` gz, zst or nothing."""

    path: str
    kind: str
    compression: str
    nbytes: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus in order; ``skipped`` are binary files met in its directories."""

    sources: tuple[Source, ...]
    skipped: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    @property
    def sha256(self) -> str:
        """The identity of the text: kinds, sizes and hashes of the files in order."""
        identity = [[source.kind, source.compression, source.nbytes, source.sha256] for source in self.sources]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def find_corpus(paths: tuple[str, ...], cache: Path) -> Corpus:
    """The files that ``data.path`` names, each once, in an order that depends on nothing but their names.

    A directory gives every file under it that is not hidden, not binary (a NUL among its first 8 KiB) and not in
    ``cache``.
    The standard library gives its ``.py`` sources without ``site-packages``, without its own tests (most
    distributions leave them away) and without the build settings of one machine: about 12 MB for CPython 3.11.

    Raises InvalidInput where a path or glob matches nothing, or the corpus has no bytes.
    """
    sources: dict[str, Source] = {}
    skipped: list[str] = []
    problems: list[Problem] = []
    for path in paths:
        found = 0
        for file, in_directory in _files_of(path, os.path.realpath(cache)):
            found += 1
            source = _source(file, in_directory=in_directory)
            if isinstance(source, Problem):
                problems.append(source)
            elif in_directory and source.kind == "text" and _is_binary(file):
                skipped.append(file)
            else:
                sources.setdefault(os.path.realpath(file), source)
        if not found:
            problems.append(_matches_nothing(path))
    if problems:
        raise InvalidInput(problems)
    sized = []
    for source in sources.values():
        try:
            sized.append(replace(source, nbytes=os.stat(source.path).st_size))
        except OSError as error:
            raise problem_of_reading(source.path, error) from None
    corpus = Corpus(tuple(each for each in sized if each.nbytes), tuple(skipped))
    if not corpus.sources:
        rule = "holds no text: every file is empty or binary" if sources or skipped else "names no file"
        raise InvalidInput([Problem("data.path", ", ".join(paths), rule, STANDARD_LIBRARY)])
    return corpus


def identify(corpus: Corpus, cache: Path, advance: Callable[[int], None] = lambda nbytes: None) -> Corpus:
    """The corpus with the SHA-256 of every file.

    Hashes are remembered in ``cache`` under path, size and modification time, so that an unchanged corpus of
    any size is identified by looking at its directory; a file changed within two seconds of its hashing is not
    remembered, because a second change might leave the same time.
    """
    memory = cache / "corpus-hashes.json"
    known = _remembered(memory)
    fresh: dict[str, str] = {}

    def hashed(source: Source) -> Source:
        try:
            status = os.stat(source.path)
            key = f"{os.path.abspath(source.path)}|{status.st_size}|{status.st_mtime_ns}"
            digest = known.get(key) or sha256(Path(source.path))
        except OSError as error:
            raise problem_of_reading(source.path, error) from None
        if key not in known and time.time() - status.st_mtime > 2:
            fresh[key] = digest
        advance(status.st_size)
        return replace(source, nbytes=status.st_size, sha256=digest)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        identified = replace(corpus, sources=tuple(threads.map(hashed, corpus.sources)))
    if fresh:
        with contextlib.suppress(OSError):  # a finished store in a cache that is only readable still opens
            hashes = known | fresh
            write_whole(memory, json.dumps({"hashes": hashes, "sha256": _sealed(hashes)}).encode())
    return identified


def _remembered(memory: Path) -> dict[str, str]:
    """The hashes of earlier looks; of a damaged memory none, as a wrong hash would make other data of the same text."""
    try:
        stored = parse_json(content_of(memory, WRITTEN_HERE))
        hashes: dict[str, str] = stored["hashes"]
        return hashes if stored["sha256"] == _sealed(hashes) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _sealed(hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def plan_shards(corpus: Corpus) -> list[list[Segment]]:
    """The corpus dealt out to shards, a function of the files' kinds and sizes alone.

    A shard takes about 1/64 of the corpus, at least 1 MiB and at most 1 GiB of file. A text file is one document
    unless it is over 1 MiB or over a twentieth of the corpus: then it is cut at paragraph ends into about 256
    documents of 1 KiB to 64 KiB each. Uncompressed JSONL is dealt out by byte ranges, Parquet by row groups, a
    compressed file goes to one shard whole.
    """
    whole = corpus.nbytes  # a sum over all files
    target = min(max(whole // 64, MIB), GIB)
    shards: list[list[Segment]] = []
    room = 0
    for number, source in enumerate(corpus.sources):
        for segment, nbytes in _segments(source, target, whole):
            if room <= 0:
                shards.append([])
                room = target
            shards[-1].append(replace(segment, source=number))
            room -= nbytes
    return shards


def _segments(source: Source, target: int, corpus_nbytes: int) -> Iterator[tuple[Segment, int]]:
    whole = Segment(source.path, source.kind, source.compression, source.nbytes, 0, source.nbytes)
    if source.kind == "parquet":
        groups = row_groups(source.path)
        for group in range(groups):
            yield replace(whole, start=group, stop=group + 1), source.nbytes // groups
    elif source.compression or source.kind == "json":
        yield whole, source.nbytes
    elif source.kind == "jsonl":
        for start in range(0, source.nbytes, target):
            stop = min(start + target, source.nbytes)
            yield replace(whole, start=start, stop=stop), stop - start
    elif source.nbytes > MIB or (source.nbytes > corpus_nbytes // 20 and source.nbytes > 2 * KIB):
        piece = min(max(source.nbytes // PIECES_OF_A_CUT_FILE, KIB), 64 * KIB)
        stride = round_up(target, piece)
        for start in range(0, source.nbytes, stride):
            stop = min(start + stride, source.nbytes)
            yield replace(whole, start=start, stop=stop, piece_nbytes=piece), stop - start
    else:
        yield whole, source.nbytes


def _files_of(path: str, cache: str) -> Iterator[tuple[str, bool]]:
    """The files of a path, directory or glob, and whether a directory was searched for them."""
    if path == STANDARD_LIBRARY:
        for file in _walk(sysconfig.get_path("stdlib"), LEFT_OUT_OF_THE_LIBRARY, cache):
            if file.endswith(".py") and not os.path.basename(file).startswith("_sysconfig"):
                yield file, True
        return
    path = os.path.expanduser(path)
    # A file whose own name holds brackets is that file, not a pattern.
    matches = [path] if os.path.exists(path) else sorted(_matches(path))
    for match in matches:
        if os.path.isdir(match):
            for file in _walk(match, {"__pycache__"}, cache):
                yield file, True
        else:
            yield match, False


def _matches(pattern: str) -> Iterator[str]:
    """What a pattern matches, as `glob` has it, but each directory under a ``**`` once: links may lead in a circle."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    before = os.sep.join(parts[:at]) or os.sep * at  # of "/**" the root, of "**" the present directory
    after = os.sep.join(parts[at + 1 :])
    seen: set[str] = set()
    for base in sorted(glob.glob(before)) if glob.has_magic(before) else [before]:
        for folder, files in _folders(base, seen):
            if after:
                yield from _matches(os.path.join(glob.escape(folder), after))
            else:
                yield from (file for file in (folder, *files) if file)


def _folders(folder: str, seen: set[str]) -> Iterator[tuple[str, list[str]]]:
    """A directory and all under it that are not hidden, each once whatever leads to it, with their files."""
    here = folder or os.curdir
    real = os.path.realpath(here)
    if real in seen or not os.path.isdir(here):
        return
    seen.add(real)
    try:
        names = sorted(each for each in os.listdir(here) if not each.startswith("."))
    except OSError:
        return
    paths = [os.path.join(folder, name) for name in names]
    inner = [path for path in paths if os.path.isdir(path)]
    yield folder, [path for path in paths if path not in inner]
    for each in inner:
        yield from _folders(each, seen)


def _walk(directory: str, left_out: set[str], cache: str) -> Iterator[str]:
    for folder, folders, names in os.walk(directory):
        if os.path.realpath(folder) == cache:
            folders.clear()
            continue
        folders[:] = sorted(each for each in folders if each not in left_out and not each.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.isfile(os.path.join(folder, name)):
                yield os.path.join(folder, name)


def _source(path: str, *, in_directory: bool) -> Source | Problem:
    stem, suffix = os.path.splitext(path.lower())
    compression = COMPRESSIONS.get(suffix, "")
    kind = RECORD_SUFFIXES.get(os.path.splitext(stem)[1] if compression else suffix, "text")
    if compression and kind != "jsonl":
        rule = f"is compressed, and of compressed files only .jsonl{suffix} is read: decompress it"
        return Problem("data.path", path, rule, path[: -len(suffix)])
    if not compression and suffix in _NO_TEXT and not (in_directory and _is_binary(path)):
        rule = f"is {_NO_TEXT[suffix]} ({suffix}), whose bytes are no text to train on"
        return Problem("data.path", path, rule, 'write its texts as JSON lines: {"text": ...} in a .jsonl file')
    if kind == "json":
        kind = _kind_of_json(path, in_directory=in_directory)
    return Source(path, kind, compression)


def _kind_of_json(path: str, *, in_directory: bool) -> str:
    """An array of records, JSON lines under another name, or a text among others in a directory."""
    begin = _beginning(path).removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb"\[\s*\{", begin):
        return "json"
    return "text" if in_directory and not re.match(rb"\{[^\n]*\}\s*\n\s*\{", begin) else "jsonl"


def _matches_nothing(path: str) -> Problem:
    if os.path.isdir(os.path.expanduser(path)):
        return Problem("data.path", path, "is a directory without files", STANDARD_LIBRARY)
    rule = "no file matches this pattern" if glob.has_magic(path) else "no such file"
    folder, name = os.path.split(os.path.expanduser(path))
    try:
        near = nearest_text(name, os.listdir(folder or "."))
    except OSError:
        near = None
    return Problem("data.path", path, rule, os.path.join(folder, near) if near else STANDARD_LIBRARY)


def _is_binary(path: str) -> bool:
    return b"\0" in _beginning(path)


def _beginning(path: str) -> bytes:
    try:
        with opened(path) as file:
            return file.read(8 * KIB)
    except OSError as error:
        raise problem_of_reading(path, error) from None
