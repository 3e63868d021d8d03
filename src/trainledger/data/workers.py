"""Runs jobs in worker processes and tells of their progress."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from trainledger.data.worker import Job, run_job
from trainledger.spec.problem import InvalidInput, Problem

MOST_WORKERS = 4  # each takes up to 100 MB; more are a choice of the caller


def default_workers() -> int:
    """Worker processes for the cores this process may use, at most `MOST_WORKERS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def run_jobs(jobs: Sequence[Job], workers: int, advance: Callable[[int], None]) -> list[str]:
    """The result of every job, in order, from ``workers`` processes; 0 runs them in this one.

    ``advance`` is called from several threads. The first job that fails ends all processes; InvalidInput is
    raised as the job raised it, and where a process died, with what it was doing.
    """
    if not workers:
        return [run_job(each, advance) for each in jobs]
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
        for each in threads:
            each.start()
        for each in threads:
            each.join()
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
        kind, told = json.loads(line)
        if kind == "done":
            return str(told)
        if kind == "problems":
            raise InvalidInput([Problem(*each) for each in told])
        advance(told)
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
    command = [sys.executable, "-c", "from trainledger.data.worker import main; main()"]
    # In a process group of its own, so that Ctrl-C in a terminal reaches the caller alone, who then ends its workers.
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
    for each in processes:
        each.kill()
    for each in processes:
        each.wait()
