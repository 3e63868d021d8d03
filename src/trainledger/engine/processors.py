"""The cores that this process may use, and how many of them other processes leave free; read without torch."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean

_CGROUPS = Path("/sys/fs/cgroup")


def cores(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use, by its affinity and the quotas of its control groups (versions 1 and 2)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = {Path()}  # in a container the group's own files are at the root
    with suppress(OSError):
        for line in own.read_text().splitlines():
            inner = Path(line.split(":", 2)[2].lstrip("/"))
            groups |= {inner, *inner.parents}
    for group in groups:
        for base, names in ((cgroups, ["cpu.max"]), (cgroups / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"])):
            with suppress(OSError, ValueError):  # "max" and -1 say that there is none
                quota, period = map(int, " ".join((base / group / name).read_text() for name in names).split())
                allowed = min(allowed, max(1, round(quota / period))) if quota > 0 else allowed
    return allowed


# The load of a minute still has what ended in it, such as an installation; what runs at one moment may be a blip.
def free_cores(proc: Path = Path("/proc")) -> float:
    """Of `cores`, those that others leave: the smaller of the last minute's load and half a second's counts."""
    running, load = [], os.getloadavg()[0]
    with suppress(OSError, ValueError, IndexError):
        for _ in range(5):
            running.append(int((proc / "loadavg").read_text().split()[3].partition("/")[0]) - 1)  # without this one
            time.sleep(0.1)
        load = min(load, mean(running))
    return cores() * max(0.0, 1 - load / (os.cpu_count() or 1))


# Threads of OpenMP that wait for each other spin. With more of them than free cores each waits for one that does not
# run: 67 tokens/s under a load of 15 on two cores, where a quiet machine has 4,000.
def make_way(*, fewer: bool = True) -> str | None:
    """Take threads that wait without spinning, and no more than there are free cores, where others are at work.

    A sentence of it, None where nobody is. OpenMP reads the environment when torch is imported; what a person has set
    stays. The number of threads decides the last bits of sums: not ``fewer`` leaves it.
    """
    if not fewer and "OMP_WAIT_POLICY" in os.environ:
        return None
    all_cores, busy = cores(), os.getloadavg()[0] / (os.cpu_count() or 1)
    free = all_cores if all_cores * busy < _QUIET else free_cores()
    threads = max(1, round(free))
    if threads >= all_cores:
        return None
    passive = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    for name, value in (({"OMP_NUM_THREADS": f"{threads}"} if fewer else {}) | passive).items():
        os.environ.setdefault(name, value)
    how = f"threads here: {os.environ['OMP_NUM_THREADS']}, waiting passively" if fewer else "threads wait passively"
    return f"Other processes leave about {free:.1f} of {all_cores} cores: {how}."


_QUIET = 0.5  # cores in use: a machine on which nobody is at work
