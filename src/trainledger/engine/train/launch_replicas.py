"""Start replicas of a run that may come and go on this machine, and start again those that are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainledger.engine.train.launch import handed_on, share_threads
from trainledger.engine.train.ranks import REPLICA, names_of
from trainledger.engine.train.replicas import LIGHTHOUSE, MEETING, find_torchft, refuse
from trainledger.engine.train.run_directory import already, is_begun, read_state
from trainledger.engine.train.stop import LostRank
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run

MENDED_BY_A_RESTART = (1, LostRank.exit_code)
_HEARTBEAT_TIMEOUT_MS = 5000  # a replica that is silent for so long is gone
_SECONDS_BETWEEN_LOOKS = 0.1


def launch_replicas(
    run: Run, run_dir: Path, words: Sequence[str], here: range, *,
    resume: bool, restarts: int, seconds: float, say: Callable[[str], None],
) -> int:  # fmt: skip
    """Run ``trainledger`` with these words in a process for each replica of ``here``; the exit code of the run.

    A replica that is lost is started again, up to ``restarts`` times each, while the others go on; one that was asked
    to leave is not, and an end that would come again ends all. torchft's lighthouse is that of ``TORCHFT_LIGHTHOUSE``,
    or one of this process. The exit code is 0 as soon as a replica has finished the run.
    """
    refuse(run)
    _refuse_others(run, here)
    find_torchft()
    if not resume and is_begun(run_dir):
        raise InvalidInput([already(run_dir, read_state(run_dir))])
    share_threads(len(here))
    with ExitStack() as stack:
        address = stack.enter_context(_lighthouse(seconds))
        meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment = os.environ | {LIGHTHOUSE: address}
        started_together = {MEETING: f"{len(here)}:{meeting.port}"}
        command = [sys.executable, "-m", "trainledger", *words]

        def start(index: int, more: dict[str, str]) -> subprocess.Popen[bytes]:
            # A session of its own: what a terminal sends comes once, from here.
            which = {REPLICA: str(index), "LOCAL_RANK": str(index - here.start)}
            return subprocess.Popen(command, env=environment | which | more, start_new_session=True)

        running = {index: start(index, started_together) for index in here}
        left, codes = dict.fromkeys(here, restarts), dict[int, int]()
        with _signals_handed_on(running) as asked:
            while running:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                for index, process in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[index]
                    codes[index] = code if code >= 0 else 128 - code
                    lost = code < 0 or code in MENDED_BY_A_RESTART
                    again = lost and left[index] > 0 and not asked and 0 not in codes.values()
                    if lost and not asked:
                        say(_told(index, code, again=again, others=sorted(running)))
                    if again:
                        left[index] -= 1
                        running[index] = start(index, {})
                    elif 0 < code < 128 and not lost and not asked:
                        for each in running.values():
                            each.terminate()
    return code_of(codes.values())


def code_of(codes: Collection[int]) -> int:
    """The exit code of a run by those of its replicas: one that a restart does not mend, else the highest."""
    return 0 if 0 in codes else max(codes, key=lambda code: (code < 128 and code not in MENDED_BY_A_RESTART, code))


def _told(index: int, code: int, *, again: bool, others: Sequence[int]) -> str:
    """What became of a replica that was lost."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    goes_on = f"; the run goes on with {names_of(others)}" if others else ""
    return f"Replica {index} {how}{' and is started again' if again else ''}{goes_on}."


def _refuse_others(run: Run, here: range) -> None:
    """Raise `InvalidInput` where these replicas are not the run's."""
    count = run.layout.replicate
    if LIGHTHOUSE not in os.environ and (here.start, here.stop) != (0, count):
        rule = f"must be layout.replicate ({count}), or {LIGHTHOUSE} the address of a lighthouse that others know too"
        raise InvalidInput([Problem("--replicas", len(here), rule, count)])
    if here.stop > count:
        rule = f"begins at replica {here.start} of {count} (layout.replicate)"
        raise InvalidInput([Problem("--replicas", len(here), rule, max(count - here.start, 0) or None)])


@contextmanager
def _lighthouse(seconds: float) -> Iterator[str]:
    """The address of a lighthouse: the one that is named, or one of this process."""
    if LIGHTHOUSE in os.environ:
        yield os.environ[LIGHTHOUSE]
        return
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=int(1000 * seconds),
        heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS,
    )
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


@contextmanager
def _signals_handed_on(running: dict[int, subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Each signal that asks for the end goes to all replicas; those that have come."""
    came: list[int] = []

    def hand_on(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        for each in running.values():
            each.send_signal(signum)

    before = {each: signal.signal(each, hand_on) for each in handed_on()}
    try:
        yield came
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
