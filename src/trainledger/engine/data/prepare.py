"""Makes the token store of a corpus, or finds it made.

The store's directory is named by the identity of its content: the files of the corpus (kinds, sizes, SHA-256),
the tokenizer, the held-out share. So a changed corpus or tokenizer makes a new store, and a killed preparation goes
on where it was: shards with a record are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainledger.engine.data.corpus import Corpus, find_corpus, identify, plan_shards
from trainledger.engine.data.documents import Segment, documents, problem_of_reading
from trainledger.engine.data.files import WRITTEN_HERE, check_file, file_problem, problem_of_writing, write_whole
from trainledger.engine.data.shard import DAMAGED, ShardRecord, read_counts, read_record
from trainledger.engine.data.store import FORMAT, INDEX, TOKENIZER, TokenStore, open_store, read_index, with_checksum
from trainledger.engine.data.tokenizer import BYTE_VALUES, ByteTokenizer, Tokenizer, json_tokenizer, read_tokenizer
from trainledger.engine.data.workers import default_workers, run_jobs
from trainledger.engine.remarks import unheard
from trainledger.spec.dtypes import token_dtype
from trainledger.spec.durable import content_of, held, sha256
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import DataSpec, MixtureSource
from trainledger.spec.units import MIB

SMALLEST_BPE = BYTE_VALUES + 1
MOST_UNKNOWN, SAID_UNKNOWN = 0.5, 0.01  # shares of tokens that stand for text which the vocabulary cannot spell
WORTH_PROCESSES_NBYTES = 4 * MIB
NAME_DIGITS = 16

Advance = Callable[[int], None]
Progress = Callable[[str, int | None], contextlib.AbstractContextManager[Advance]]


@dataclass(frozen=True)
class Text:
    """A corpus that becomes a token store: its files, and how they are dealt out to shards."""

    name: str
    data: DataSpec
    corpus: Corpus
    plan: list[list[Segment]]
    seen: tuple[tuple[int, int, int], ...]  # of each file before it was hashed: its size and times


def prepare(data: DataSpec, *, vocab_size: int | None, progress: bool, workers: int | None = None) -> TokenStore:
    """The token store of a corpus (of data without a mixture), made where it does not exist yet.

    ``vocab_size`` is that of a bpe tokenizer where ``data.vocab_size`` is absent. ``progress`` shows bars where
    standard error is a terminal. ``workers`` are processes; absent, one per core up to four, and none for a corpus
    under 4 MiB. The store's bytes do not depend on them.

    Raises InvalidInput for text that cannot be read, a corpus too small to hold anything out, a cache that cannot
    be written, and a store that is damaged.
    """
    (store,) = prepare_each(data, vocab_size=vocab_size, progress=progress, workers=workers)
    return store


def prepare_each(
    data: DataSpec, *, vocab_size: int | None, progress: bool, workers: int | None = None
) -> tuple[TokenStore, ...]:
    """The token store of each source, as `prepare` makes that of a corpus, all with one tokenizer.

    A bpe tokenizer is trained on the text of all sources, whatever their weights.
    """
    if "\0" in data.cache:
        raise InvalidInput([Problem("data.cache", data.cache, "has a NUL character, which no path has", "cache")])
    cache = Path(data.cache).expanduser()
    terminal = sys.stderr is not None and sys.stderr.isatty()  # None where the process was started with it closed
    shown: Progress = _bars if progress and terminal else _nothing_shown
    try:
        cache.mkdir(parents=True, exist_ok=True)
        texts = [_found(name, data_spec, cache, shown) for name, data_spec in data.sources]
        if workers is None:
            nbytes = sum(text.corpus.nbytes for text in texts)
            workers = default_workers() if nbytes >= WORTH_PROCESSES_NBYTES else 0
        tokenizer = _tokenizer(data, vocab_size, texts, cache, workers, shown)
        directories = [_made(text, tokenizer, cache, workers, shown, progress=progress) for text in texts]
    except OSError as error:
        raise problem_of_writing(cache, error) from None
    return tuple(open_store(directory) for directory in directories)


def _found(name: str, data: DataSpec, cache: Path, shown: Progress) -> Text:
    """The text of a source, identified."""
    with _named(name):
        corpus = find_corpus(data.path, cache)
        seen = _seen(corpus)
        with shown(f"identifying {name or 'the corpus'}", corpus.nbytes) as advance:
            corpus = identify(corpus, cache, advance)
        return Text(name, data, corpus, plan_shards(corpus), seen)


def _seen(corpus: Corpus) -> tuple[tuple[int, int, int], ...]:
    """Size, modification time and change time of each file, of which the last cannot be set back."""
    try:
        found = (os.stat(source.path) for source in corpus.sources)
        return tuple((each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found)
    except OSError as error:
        raise problem_of_reading(str(error.filename), error) from None


def text_field_of(data: DataSpec) -> str:
    """The first of the usual fields that the first record of a corpus has text in; ``data.text_field`` where none is.

    Raises InvalidInput where nothing is found.
    """
    segment = plan_shards(find_corpus(data.path, Path(data.cache).expanduser()))[0][0]
    for name in _TEXT_FIELDS:
        with contextlib.suppress(InvalidInput):
            next(documents(segment, name), None)
            return name
    return data.text_field


# Of plain text, of conversations (OpenAI and TRL, ShareGPT), and of code.
_TEXT_FIELDS = ("text", "messages", "conversations", "content", "conversation")


def _made(text: Text, tokenizer: Tokenizer, cache: Path, workers: int, shown: Progress, *, progress: bool) -> Path:
    """The directory of a text's store, made where it is not complete."""
    fingerprint = _fingerprint(text, tokenizer)
    directory = cache / f"tokens-{fingerprint[:NAME_DIGITS]}"
    if not _is_complete(directory, tokenizer):
        directory.mkdir(exist_ok=True)
        with held(directory / "lock", wait=True), _named(text.name):
            if not _is_complete(directory, tokenizer):
                if progress and (directory / INDEX).exists():
                    print(f"{directory}: what is damaged is made again.", file=unheard(sys.stderr))
                _make(directory, fingerprint, text, tokenizer, workers, shown)
    return directory


