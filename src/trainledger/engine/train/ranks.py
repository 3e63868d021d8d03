"""The processes that train one run: which of them this is, how they meet, and how they agree on facts and failures.

torchrun (or `engine.train.launch`) starts the processes and tells each its rank in the environment. Facts travel
as JSON text: a rank that dies is noticed at once by those who wait for it, by its closed connections.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trainledger.engine.train.device import find_device
from trainledger.engine.train.stop import EndedElsewhere, LostRank, Stopped, end_with_launcher
from trainledger.spec.durable import is_full
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run

WRONG_INPUT = 2  # the exit code of the command line for InvalidInput
FAILED, DISK_FULL = 1, 4  # its exit codes for other failures, and for a full disk
SECONDS_IN_A_COLLECTIVE = 600.0
_LONGEST_PAUSE = 1.0  # seconds between two words of ranks that wait for one that prepares text or writes a checkpoint


@dataclass(frozen=True)
class Ranks:
    """One process among those of a run; the default is a process alone."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    numbers: Any = None  # a gloo group of all ranks, for the numbers and facts that they agree on
    seconds: float = SECONDS_IN_A_COLLECTIVE  # how long a collective waits for a rank before it fails

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes the run's files and speaks to the person who started it."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other process to agree with."""
        return self.size == 1

    def together(self, make: Callable[[], Any]) -> list[Any]:
        """What ``make`` gives on every rank, by rank; values that JSON holds.

        All ranks must call this at the same point. Where it raises on some rank, it raises on all: the lowest of those
        ranks raises its own error, the others `EndedElsewhere`. It may take as long as it likes, in a thread; a rank
        that is gone or stopped meanwhile is noticed within ``seconds``.
        """
        if self.size == 1:
            return [make()]
        made = self._made(make)
        error = made.exception()
        mine = {"value": made.result()} if error is None else {"code": _exit_code(error)}
        said = [json.loads(each) for each in self._all_said(json.dumps(mine))]
        failed = next((rank for rank, each in enumerate(said) if "code" in each), None)
        if failed is None:
            return [each["value"] for each in said]
        if failed == self.rank and error is not None:
            raise error
        raise EndedElsewhere(failed, said[failed]["code"])

    def _made(self, make: Callable[[], Any]) -> Future[Any]:
        """What ``make`` gave or raised, once every rank has it; until then each says that it is there."""
        made: Future[Any] = Future()

        def settle() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # which device is the current one is a matter of the thread
                made.set_result(make())
            except BaseException as error:  # raised again in the thread that asked
                made.set_exception(error)

        threading.Thread(target=settle, name="trainledger together", daemon=True).start()
        pause = 0.001
        wait([made], timeout=pause)
        while self.summed(float(not made.done()))[0]:
            wait([made], timeout=pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return made

    # Facts travel through a gloo group and not through the store: ranks that waited on the store did not notice one
    # that was killed (torch 2.13), while a closed connection of gloo ends the wait at once.
    def _all_said(self, text: str) -> list[bytes]:
        """What every rank says, by rank."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self.numbers)
        longest = int(max(lengths))
        padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.numbers)
        return [bytes(tensor[: int(n)].tolist()) for tensor, n in zip(texts, lengths, strict=True)]

    def of_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives on the first rank, on all of them; it runs there only. Raises as `together` does."""
        return self.together(lambda: make() if self.first else None)[0]

    def summed(self, *numbers: float) -> list[float]:
        """The sum over all ranks of each number."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total, group=self.numbers)
        return total.tolist()


@contextmanager
def joined(run: Run, *, seconds: float = SECONDS_IN_A_COLLECTIVE) -> Iterator[Ranks]:
    """This process among the ranks of a run; they have met when the block begins, and part when it ends.

    ``seconds`` is how long a collective waits for a rank before it fails. Raises `InvalidInput` where the processes
    that were started are not as many as the layout's devices.
    """
    started = _of_launcher("WORLD_SIZE", 1)
    refuse_other_count(run, started)
    local = _of_launcher("LOCAL_RANK", 0)
    device = find_device(run.cluster.backend, local)
    if started == 1:
        yield Ranks(device=device)
        return
    end_with_launcher()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=seconds)
    with lost_ranks_named(seconds):
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        store = _without_earlier_keys(store, rank, size, seconds)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        ours = PrefixStore("collectives", store)
        dist.init_process_group(backend, store=ours, rank=rank, world_size=size, timeout=timeout)
    parted = False
    try:
        with lost_ranks_named(seconds):
            numbers = dist.new_group(backend="gloo", timeout=timeout)
            try:
                yield Ranks(rank, size, device, numbers, seconds)
            except Stopped as end:
                if end.of_all_ranks:
                    with suppress(RuntimeError):  # the store went with a launcher that was killed
                        _leave(store, rank, size)
                    parted = True
                raise
            _leave(store, rank, size)
            parted = True
    finally:
        # NCCL waits for kernels of collectives that this rank will not come to any more: the process just ends then.
        if parted or device.type != "cuda":
            dist.destroy_process_group()


def _exit_code(error: BaseException) -> int:
    """What the command line ends with for an error."""
    if isinstance(error, Stopped):
        return error.exit_code
    if isinstance(error, InvalidInput):
        return WRONG_INPUT
    return DISK_FULL if isinstance(error, OSError) and is_full(error) else FAILED


# A restarted rank once met the keys of its predecessor in the store, which torchrun keeps, and waited for ever.
def _without_earlier_keys(store: Any, rank: int, size: int, seconds: float) -> Any:
    """A part of the store with nothing in it of processes that torchrun has ended and started again.

    torchrun keeps one store through all restarts, and its nodes do not count them alike. So each process waits for an
    answer to a word that it alone has said: the first rank answers every word it sees until all ranks have come.
    """
    word = uuid4().hex
    store.set(f"trainledger/word/{rank}", word)
    if rank > 0:
        ours = PrefixStore(store.get(f"trainledger/answer/{word}").decode(), store)
        ours.set(f"here/{rank}", "")
        return ours
    ours = PrefixStore(word, store)
    missing, answered = set(range(1, size)), set()
    deadline = time.monotonic() + seconds
    while missing:
        if time.monotonic() > deadline:
            raise LostRank(f"Rank {min(missing)} did not come within {seconds:.0f} s; --resume tries again.")
        for each in missing:
            if store.check([f"trainledger/word/{each}"]):
                said = store.get(f"trainledger/word/{each}").decode()
                if said not in answered:
                    store.set(f"trainledger/answer/{said}", word)
                    answered.add(said)
        missing = {each for each in missing if not ours.check([f"here/{each}"])}
        time.sleep(0.02)
    return ours


def _leave(store: Any, rank: int, size: int) -> None:
    """Wait until no rank needs the others' connections any more, and on the first, until none needs the store."""
    for word in ("done", "gone"):
        store.set(f"{word}/{rank}", "")
        if word == "done" or rank == 0:
            store.wait([f"{word}/{index}" for index in range(size)])


# What gloo, NCCL and the store say when another process is gone or silent.
_PLACE_IN_SOURCES = re.compile(r"^\[[^]]*\] *")
_LOST = ("connection", "timed out", "timeout", "broken pipe", "socket", "remote process", "peer")


@contextmanager
def lost_ranks_named(seconds: float) -> Iterator[None]:
    """Turn what a collective says of a rank that is gone into `LostRank`."""
    try:
        yield
    except RuntimeError as error:
        said = _PLACE_IN_SOURCES.sub("", f"{error}".split("\n")[0].split(". ")[0]) or type(error).__name__
        if not any(each in str(error).lower() for each in _LOST) or "in use" in str(error):
            raise
        raise LostRank(
            f"Another rank is gone, or silent for more than {seconds:.0f} s ({said}); what came after the last "
            "checkpoint is lost, and --resume goes on from it."
        ) from error


def _of_launcher(name: str, default: int) -> int:
    """A number that torchrun leaves in the environment."""
    if (given := os.environ.get(name, str(default))).isdecimal():
        return int(given)
    rule = "in the environment must be a whole number, as torchrun sets it; without it one process trains"
    raise InvalidInput([Problem(name, given, rule)])


# torchrun counts restarts of its own machine only; a machine that replaces another begins at 0.
def restarted() -> bool:
    """Whether torchrun has started this rank again after one was lost: the run then goes on from its checkpoint."""
    return _of_launcher("TORCHELASTIC_RESTART_COUNT", 0) > 0


def this_rank() -> int | None:
    """The rank that torchrun has given this process; None where it was started alone."""
    return _of_launcher("RANK", 0) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def refuse_other_count(run: Run, started: int) -> None:
    """Raise `InvalidInput` where a layout takes another number of processes than were started."""
    needed = run.layout.devices
    if run.layout.auto:
        rule = "is searched for by plan and layouts; the engine trains a layout that is written down"
        raise InvalidInput([Problem("layout.auto", True, rule, False)])
    if needed == started:
        return
    if started == 1:
        rule = (
            f"takes {needed} processes, and this is one; add --ranks {needed}, or start it by "
            f"torchrun --nproc-per-node {needed} -m trainledger train ..."
        )
        raise InvalidInput([Problem("layout", None, rule)])
    rule = f"takes {needed} process{'es' if needed > 1 else ''}, and {started} were started"
    raise InvalidInput(
        [
            Problem(
                "layout", None, rule, f"layout.shard = {started} and cluster.count = {started}" if needed == 1 else None
            )
        ]
    )
