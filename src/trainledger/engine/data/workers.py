"""Jobs of preparing, in this process or in worker processes.

A job goes to a worker as a line of JSON; the answer is any number of ``["advance", nbytes]``, then
``["done", result]``, ``["problems", [[field, value, rule, nearest], ...]]`` or, of a full disk,
``["full", [errno, text, file]]``. Workers are plain Python processes and not those of `multiprocessing`, whose children
run the caller's main script again: that would load torch into each of them, and would ask every script for a
``__main__`` guard.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainledger.engine.data.documents import Segment, documents, held_out
from trainledger.engine.data.shard import write_shard
from trainledger.engine.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe
from trainledger.engine.processors import cores
from trainledger.spec.durable import is_full
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import KIB, MIB

Job = dict[str, Any]
MOST_WORKERS = 4  # each takes up to 100 MB; more are a choice of the caller
SAMPLE_CHARACTERS = 16 * MIB
SMALLEST_SHARE = 64 * KIB


def default_workers() -> int:
    """Worker processes for the cores this process may use, at most `MOST_WORKERS`."""
    return min(cores(), MOST_WORKERS)


def run_jobs(jobs: Sequence[Job], workers: int, advance: Callable[[int], None]) -> list[str]:
    """The result of every job, in order, from ``workers`` processes; 0 runs them in this one.

    ``advance`` is called from several threads. The first job that fails ends all processes; InvalidInput is
    raised as the job raised it, and where a process died, with what it was doing.
    """
    if not workers:
        return [run_job(job, advance) for job in jobs]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(jobs)):
        waiting.put(number)
    results = [""] * len(jobs)
    failures: list[BaseException] = []
    processes: list[subprocess.Popen[str]] = []

    def serve(process: subprocess.Popen[str]) -> None:
        try:
            while not failures:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                results[number] = _answered(process, jobs[number], advance)
        except BaseException as failure:  # handed to the caller's thread
            failures.append(failure)
            _end(processes)

    try:
        processes.extend(_started() for _ in range(min(workers, len(jobs))))
        threads = [threading.Thread(target=serve, args=(each,), daemon=True) for each in processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _end(processes)
    if failures:
        raise failures[0]
    return results


def _answered(process: subprocess.Popen[str], job: Job, advance: Callable[[int], None]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    except OSError:
        pass  # it died; how is known below
    for line in process.stdout:
        kind, answer = json.loads(line)
        if kind == "done":
            return str(answer)
        if kind == "problems":
            raise InvalidInput([Problem(*each) for each in answer])
        if kind == "full":
            raise OSError(*answer)
        advance(answer)
    ended = process.wait()
    how = f"was ended by signal {-ended}" if ended < 0 else f"failed with exit code {ended}"
    what = f"shard {job['shard']}" if "shard" in job else "the tokenizer"
    rule = f"a process that prepared it {how}; what is finished is kept for the next try"
    raise InvalidInput([Problem("data", None, f"{what}: {rule}")])


def _started() -> subprocess.Popen[str]:
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH", ""))))
    # One process per core does the work; the threads of the tokenizers package would only crowd them.
    environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", "from trainledger.engine.data.workers import serve_jobs; serve_jobs()"]
    # In a separate process group, so that Ctrl-C in a terminal reaches the caller alone, who then ends its workers.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
        process_group=0,
    )


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def run_job(job: Job, advance: Callable[[int], None]) -> str:
    """Do one job: ``train bpe`` gives the definition of the tokenizer, ``write shard`` the name of the shard.

    Raises InvalidInput as `write_shard` does.
    """
    segments = [Segment(**each) for each in job["segments"]]
    if job["do"] == "train bpe":
        texts = sample_texts(segments, job["text_fields"], job["validation_fraction"])
        return train_bpe(_counted(texts, advance), job["vocab_size"])
    directory = Path(job["directory"])
    write_shard(
        directory,
        job["shard"],
        segments,
        text_field=job["text_field"],
        tokenizer=_tokenizer(directory, job["tokenizer"], job["end_id"]),
        validation_fraction=job["validation_fraction"],
        advance=advance,
    )
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


def serve_jobs() -> None:
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
            answer(
                "problems",
                [[problem.field, problem.value, problem.rule, problem.nearest] for problem in error.problems],
            )
        except OSError as error:
            if not is_full(error):
                raise
            answer("full", [error.errno, error.strerror, error.filename])


def sample_texts(
    segments: Sequence[Segment],
    text_fields: Sequence[str],
    validation_fraction: float,
    characters: int = SAMPLE_CHARACTERS,
) -> Iterator[str]:
    """Texts that are not held out, together at most ``characters``: all of a corpus that is no larger, else an
    equal share from the beginning of each segment, the segments taken in an order shuffled by a fixed key. Each
    segment has its text field."""
    total = sum(each.file_nbytes for each in {segment.path: segment for segment in segments}.values())
    complete = total <= characters and not any(segment.compression or segment.kind == "parquet" for segment in segments)
    share = characters if complete else max(characters // len(segments), SMALLEST_SHARE)
    order = range(len(segments)) if complete else sorted(range(len(segments)), key=_shuffled)
    left = characters
    for number in order:
        taken = 0
        for document in documents(segments[number], text_fields[number]):
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
