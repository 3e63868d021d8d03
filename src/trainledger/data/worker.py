"""A process that prepares shards: jobs come in as lines of JSON, progress and results go out as lines of JSON.

Started as a plain Python process and not by `multiprocessing`, whose children run the caller's
main script again: that would load torch into each of them, and would ask every script for a ``__main__`` guard.
For each job the answer is any number of ``["advance", nbytes]``, then ``["done", result]`` or
``["problems", [[field, value, rule, nearest], ...]]``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainledger.data.document import Segment
from trainledger.data.documents import documents, held_out
from trainledger.data.shard import write_shard
from trainledger.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe
from trainledger.spec.problem import InvalidInput
from trainledger.units import KIB, MIB

Job = dict[str, Any]


def run_job(job: Job, advance: Callable[[int], None]) -> str:
    """Do one job: ``train bpe`` gives the definition of the tokenizer, ``write shard`` the name of the shard.

    Raises InvalidInput as `write_shard` does.
    """
    segments = [Segment(**each) for each in job["segments"]]
    if job["do"] == "train bpe":
        texts = sample_texts(segments, job["text_field"], job["validation_fraction"])
        return train_bpe(_counted(texts, advance), job["vocab_size"])
    directory = Path(job["directory"])
    write_shard(
        directory, job["shard"], segments, text_field=job["text_field"],
        tokenizer=_tokenizer(directory, job["tokenizer"], job["end_id"]),
        validation_fraction=job["validation_fraction"], advance=advance,
    )  # fmt: skip
    return f"{job['shard']:05d}"


@functools.lru_cache(maxsize=1)  # a new tokenizer for every shard would keep some MB each time
def _tokenizer(directory: Path, name: str, end_id: int) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    return JsonTokenizer(name, (directory / "tokenizer.json").read_text(encoding="utf-8"), end_id)


def _counted(texts: Iterable[str], advance: Callable[[int], None]) -> Iterator[str]:
    for text in texts:
        yield text
        advance(len(text))


def main() -> None:
    """Serve jobs until the input ends, which it does when the parent is gone."""
    # Ctrl-C reaches every process of the terminal; the parent decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that a library prints may be taken for an answer

    def answer(*parts: object) -> None:
        left = memoryview((json.dumps(parts) + "\n").encode())
        try:
            while left:
                left = left[os.write(pipe, left) :]
        except BrokenPipeError:
            sys.exit("the process that asked for this is gone")

    for line in sys.stdin:
        try:
            answer("done", run_job(json.loads(line), lambda nbytes: answer("advance", nbytes)))
        except InvalidInput as error:
            answer("problems", [[each.field, each.value, each.rule, each.nearest] for each in error.problems])


if __name__ == "__main__":
    main()


SAMPLE_CHARACTERS = 16 * MIB
SMALLEST_SHARE = 64 * KIB


def sample_texts(
    segments: Sequence[Segment],
    text_field: str,
    validation_fraction: float,
    characters: int = SAMPLE_CHARACTERS,
) -> Iterator[str]:
    """Texts that are not held out, together at most ``characters``: all of a corpus that is no larger, else an
    equal share from the beginning of each segment, the segments taken in an order shuffled by a fixed key."""
    total = sum(each.file_nbytes for each in {each.path: each for each in segments}.values())
    complete = total <= characters and not any(each.compression or each.kind == "parquet" for each in segments)
    share = characters if complete else max(characters // len(segments), SMALLEST_SHARE)
    order = range(len(segments)) if complete else sorted(range(len(segments)), key=_shuffled)
    left = characters
    for number in order:
        taken = 0
        for document in documents(segments[number], text_field):
            if held_out(document.text.encode(), validation_fraction):
                continue
            text = document.text[: min(left, share - taken)]
            yield text
            taken += len(text)
            left -= len(text)
            if left <= 0:
                return
            if taken >= share:
                break


def _shuffled(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=b"trainledger: sample").digest()
