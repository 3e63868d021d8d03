"""Before the first step: what is sure to go wrong later is said now, by the first rank, with an exit code.

Ranks that are not alike end with 2, a disk that will not hold the checkpoints with 4, a collective that does not go
through with 5, memory that will not do with 6.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainledger
from trainledger.engine.train.ranks import WRONG_INPUT, Ranks
from trainledger.engine.train.run_directory import Say, checkpoints_dir
from trainledger.engine.train.stop import CannotSave, FailedBefore, LostRank, OutOfMemory
from trainledger.spec.durable import parse_json, write_json
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.runfile import to_toml
from trainledger.spec.units import KIB, MIB, format_nbytes, format_seconds

# Limits of a process, and what of /proc/self/status counts against each.
COUNTED = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}
# Addresses that threads to come reserve and hardly use: their stacks, and 64 MiB of glibc's for each.
_THREADS_NBYTES = 192 * MIB
_CGROUPS = Path("/sys/fs/cgroup")
# Of version 2 and version 1: limit, usage, and pages of files in it that the system takes back when it needs them.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class Free:
    """So many bytes may still be taken, as ``limit`` allows."""

    nbytes: int
    limit: str


def of_process() -> Free | None:
    """What the process' own limits leave it; None without such limits."""
    taken = status()
    found = []
    for name, counted in COUNTED.items():
        most = resource.getrlimit(getattr(resource, name))[0]
        if most != resource.RLIM_INFINITY:
            reserved = _THREADS_NBYTES if name == "RLIMIT_AS" else 0
            found.append(
                Free(most - taken.get(counted, 0) - reserved, f"{name} (ulimit -{'v' if name == 'RLIMIT_AS' else 'd'})")
            )
    return min(found, key=lambda free: free.nbytes, default=None)


def status() -> Mapping[str, int]:
    """What the system says that this process has, in bytes: VmSize, VmData, VmHWM and others."""
    return _kibibytes(Path("/proc/self/status"))


def of_machine(
    cgroups: Path = _CGROUPS, proc: Path = Path("/proc"), *, own: Path = Path("/proc/self/cgroup")
) -> Free | None:
    """What the machine, or a control group that this process is in, has left for all processes in it together."""
    frees = list(_of_cgroups(cgroups, own))
    memory = _kibibytes(proc / "meminfo")
    if "MemAvailable" in memory:
        frees.append(Free(memory["MemAvailable"], "this machine's memory"))
    with suppress(OSError, KeyError):
        if (proc / "sys/vm/overcommit_memory").read_text().strip() == "2":  # the system promises no more than it has
            frees.append(Free(memory["CommitLimit"] - memory["Committed_AS"], "vm.overcommit_memory = 2"))
    return min(frees, key=lambda free: free.nbytes, default=None)


def of_device(device: torch.device) -> Free | None:
    """What is free on a GPU; None of other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return Free(free, f"{torch.cuda.get_device_name(device)} (other processes on it included)")


def _of_cgroups(root: Path, own: Path) -> Iterator[Free]:
    """Of each control group of this process and those around it that has a limit."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            hierarchy = root / "memory" if controllers else root
            inner = Path(name.lstrip("/"))
            # In a container the group's own files are at the root, and its name is that outside of the container.
            for path in (*(hierarchy / part for part in (inner, *inner.parents)),):
                yield from _of_cgroup(path)


def _of_cgroup(group: Path) -> Iterator[Free]:
    for limit, usage, reclaimable in _FILES:
        with suppress(OSError, ValueError):
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
            back = re.search(rf"^{reclaimable} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            if most < 2**60:  # version 1 says no limit by a number near 2**63
                yield Free(most - used + (int(back[1]) if back else 0), f"the control group {group}")


def _kibibytes(path: Path) -> Mapping[str, int]:
    """The amounts in a file of lines such as ``VmSize:  4096 kB``, in bytes."""
    with suppress(OSError):
        found = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE)
        return {name: int(amount) * KIB for name, amount in found}
    return {}


# What a process on a CPU takes beside its tensors, measured (docs/log): a fixed part, and a share of the peak that lies
# between tensors. It is far larger where freed memory is kept for the next tensor: 0.6 to 2.2 with it, 0.1 without.
BESIDE_NBYTES = 64 * MIB
# With a recomputed model 565 MB of a peak of 178 were taken after 6 steps, 577 after 30: twice the peak was once
# thought enough to keep what is freed, and the run under that limit ended.
KEPT_SHARE, LEAN_SHARE = 3.0, 0.25
COMPILER_NBYTES = 1024 * MIB
METRICS_NBYTES = 16 * MIB  # what else a run writes
HEADER_NBYTES = MIB  # of a safetensors file: some hundred bytes for each tensor
REFUSED = "preflight.json"  # in the run's directory, where it found something
LESS = "a smaller recipe.micro_batch or recipe.activation_checkpointing = full needs less"