@contextlib.contextmanager
def _named(source: str) -> Iterator[None]:
    """Have problems name the source: by its own path and field of text, or else in the sentence."""
    try:
        yield
    except InvalidInput as error:
        if not source:
            raise
        own = {f"data.{field.name}": f"data.mixture.{source}.{field.name}" for field in fields(MixtureSource)}
        raise InvalidInput(
            [
                replace(problem, field=own[problem.field])
                if problem.field in own
                else replace(problem, rule=f"{problem.rule} (source {source} of data.mixture)")
                for problem in error.problems
            ]
        ) from None


def _make(directory: Path, fingerprint: str, text: Text, tokenizer: Tokenizer, workers: int, shown: Progress) -> None:
    """Write every shard that is not finished, then the index."""
    data, corpus, plan = text.data, text.corpus, text.plan
    for leftover in directory.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    write_whole(directory / TOKENIZER, tokenizer.definition.encode())
    unfinished = [shard for shard in range(len(plan)) if not _is_whole(directory, shard)]
    where = {"directory": str(directory), "tokenizer": tokenizer.name, "end_id": tokenizer.end_id}
    jobs = [
        _job("write shard", plan[shard], data, shard=shard, text_field=data.text_field, **where) for shard in unfinished
    ]
    # How much text a compressed file holds is known only afterwards.
    plain = all(source.kind != "parquet" and not source.compression for source in corpus.sources)
    with shown(
        f"tokenizing {text.name}".strip(), corpus.nbytes if plain and len(jobs) == len(plan) else None
    ) as advance:
        run_jobs(jobs, workers, advance)
    changed = [source for source, one, two in zip(corpus.sources, text.seen, _seen(corpus), strict=True) if one != two]
    if changed:  # the hash may be another text's than the tokens
        for path in directory.iterdir():
            if path.name != "lock":
                path.unlink()
        rule = "was changed while it was prepared"
        raise InvalidInput([file_problem("data.path", changed[0].path, rule, "prepare again when it is not")])
    shard_records = [read_record(directory, shard) for shard in range(len(plan))]
    records = [shard_record for shard_record in shard_records if shard_record is not None]
    if len(records) != len(plan):
        raise InvalidInput([file_problem("data.cache", directory, "lost files while they were written")])
    _check_splits(records, data)
    _check_unknown(directory, records, tokenizer)
    index = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "dtype": token_dtype(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "end_id": tokenizer.end_id,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "validation_fraction": data.validation_fraction,
        "unigram_entropy_nats": _unigram_entropy_nats(directory, len(records)),
        "corpus": {
            "sha256": corpus.sha256,
            "nbytes": corpus.nbytes,
            "files": [asdict(source) for source in corpus.sources],
            "skipped": corpus.skipped,
        },
        "repaired": sum(record.repaired for record in records),
        "first_repaired": next((record.first_repaired for record in records if record.repaired), ""),
        "shards": [asdict(record) for record in records],
    }
    write_whole(directory / INDEX, json.dumps(with_checksum(index)).encode())


