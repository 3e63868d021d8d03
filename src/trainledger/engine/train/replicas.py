"""Replicas of a run that go on while one of them is gone: torchft finds out who takes a step, and sums gradients.

Each replica is a process with the whole model. The micro-batches of a step are dealt among those that take it, so a
step has the same rows however many they are. A step in which one is lost is taken again by the others; one that comes
gets weights, optimizer state, figures and the last lines of metrics from another that has them. The replica that holds
the lock of the run's directory is the first: it alone reads and writes there. Where it is gone, another takes the lock.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainledger.engine.train.checkpoint import all_checkpoints, step_of
from trainledger.engine.train.device import find_device
from trainledger.engine.train.handed_files import HandedFiles
from trainledger.engine.train.handing_over import give, take
from trainledger.engine.train.metrics import Lines
from trainledger.engine.train.observer import TrainingState
from trainledger.engine.train.ranks import REPLICA, O, Ranks, T
from trainledger.engine.train.run_directory import read_state, taken
from trainledger.engine.train.step import Alone, Clock, Feed, Together
from trainledger.engine.train.stop import EndedElsewhere, LostRank, NotCommitted, Stopped
from trainledger.spec.problem import InvalidInput, Problem, refuse_given
from trainledger.spec.run import Run

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own name: the address of the server that knows which replicas there are
MEETING = "TRAINLEDGER_MEETING"  # how many replicas are started together, and the port of a store that counts them
MOST_FAILURES = 10  # steps one after another that nobody could take
MOST_LINES = 10_000  # of metrics, for a replica that becomes the first or comes again
_SECONDS_TO_MEET = 60.0  # for those that are started together


@dataclass
class _Membership:
    """What changes: who took the last step, how often nobody could, whether another's state has come, whether this
    replica holds the lock, and since when nobody who takes steps does."""

    took: tuple[int, ...] = ()
    failures: int = 0
    healed: bool = False
    holds: bool = False
    unwritten_since: float | None = None


@dataclass(frozen=True, kw_only=True)
class Replica(Ranks):
    """This process among the replicas of a run. It is alone with its model, so ``size`` is 1."""

    run_dir: Path
    index: int
    count: int
    manager: Any  # torchft's
    group: Any  # the connections to the other replicas of a step, which torchft makes anew where these are others
    lock: ExitStack = field(default_factory=ExitStack)
    kept: Lines = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    now: _Membership = field(default_factory=_Membership)

    @property
    def first(self) -> bool:
        return self.now.holds

    @property
    def alone(self) -> bool:
        return False

    @property
    def took(self) -> tuple[int, ...]:
        return self.now.took

    @property
    def lines(self) -> Lines:
        return self.kept

    @property
    def with_whole_model(self) -> Together:
        return _ReplicaTogether(self)

    @property
    def saves(self) -> bool:
        return self.first  # all have the same

    def watching(self, observers: Sequence[O]) -> list[O]:
        return list(observers) if self.first else []

    def holding(self, run_dir: Path) -> AbstractContextManager[None]:
        return nullcontext()  # since before there was anything to begin

    def attach(self, state: TrainingState, feed: Feed) -> None:
        def heal(given: dict[str, Any]) -> None:
            take(state, feed, self.kept, given)
            self.now.healed = True

        self.manager.load_state_dict({"step": state.step, "batches_committed": 0})
        self.manager.register_state_dict_fn("run", heal, lambda: give(state, feed, self.kept))

    def meet(self) -> bool:
        self.now.healed = False
        try:
            self.manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            why = f"{error}".split("\n")[0]
            raise LostRank(f"The replicas of this run cannot be asked who takes a step ({why}).") from error
        if self.manager.errored() is not None:
            self._not_committed()
        if not (self.now.healed or self.first or self.now.took):
            self._refuse_behind()  # before the first step
        return self.now.healed

    def dealt(self, whole: Sequence[T]) -> Sequence[T]:
        return whole[self.manager.participating_rank() :: self.manager.num_participants()]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients over all replicas, in place."""
        for each in parameters:
            if each.grad is None:  # it may have one elsewhere
                each.grad = torch.zeros_like(each)
        sent = [self.manager.allreduce(each.grad, reduce_op=dist.ReduceOp.SUM) for each in parameters]
        for each in sent:
            each.wait()

    def settled(self, *numbers: float) -> list[float]:
        mine = [float(each == self.index) for each in range(self.count)]
        total = torch.tensor([*numbers, float(self.first), *mine], dtype=torch.float64, device=self.device)
        self.manager.allreduce(total, reduce_op=dist.ReduceOp.SUM).wait()
        if not self.manager.should_commit():
            self._not_committed(asked=True)
        self.now.failures = 0
        found: list[float] = total.tolist()
        self._refuse_unwritten(written=found[len(numbers)] > 0)
        self.now.took = tuple(index for index, each in enumerate(found[len(numbers) + 1 :]) if each)
        return found[: len(numbers)]

    def ends(self, n_asked: float) -> bool:
        return n_asked == len(self.took)  # else those leave, and the others go on

    def takes_over(self, *, wait: bool = False) -> bool:
        if self.first:
            return False
        deadline = time.monotonic() + self.seconds
        while not self.take_lock():
            if not wait:
                return False
            if time.monotonic() > deadline:
                raise LostRank(f"The replica that writes {self.run_dir} did not end within {self.seconds:.0f} s.")
            time.sleep(0.05)
        if not wait:
            self._refuse_behind()
        return True

    def take_lock(self) -> bool:
        """Become the one that writes, where nobody else is."""
        self.now.holds = self.now.holds or taken(self.run_dir, self.lock)
        return self.now.holds

    def _not_committed(self, *, asked: bool = False) -> None:
        """Have the replicas that are left meet again, and raise `NotCommitted`."""
        error = self.manager.errored()
        if not asked:
            self.manager.should_commit()  # counts the failure, so that all connections are made anew
        self.group.abort()  # at once, so that a replica that waits for this one does not wait for its time-out
        self.now.failures += 1
        if self.now.failures >= MOST_FAILURES:
            why = "no reason known" if error is None else f"{error.original_exception}".split("\n")[0]
            raise LostRank(f"No step could be taken together with the other replicas {MOST_FAILURES} times ({why}).")
        raise NotCommitted

    def _refuse_unwritten(self, *, written: bool) -> None:
        """Raise where none of those who take steps holds the run's directory: at the first step, or for long."""
        if written:
            self.now.unwritten_since = None
            return
        with ExitStack() as probe:
            if taken(self.run_dir, probe):
                return  # of one that was lost just now: whoever meets next takes it
        if not self.now.took:
            rule = "another process is training in this directory; wait for it or choose another directory"
            raise InvalidInput([Problem("run directory", str(self.run_dir), rule)])
        self.now.unwritten_since = self.now.unwritten_since or time.monotonic()
        if time.monotonic() - self.now.unwritten_since > self.seconds:
            raise LostRank(f"The replica that holds {self.run_dir} has taken no step for {self.seconds:.0f} s; end it.")

    def _refuse_behind(self) -> None:
        """Raise `LostRank` where the run has gone further than this replica and nobody is left to give its state."""
        newest = max((step_of(each) for each in all_checkpoints(self.run_dir)), default=0)
        state = read_state(self.run_dir) or {}
        if newest > self.manager.current_step() or state.get("state") == "finished":
            raise LostRank(
                f"The run has gone on to step {newest}, and no replica gives its state; start this one again."
            )


