"""Answers that take seconds: worked on in threads, asked for again until they are there, cancelled when nobody asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.web.calculator import Progress

Work = Callable[[Progress], Any]
FIRST_WAIT_SECONDS = 0.8  # of a request, before it is answered with how far the work is
FORGOTTEN_SECONDS = 10.0  # since anybody asked, until the work is cancelled
KEPT_SECONDS = 60.0  # an answer that is there
_LOOK_SECONDS = 0.01  # between two looks at whether it is there
MOST_AT_ONCE = 2
MOST_KEPT = 32  # answers that are there, worked on, or wait


@frozen
class Working:
    """How far an answer is."""

    what: str
    done: int = 0
    of: int = 0


class Cancelled(KeyboardInterrupt):
    """Ends a search from within its progress, as Ctrl-C does."""


class _Job:
    """The work of one key. The event loop writes ``asked`` and ``cancelled``, the thread ``working``."""

    def __init__(self, work: Work, threads: ThreadPoolExecutor) -> None:
        self.work = work
        self.asked = time.monotonic()
        self.working = Working("waits until another answer is there")
        self.cancelled = False
        self.future: Future[Any] = threads.submit(self.run)

    def run(self) -> Any:
        """The answer; raises `Cancelled`, also where a search that was cancelled gives what it has so far."""
        self.progress("", 0, 0)
        answer = self.work(self.progress)
        if self.cancelled:
            raise Cancelled
        return answer

    def cancel(self) -> None:
        """End the work where it says next how far it is, or before it begins."""
        self.cancelled = True
        self.future.cancel()

    def progress(self, what: str, done: int, of: int) -> None:
        if self.cancelled or time.monotonic() - self.asked > FORGOTTEN_SECONDS:
            self.cancelled = True
            raise Cancelled
        self.working = Working(what, done, of)


class Jobs:
    """Work by its key, ``MOST_AT_ONCE`` at a time. Called from one event loop only."""

    def __init__(self, wait_seconds: float = FIRST_WAIT_SECONDS) -> None:
        self.wait_seconds = wait_seconds
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, "answer")
        self._jobs: dict[Hashable, _Job] = {}

    async def ask(self, key: Hashable, work: Work, gone: Callable[[], Awaitable[bool]]) -> Any:
        """The answer of the work of this key, or `Working` where it takes longer than a request waits.

        Asked again with the same key within ``FORGOTTEN_SECONDS``, the same work goes on; where who asks is ``gone``
        before that, it is cancelled. Raises what the work raises.
        """
        self._forget()
        job = self._jobs.get(key)
        if job is None or job.cancelled:
            if len(self._jobs) >= MOST_KEPT:
                return Working("waits until other answers are there")
            job = self._jobs[key] = _Job(work, self._threads)
        job.asked = time.monotonic()
        until = job.asked + self.wait_seconds
        while not job.future.done() and (now := time.monotonic()) < until:
            job.asked = now
            if await gone():
                job.cancel()
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if not job.future.done():
            return job.working
        try:
            return job.future.result()
        except (Cancelled, CancelledError):  # by somebody else who asked for it
            return Working("begins again")

    def close(self) -> None:
        """Cancel all work."""
        for job in self._jobs.values():
            job.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """Drop what was cancelled, what nobody has asked for, and the oldest answers beyond the most that are kept."""
        now = time.monotonic()
        for key, job in list(self._jobs.items()):
            age = now - job.asked
            if job.future.done() and (job.cancelled or age > KEPT_SECONDS):
                del self._jobs[key]
            elif not job.future.done() and age > FORGOTTEN_SECONDS:
                job.cancel()
        done = [key for key, job in self._jobs.items() if job.future.done()]
        for key in done[: max(0, len(self._jobs) - MOST_KEPT + 1)]:
            del self._jobs[key]