@dataclass(frozen=True)
class Needs:
    """What the account says that a rank needs, in bytes.

    ``device`` is what an accelerator has to have free (None: tensors are in main memory), ``peak`` the tensors at the
    peak of a step, ``copies`` those of a checkpoint that is written in the background, ``checkpoint``
    that of all ranks, ``file`` the largest file that this rank writes of it, ``message`` its largest collective.
    """

    peak: int
    device: int | None
    copies: int
    checkpoint: int
    file: int
    message: int

    def host(self, recipe: Recipe, share: float) -> int:
        """Of main memory, beside what the process has before the model is built."""
        tensors = self.peak if self.device is None else 0
        return round((1 + share) * tensors) + self.copies + BESIDE_NBYTES + COMPILER_NBYTES * recipe.compiles


NeedsOf = Callable[[Run, Ranks], Needs]


def preflight(run: Run, run_dir: Path, ranks: Ranks, needs_of: NeedsOf, say: Say) -> bool:
    """Look whether a run can be trained to its end; on a CPU, whether there is memory to keep what is freed.

    Raises on the first rank, and `EndedElsewhere` on others: `InvalidInput`, `CannotSave`, `LostRank`, `OutOfMemory`.
    """
    try:
        return _looked_at(run, run_dir, ranks, needs_of, say)
    except (InvalidInput, CannotSave, OutOfMemory) as error:
        if ranks.first:
            write_json(run_dir / REFUSED, {"why": str(error), "exit_code": getattr(error, "exit_code", WRONG_INPUT)})
        raise