@dataclass(frozen=True)
class _ReplicaTogether(Alone):
    """A step of one replica."""

    replica: Replica

    def finish_gradients(self, model: nn.Module, clock: Clock) -> None:
        with clock("backward"):
            self.replica.sum_gradients([each for each in model.parameters() if each.requires_grad])


@contextmanager
def as_replica(run: Run, run_dir: Path, *, seconds: float) -> Iterator[Replica]:
    """This process as one of the replicas of a run: known to the others when the block begins, gone when it ends."""
    refuse(run)
    index = int(os.environ[REPLICA])
    torchft = find_torchft()
    device = find_device(run.cluster.backend, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=seconds)
    group = torchft.ProcessGroupGloo(timeout) if device.type == "cpu" else torchft.ProcessGroupNCCL(timeout)
    host = socket.gethostname()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    manager = torchft.Manager(
        group, None, None, min_replica_size=1, use_async_quorum=False, rank=0, world_size=1, store_addr=host,
        store_port=store.port, replica_id=f"replica-{index:05d}", timeout=timeout, quorum_timeout=timeout,
        checkpoint_transport=HandedFiles(run_dir, index),
    )  # fmt: skip
    with ExitStack() as lock:
        # Who holds the lock is known to the others by now, so none of them begins the run without it.
        replica = Replica(
            device=device, seconds=seconds, run_dir=run_dir, index=index, count=run.layout.replicate, manager=manager,
            group=group, lock=lock,
        )  # fmt: skip
        try:
            replica.take_lock()
            _meet_those_started_together()
            yield replica
        except Stopped as end:
            if end.of_all_ranks and not replica.first:
                raise EndedElsewhere(0, end.exit_code) from end
            raise
        finally:
            manager.shutdown(wait=False)


def _meet_those_started_together() -> None:
    """Wait until all that are started together are known, so that a run always begins with the same replicas."""
    if MEETING not in os.environ:
        return
    count, port = os.environ[MEETING].split(":")
    store = TCPStore("localhost", int(port), is_master=False, wait_for_workers=False)
    deadline = time.monotonic() + _SECONDS_TO_MEET
    store.add("here", 1)
    while store.add("here", 0) < int(count) and time.monotonic() < deadline:
        time.sleep(0.02)


def find_torchft() -> Any:
    """torchft; `InvalidInput` where it is not installed."""
    os.environ.setdefault("RUST_LOG", "error")  # it is read when the library is loaded
    try:
        import torchft
    except ImportError as error:
        rule = f"needs torchft ({error}): pip install 'trainledger[replicas]'"
        raise InvalidInput([Problem("--replicas", None, rule)]) from error
    for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters of it is said in sentences of ours
    return torchft


def refuse(run: Run) -> None:
    """Raise `InvalidInput` for a run that cannot be trained by replicas that come and go."""
    layout = run.layout
    if layout.devices != layout.replicate or layout.replicate == 1:
        rule = "takes a layout of replicas alone, each of one process (layout.replicate, at least 2)"
        raise InvalidInput([Problem("--replicas", None, rule)])
    beyond, overlap = run.recipe.guard.beyond.kind, set(layout.overlap or ()) - {"gradients"}
    refuse_given([
        ("layout.overlap", sorted(overlap), "is not done where replicas come and go", "none"),
        ("recipe.guard.beyond", beyond == "roll-back" and beyond, "goes back on ranks that stay the same only", "stop"),
    ])  # fmt: skip
