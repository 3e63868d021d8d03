"""Start the ranks of a run on this machine: torchrun's own agent, with our exit codes and without its tracebacks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainledger.engine.processors import cores
from trainledger.engine.train.ranks import refuse_other_count
from trainledger.engine.train.stop import ENDED_FILE, LIFELINE, STOP_SIGNALS, left_end
from trainledger.spec.run import Run

# A run that is told to stop finishes its step and saves; torchrun kills after 30 s by default.
SECONDS_TO_SAVE = 3600


def launch(run: Run, ranks: int, words: Sequence[str], *, restarts: int, say: Callable[[str], None]) -> int:
    """Run ``trainledger`` with these words in ``ranks`` processes here; the exit code of the run.

    After a lost rank all are started again, up to ``restarts`` times, but not after an end that one leaves
    (`stop.leave_end`). A signal reaches every rank once, and they have an hour to save; ranks whose launcher is killed
    save and end. Threads of a CPU are divided among the ranks where ``OMP_NUM_THREADS`` does not say how many.
    """
    refuse_other_count(run, ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="trainledger",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(),
        signals_to_handle=",".join(each.name for each in handed_on()),
    )
    with tempfile.TemporaryDirectory(prefix="trainledger-ranks-") as folder:
        os.environ[ENDED_FILE] = str(Path(folder) / "ended")
        os.mkfifo(Path(folder) / LIFELINE)
        lifeline = os.open(Path(folder) / LIFELINE, os.O_RDWR)
        try:
            code = _launched(config, words, say)
            left = left_end()
        finally:
            del os.environ[ENDED_FILE]
            os.close(lifeline)
    return left if code and left is not None else code


def _launched(config: LaunchConfig, words: Sequence[str], say: Callable[[str], None]) -> int:
    """The exit code of the first rank that failed, or of the signal that ended all."""
    try:
        elastic_launch(config, sys.executable)("-m", "trainledger", *words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            say(f"Rank {rank} was ended by {signal.Signals(-failure.exitcode).name}; --resume goes on.")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + signal.Signals(error.sigval).value
    return 0


def handed_on() -> list[signal.Signals]:
    """The signals that the ranks shall get: all that ask for the end, but SIGHUP where the run was started without it
    (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [stop_signal for stop_signal in STOP_SIGNALS if not (ignored and stop_signal == signal.SIGHUP)]
