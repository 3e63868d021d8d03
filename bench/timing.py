"""What benchmarks share: CPU seconds of commands, works in turns, environments that borrow this one's packages."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

# Without compiled files on disk every start compiles the source again, which is not what is measured.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def cpu_seconds(
    command: list[str], environment: Mapping[str, str] = ENVIRONMENT, codes: tuple[int, ...] = (0,)
) -> float:
    """User and system time of a command, which must end with one of ``codes``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True)
    if done.returncode not in codes:
        done.check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def interleaved(works: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of the seconds that each work returns; they take turns, so that a disturbance costs each alike."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            samples[name].append(work())
    return {name: median(seconds) for name, seconds in samples.items()}


def borrowing(folder: Path) -> str:
    """The Python of a new environment that has this one's packages too."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    (Path(own) / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def not_installed(python: str, package: str) -> str:
    """Why pip could not install a package into an environment; empty where it could."""
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", package], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["pip failed"])[-1][:200] if done.returncode else ""
