"""Processes of this machine that measure together: each is told its rank, and answers in lines of JSON.

A line is ``["tell", share, name]`` of the first rank while it works, then ``["done", result]``, or ``["failed", why]``.
A file is where they meet. The processes end with the one that started them, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainledger.engine.processors import cores
from trainledger.observe.measure.rounds import Tell

Job = Mapping[str, Any]
Work = Callable[["Place", Job, Tell], Any]


@dataclass(frozen=True)
class Place:
    """Which of the processes this is, and the file where they meet."""

    rank: int
    ranks: int
    meeting: str


def on_ranks(module: str, ranks: int, job: Job, tell: Tell) -> list[Any]:
    """What ``serve(work)`` of a module of `trainledger.measure` answers in each of so many processes, by rank.

    Each has its share of the cores' threads unless ``OMP_NUM_THREADS`` says how many. Raises ChildProcessError with
    what went wrong on the first rank that fails; the others are ended.
    """
    results: list[Any] = [None] * ranks
    failures: dict[int, str] = {}
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="trainledger-ranks-") as folder:
        try:
            for rank in range(ranks):
                processes.append(_started(module, ranks))
                place = {"rank": rank, "ranks": ranks, "meeting": str(Path(folder) / "meeting")}
                pipe = processes[-1].stdin
                assert pipe is not None
                pipe.write(json.dumps([place, dict(job)]) + "\n")
                pipe.flush()

            def read(rank: int) -> None:
                answer = _answered(processes[rank], tell if rank == 0 else lambda share, name: None)
                if answer[0] == "done":
                    results[rank] = answer[1]
                    return
                if not failures:
                    failures[rank] = answer[1]
                for each in processes:  # those that wait for it would wait until their timeout
                    each.kill()

            threads = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for rank, why in failures.items():
        raise ChildProcessError(f"rank {rank} of {ranks} {why}")
    return results


def serve(work: Work) -> None:
    """Do the job of standard input in this process, and answer on standard output."""
    # Ctrl-C reaches every process of the terminal; the parent decides what becomes of its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place, job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that a library prints may be taken for an answer

    def answer(*parts: object) -> None:
        os.write(pipe, (json.dumps(parts) + "\n").encode())

    try:
        answer("done", work(Place(**place), job, lambda share, name: answer("tell", share, name)))
    except Exception as error:
        answer("failed", f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    os._exit(0)  # a library's threads may wait for ranks that are gone


def _end_with_parent() -> None:
    sys.stdin.read()  # ends when the parent is gone
    os._exit(1)


def _answered(process: subprocess.Popen[str], tell: Tell) -> list[Any]:
    assert process.stdout is not None
    for line in process.stdout:
        answer: list[Any] = json.loads(line)
        if answer[0] != "tell":
            return answer
        tell(answer[1], answer[2])
    ended = process.wait()
    how = f"was ended by {signal.Signals(-ended).name}" if ended < 0 else f"ended with exit code {ended}"
    return ["failed", how]


def _command(module: str) -> list[str]:
    return [sys.executable, "-c", f"from trainledger.observe.measure.{module} import main; main()"]


def _started(module: str, ranks: int) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads_of_each(ranks)), "PYTHONPATH": path}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    # In a process group of its own, so that Ctrl-C in a terminal reaches the caller alone, who then ends its ranks.
    return subprocess.Popen(_command(module), env=environment, process_group=0, **pipes)


def threads_of_each(ranks: int) -> int:
    """Threads of a rank on a CPU, as `train --ranks` gives them: ``OMP_NUM_THREADS``, else its share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said):
        return int(said)
    return max(1, cores() // ranks)