def refused_before(run_dir: Path) -> FailedBefore | None:
    """What the preflight of an earlier start has found, which a restart at once would find again."""
    try:
        found = parse_json((run_dir / REFUSED).read_text(encoding="utf-8"))
        return FailedBefore(f"Not started again, as it would end so again: {found['why']}", int(found["exit_code"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_refusal(run_dir: Path) -> None:
    """A new start is looked at anew."""
    (run_dir / REFUSED).unlink(missing_ok=True)


def _looked_at(run: Run, run_dir: Path, ranks: Ranks, needs_of: NeedsOf, say: Say) -> bool:
    if ranks.size > 1:
        alike = ranks.together(lambda: facts_of(run))
        ranks.of_first(lambda: refuse_different(alike))
    needs = needs_of(run, ranks)
    ranks.of_first(lambda: refuse_full_disk(run, run_dir, needs))
    if ranks.size > 1:
        seconds = collective_seconds(ranks, max(ranks.together(lambda: needs.message)))
        say(_told(ranks, *seconds))
    memory = ranks.together(lambda: _memory_of(run, ranks, needs))
    keeps: bool = ranks.of_first(lambda: judge_memory(memory))
    if not keeps and ranks.device.type == "cpu":
        say("Memory is tight: freed memory goes back to the system at once, which costs some time in each step.")
    return keeps


# Alike


def facts_of(run: Run) -> dict[str, str]:
    """What must be the same on all ranks, by the words for it; the data are compared when they are opened."""
    return {
        "host": socket.gethostname(),
        "run file": hashlib.sha256(to_toml(run).encode()).hexdigest()[:12],
        "torch": torch.__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "trainledger": f"{trainledger.__version__} ({code_digest()})",
    }


# Versions are not enough: two checkouts of one version may differ, and ranks that run other code agree in everything
# but their numbers.
@cache
def code_digest() -> str:
    """The beginning of a SHA-256 of this package's source files."""
    root = Path(trainledger.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def refuse_different(facts: Sequence[Mapping[str, str]]) -> None:
    """Raise `InvalidInput` with a sentence for each fact in which a rank is not as the first."""
    problems = []
    for name in facts[0].keys() - {"host"}:
        for rank, fact in enumerate(facts):
            if fact[name] != facts[0][name]:
                there, here = f"rank {rank} ({fact['host']})", f"rank 0 ({facts[0]['host']})"
                rule = f"is {fact[name]} on {there}, and {facts[0][name]} on {here}; all ranks must have the same"
                problems.append(Problem(name, None, rule))
                break
    if problems:
        raise InvalidInput(sorted(problems, key=lambda problem: problem.field))


# Disk


# The one that is being written counts beside those that are kept, and so does one that a stop writes: a disk that holds
# all but the last would fail at the end.
def checkpoints_at_once(recipe: Recipe) -> int:
    """How many checkpoints there are at most at one time, that which is being written and one of a stop included."""
    last, every, keep = recipe.total_steps, recipe.checkpoints.every, recipe.checkpoints.keep_every
    due = 1 if every is None else math.ceil(last / every)
    for_good = 0 if keep is None or every is None else last // math.lcm(keep, every)
    return min(recipe.checkpoints.keep_last + for_good, due) + 1


def refuse_full_disk(run: Run, run_dir: Path, needs: Needs) -> None:
    """Raise `CannotSave` where the disk will not hold the checkpoints that are kept, or a file may not be as large."""
    there = sum(path.stat().st_size for path in checkpoints_dir(run_dir).rglob("*") if path.is_file())
    number = checkpoints_at_once(run.recipe)
    needed = max(number * needs.checkpoint - there, needs.checkpoint) + METRICS_NBYTES
    disk = os.statvfs(run_dir)
    free = disk.f_bavail * disk.f_frsize
    if free < needed:
        what = f"{number} checkpoints of {format_nbytes(needs.checkpoint)} at one time"
        fewer = "fewer of recipe.checkpoints.keep_last, or a rarer keep_every, take less"
        left = f"The disk of {run_dir} has {format_nbytes(free)} left"
        raise CannotSave(f"{left}, and {what} take {format_nbytes(needed)} more; {fewer}.")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and most < needs.file + HEADER_NBYTES:
        raise CannotSave(
            f"RLIMIT_FSIZE (ulimit -f) allows files of {format_nbytes(most)}, and a file of a checkpoint has "
            f"about {format_nbytes(needs.file)}."
        )


# A collective


# gloo between two ranks of one machine gave 0.9 to 1.6 GB/s for an all-reduce beside other programs (two cores, torch
# 2.13), so that the time says little of a network by itself; wrong sums say all.
def collective_seconds(ranks: Ranks, nbytes: int) -> tuple[int, float]:
    """The bytes of an all-reduce over all ranks and the time that it took on the slowest; its sums are looked at."""
    count = max(1, nbytes // 4)
    for size in (1, count):  # the first connects the ranks
        tensor = torch.full((size,), float(ranks.rank + 1), device=ranks.device)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        low, high = tensor.min().item(), tensor.max().item()  # waits for the device
        seconds = time.perf_counter() - started
        del tensor
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # what is free is looked at next
    expected = ranks.size * (ranks.size + 1) / 2

    def checked() -> float:
        if (low, high) != (expected, expected):
            raise LostRank(
                f"An all-reduce of {format_nbytes(4 * count)} gave sums of {low:g} to {high:g} on rank {ranks.rank} "
                f"instead of {expected:g}: the network or a driver is at fault."
            )
        return seconds

    return 4 * count, max(ranks.together(checked))


def _told(ranks: Ranks, nbytes: int, seconds: float) -> str:
    rate = 2 * (ranks.size - 1) / ranks.size * nbytes / seconds  # bus bandwidth, as NCCL's tests count it
    what = f"An all-reduce of {format_nbytes(nbytes)} over {ranks.size} ranks"
    return f"{what} took {format_seconds(seconds)}: {format_nbytes(round(rate))}/s for each."


# Memory


def _memory_of(run: Run, ranks: Ranks, needs: Needs) -> dict[str, Any]:
    """What a rank needs and what is free for it."""

    def plain(found: Any) -> dict[str, Any] | None:
        return None if found is None else asdict(found)

    return {
        "host": socket.gethostname(),
        "lean": needs.host(run.recipe, LEAN_SHARE),
        "kept": needs.host(run.recipe, KEPT_SHARE),
        "device": needs.device,
        "own": plain(of_process()),
        "machine": plain(of_machine()),
        "free": plain(of_device(ranks.device)),
    }


def judge_memory(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is so much memory that what is freed may be kept; raises `OutOfMemory` where it will not do.

    Ranks of one machine share what is free on it.
    """
    by_host: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        by_host.setdefault(each["host"], []).append(rank)
        for needed, free in ((each["device"], each["free"]), (each["lean"], each["own"])):
            if needed is not None and free is not None and needed > free["nbytes"]:
                raise OutOfMemory(_short(f"Rank {rank} ({each['host']})", needed, free))
    keeps = all(each["own"] is None or each["kept"] <= each["own"]["nbytes"] for each in ranks)
    for host, here in by_host.items():
        # Each has looked at another moment, when others had taken some already or not.
        free = min(
            (ranks[each]["machine"] for each in here), key=lambda each: math.inf if each is None else each["nbytes"]
        )
        if free is None:
            continue
        together = f"Rank {here[0]}" if len(here) == 1 else f"{len(here)} ranks"
        lean, kept = (sum(ranks[each][name] for each in here) for name in ("lean", "kept"))
        if lean > free["nbytes"]:
            raise OutOfMemory(_short(f"{together} ({host})", lean, free))
        keeps = keeps and kept <= free["nbytes"]
    return keeps


def _short(who: str, needed: int, free: Mapping[str, Any]) -> str:
    left = format_nbytes(max(free["nbytes"], 0))
    return f"{who} will need {format_nbytes(needed)}, and {free['limit']} leaves {left}; {LESS}. --no-preflight tries."
