"""How much memory a process may still take, and what says so: its own limits, control groups, the machine, the GPU."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from trainledger.spec.units import KIB, MIB

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
    return min(found, key=lambda each: each.nbytes, default=None)


def status() -> Mapping[str, int]:
    """What the system says that this process has, in bytes: VmSize, VmData, VmHWM and others."""
    return _kibibytes(Path("/proc/self/status"))


def of_machine(
    cgroups: Path = _CGROUPS, proc: Path = Path("/proc"), *, own: Path = Path("/proc/self/cgroup")
) -> Free | None:
    """What the machine, or a control group that this process is in, has left for all processes in it together."""
    found = list(_of_cgroups(cgroups, own))
    memory = _kibibytes(proc / "meminfo")
    if "MemAvailable" in memory:
        found.append(Free(memory["MemAvailable"], "this machine's memory"))
    with suppress(OSError, KeyError):
        if (proc / "sys/vm/overcommit_memory").read_text().strip() == "2":  # the system promises no more than it has
            found.append(Free(memory["CommitLimit"] - memory["Committed_AS"], "vm.overcommit_memory = 2"))
    return min(found, key=lambda each: each.nbytes, default=None)


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
            for each in (*(hierarchy / part for part in (inner, *inner.parents)),):
                yield from _of_cgroup(each)


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