def _is_complete(directory: Path, tokenizer: Tokenizer) -> bool:
    """Whether there is an index as it was written, every file it names, and the tokenizer.

    What is missing or damaged is made again: the index and the tokenizer.json at once, as the shards are finished.
    Whether the shards are whole is for `open_store` to say, and for those who read them.
    """
    try:
        _, records = read_index(directory / INDEX)
    except (FileNotFoundError, *DAMAGED):
        return False
    try:
        if content_of(directory / TOKENIZER, WRITTEN_HERE) != tokenizer.definition:
            return False
    except (FileNotFoundError, ValueError):
        return False
    return all((directory / file.name).exists() for record in records for file in record.files)


def _is_whole(directory: Path, shard: int) -> bool:
    """Whether a shard is finished, with every byte as it was written: that of an earlier process may not be."""
    record = read_record(directory, shard)
    return record is not None and not any(check_file(directory / file.name, file) for file in record.files)


def _tokenizer(
    data: DataSpec, vocab_size: int | None, texts: Sequence[Text], cache: Path, workers: int, shown: Progress
) -> Tokenizer:
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer != "bpe":
        return read_tokenizer(data.tokenizer, data.end_token)
    field, size = ("model.vocab_size", vocab_size) if data.vocab_size is None else ("data.vocab_size", data.vocab_size)
    if size is None or size < SMALLEST_BPE:
        rule = f"a byte-level bpe needs a vocabulary of at least {SMALLEST_BPE}: every byte and an end of document"
        raise InvalidInput([Problem(field, size, rule, SMALLEST_BPE)])
    each_named = [f"{text.corpus.sha256} {text.data.text_field}" for text in texts]
    named = f"{' '.join(each_named)} {data.validation_fraction}"
    trained = cache / "tokenizers" / f"bpe-{size}-{hashlib.sha256(named.encode()).hexdigest()[:NAME_DIGITS]}.json"
    seal = trained.with_suffix(".sha256")
    # The SHA-256 of the file lies beside it; an older file has none.
    sealed = trained.is_file() and (not seal.exists() or content_of(seal) == sha256(trained))
    if not sealed:
        trained.parent.mkdir(exist_ok=True)
        pairs = [(segment, text.data.text_field) for text in texts for shard in text.plan for segment in shard]
        segments, text_fields = zip(*pairs, strict=True)
        job = _job("train bpe", segments, data, vocab_size=size, text_fields=text_fields)
        with shown("training the tokenizer", None) as advance:
            (definition,) = run_jobs([job], min(workers, 1), advance)
        write_whole(seal, hashlib.sha256(definition.encode()).hexdigest().encode())
        write_whole(trained, definition.encode())
    return json_tokenizer("bpe", content_of(trained, WRITTEN_HERE))


