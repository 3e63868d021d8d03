"""Every signal that asks for the end: the step is finished on all ranks, saved, and said once; the exit code tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commanded import children, end, end_all, lines_with, start, state_of, until_step, write

from trainledger.engine.train.run_directory import all_checkpoints, damage
from trainledger.engine.train.stop import STOP_SIGNALS, Interrupted, StopRequests


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    end_all()


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 138, signal.SIGUSR2: 140}


def raised_by(*signals: signal.Signals, echoes: bool = False, pause: float = 0.0) -> tuple[int | None, int | None]:
    """The signal that was asked first, and the exit code where a later one ended the run at once."""
    with StopRequests(echoes=echoes) as requests:
        try:
            for each in signals:
                os.kill(os.getpid(), each)
                time.sleep(pause)
        except Interrupted as at_once:
            return requests.signum, at_once.exit_code
        return requests.signum, None


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_the_first_asks_and_the_same_again_ends_at_once(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    assert raised_by(signum) == (signum, None)
    assert raised_by(signum, signum) == (signum, CODES[signum])
    assert signal.getsignal(signum) == before


def test_a_warning_and_the_signal_that_follows_it_are_one_request() -> None:
    assert raised_by(signal.SIGUSR1, signal.SIGTERM) == (signal.SIGUSR1, None)
    assert raised_by(signal.SIGHUP, signal.SIGTERM, signal.SIGTERM) == (signal.SIGHUP, 143)
    assert raised_by(signal.SIGINT, signal.SIGTERM) == (signal.SIGINT, 143)


def test_what_the_agent_hands_on_to_a_rank_is_no_second_request() -> None:
    assert raised_by(signal.SIGTERM, signal.SIGTERM, echoes=True) == (signal.SIGTERM, None)
    assert raised_by(signal.SIGINT, signal.SIGTERM, echoes=True) == (signal.SIGINT, 143)


def test_a_run_that_nohup_started_lives_on_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert raised_by(signal.SIGHUP) == (None, None)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_a_line_is_written_does_not_end_the_run() -> None:
    """Python's own buffer refuses a second writer; the sentence goes past it."""
    child = subprocess.run([sys.executable, "-c", _WRITES], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr[-500:]
    assert child.stdout == "asked\n"
    assert "Finishing this step" in child.stderr


_WRITES = """
import os, signal, sys, threading, time
from trainledger.engine.train.stop import StopRequests
with StopRequests() as requests:
    def ask():
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=ask).start()
    while requests.signum is None:
        sys.stderr.write("a line of a run\\n")
    print("asked")
"""


@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR2])
def test_one_process_saves_and_ends(tmp_path: Path, signum: signal.Signals) -> None:
    write(tmp_path)
    run_dir = until_step(tmp_path, 3, process := start(tmp_path))
    process.send_signal(signum)
    code, _, err = end(process)
    assert_saved(run_dir, code, err, signum)


@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_two_ranks_save_and_end(tmp_path: Path, signum: signal.Signals) -> None:
    """The agent hands the signal on, and here, as a scheduler does, every rank gets it a second time."""
    write(tmp_path, layout="shard = 2", ranks=2)
    run_dir = until_step(tmp_path, 3, process := start(tmp_path, ranks=2))
    for pid in (*children(process), process.pid):
        os.kill(pid, signum)
    code, _, err = end(process)
    assert_saved(run_dir, code, err, signum)


@pytest.mark.process
@pytest.mark.parametrize(("rank", "signum"), [(0, signal.SIGUSR2), (1, signal.SIGTERM)])
def test_a_signal_to_one_rank_ends_all_for_good(tmp_path: Path, rank: int, signum: signal.Signals) -> None:
    """The agent knows nothing of it and starts the ranks again, which end as those before them have."""
    write(tmp_path, layout="shard = 2", ranks=2)
    run_dir = until_step(tmp_path, 3, process := start(tmp_path, "--restarts", "1", ranks=2))
    os.kill(children(process)[rank], signum)
    code, _, err = end(process)
    assert "Not started again" not in err
    assert_saved(run_dir, code, err, signum)


@pytest.mark.process
def test_the_ranks_of_a_launcher_that_is_killed_save_and_end(tmp_path: Path) -> None:
    write(tmp_path, layout="shard = 2", ranks=2)
    run_dir = until_step(tmp_path, 3, process := start(tmp_path, ranks=2))
    ranks = children(process)
    assert len(ranks) == 2
    process.kill()
    _, _, err = end(process)  # until no rank has its standard error open any more
    assert "Traceback" not in err
    assert state_of(run_dir)["state"] == "interrupted"
    assert damage(all_checkpoints(run_dir)[-1]) is None
    assert len(lines_with(err, ["Stopped after step"])) == 1, err


def assert_saved(run_dir: Path, code: int, err: str, signum: signal.Signals) -> None:
    """All that a stopped run promises."""
    assert code == CODES[signum], err
    assert "Traceback" not in err
    state = state_of(run_dir)
    assert (state["state"], state["exit_code"]) == ("interrupted", code)
    newest = all_checkpoints(run_dir)[-1]
    assert newest.name == f"step-{state['step']:08d}"
    assert damage(newest) is None
    assert len(lines_with(err, ["Stopped after step"])) == 1, err
