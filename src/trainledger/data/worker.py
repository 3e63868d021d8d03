"""A process that prepares shards: jobs come in as lines of JSON, progress and results go out as lines of JSON.

Started as a plain Python process and not by `multiprocessing`, whose children run the caller's
main script again: that would load torch into each of them, and would ask every script for a ``__main__`` guard.
For each job the answer is any number of ``["advance", nbytes]``, then ``["done", result]`` or
``["problems", [[field, value, rule, nearest], ...]]``.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trainledger.data.document import Segment
from trainledger.data.sample import sample_texts
from trainledger.data.shard import write_shard
from trainledger.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe
from trainledger.spec.problem import InvalidInput

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