def _job(do: str, segments: Sequence[Segment], data: DataSpec, **more: object) -> dict[str, Any]:
    segments_told = [asdict(segment) for segment in segments]
    return {"do": do, "segments": segments_told, "validation_fraction": data.validation_fraction} | more


def _fingerprint(text: Text, tokenizer: Tokenizer) -> str:
    data, corpus = text.data, text.corpus
    has_records = any(source.kind != "text" for source in corpus.sources)
    identity = {
        "format": FORMAT,
        "corpus": corpus.sha256,
        "text_field": data.text_field if has_records else "",
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": data.validation_fraction,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _check_splits(records: list[ShardRecord], data: DataSpec) -> None:
    train = sum(record.train.documents for record in records)
    validation = sum(record.validation.documents for record in records)
    paths = ", ".join(data.path)
    if not train + validation:
        raise InvalidInput([Problem("data.path", paths, "holds no text: every document in it is empty")])
    if not data.validation_fraction:
        return
    if train + validation == 1:
        rule = "holds a single document, so that none can be held out"
        more = "two files or records, or a text file of many lines over 2 KiB, which is cut at the ends of some"
        raise InvalidInput([Problem("data.path", paths, rule, more)])
    if not train:
        rule = f"holds out all {validation} documents of the corpus and leaves none to train on"
        raise InvalidInput([Problem("data.validation_fraction", data.validation_fraction, rule, "a larger corpus")])
    if not validation:
        needed = math.ceil(1000 * min(record.smallest_hash for record in records) + 1e-9) / 1000
        rule = f"holds out none of the {train} documents of the corpus"
        nearest: object = needed if needed <= 0.5 else "a larger corpus"
        raise InvalidInput([Problem("data.validation_fraction", data.validation_fraction, rule, nearest)])


def _check_unknown(directory: Path, records: list[ShardRecord], tokenizer: Tokenizer) -> None:
    """Refuse a corpus of which the tokenizer spells little, and say so where it lacks a part of it."""
    unknown = tokenizer.unknown_id
    if unknown is None:
        return
    counts = sum((read_counts(directory, shard).sum(axis=0) for shard in range(len(records))), start=np.uint64(0))
    # GPT-2's family has one token for both: that of each document's end is not text.
    ends = sum(record.train.documents + record.validation.documents for record in records)
    others = ends if unknown == tokenizer.end_id else 0
    share = (float(np.asarray(counts)[unknown]) - others) / float(np.asarray(counts).sum())
    if share > MOST_UNKNOWN:
        rule = f"spells {share:.0%} of this corpus as its token for unknown text; at most {MOST_UNKNOWN:.0%} works"
        raise InvalidInput([Problem("data.tokenizer", tokenizer.name, rule, '"bpe"')])
    if share > SAID_UNKNOWN:
        print(f"{tokenizer.name}: {share:.1%} of the tokens are unknown text.", file=unheard(sys.stderr))


def _unigram_entropy_nats(directory: Path, shards: int) -> float:
    """Cross-entropy of the validation tokens under (count in train + 1) / (train tokens + vocabulary); 0 of none."""
    counts = sum((read_counts(directory, shard) for shard in range(shards)), start=np.uint64(0))
    train, validation = np.asarray(counts, dtype=np.float64)
    probability = (train + 1) / (train.sum() + len(train))
    return float((validation * -np.log(probability)).sum() / max(1, validation.sum()))


@contextlib.contextmanager
def _nothing_shown(what: str, nbytes: int | None) -> Iterator[Advance]:
    yield lambda done: None


@contextlib.contextmanager
def _bars(what: str, nbytes: int | None) -> Iterator[Advance]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=nbytes)
        yield lambda done: bars.advance(task, done)
