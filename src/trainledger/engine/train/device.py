"""The torch device of a run, its memory, and the process-wide switches under which numbers come out the same."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from trainledger.spec.precision import Precision
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.units import KIB


def find_device(backend: str, local_rank: int = 0) -> torch.device:
    """The device that ``cluster.backend`` names; ``auto`` takes cuda, then mps, then cpu.

    Of several GPUs of a machine, the one of this process' ``local_rank``. Raises `InvalidInput` where the named backend
    or that GPU is not there.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    found = next(name for name, there in present.items() if there)
    name = found if backend == "auto" else backend
    if not present.get(name, False):
        rule = f"torch {torch.__version__} finds no such device on this machine"
        raise InvalidInput([Problem("cluster.backend", backend, rule, found)])
    if name != "cuda":
        return torch.device(name)
    if local_rank >= torch.cuda.device_count():
        rule = f"has {torch.cuda.device_count()} GPUs here, and this is process {local_rank + 1} of this machine"
        raise InvalidInput([Problem("cluster.backend", backend, rule)])
    return torch.device(name, local_rank)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on an accelerator is done; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def asynchronous(device: torch.device) -> bool:
    """Whether the host goes on while the device works."""
    return device.type != "cpu"


def host_threads(device: torch.device) -> int:
    """Threads of this process that work during a step: torch's own, and for an accelerator the loop's and backward's.

    >>> host_threads(torch.device("cuda"))
    2
    """
    return torch.get_num_threads() if device.type == "cpu" else 2


def compute_capability(device: torch.device) -> float | None:
    """NVIDIA's number of a device's generation; None of any other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


def memory_in_use(device: torch.device) -> int | None:
    """Bytes that torch holds on an accelerator, or that this process holds of main memory; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            line = next(each for each in status if each.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * KIB


# What the resident set grows by beside the account's peak, one process, fp32 AdamW (MB of a peak in MB): with freed
# memory kept 32 of 11, 94 of 119, 112 to 133 of 156 (5 to 60 steps: it does not go on growing), 262 of 461; with blocks
# from 128 KiB on given back 39 of 156, 45 of 461.
def keep_freed_memory() -> bool:
    """Make glibc keep large freed blocks for the next allocation; True where it was set.

    By default every tensor above 32 MiB is mapped afresh and unmapped when freed, so each operation on it pays
    a page fault per 4 KiB; the price of keeping them is a larger resident set. A person who set glibc's own
    ``MALLOC_*_`` variables or ``GLIBC_TUNABLES`` is left with that; elsewhere than on glibc this does nothing.
    """
    m_trim_threshold, m_mmap_max, never = -1, -4, -1
    return _set_malloc({m_mmap_max: 0, m_trim_threshold: never})


# glibc's default is no alternative: its threshold learns up to 32 MiB, and runs that were said to fit under `ulimit -d`
# then ended (2 of 2).
def return_freed_memory() -> bool:
    """Make glibc give freed blocks from 128 KiB on back to the system; True where it was set.

    By default it learns to keep blocks up to 32 MiB, and what lies between tensors is then up to two thirds of them.
    """
    m_mmap_threshold = -3
    return _set_malloc({m_mmap_threshold: 128 * KIB})


def _set_malloc(options: dict[int, int]) -> bool:
    chosen = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    done = [mallopt(option, value) for option, value in options.items()]  # each of them, also after a refused one
    return all(done)


def refuse_launches(recipe: Recipe, device: str) -> None:
    """Raises InvalidInput where kernels of a GPU are to be launched otherwise than this process launches them."""
    if recipe.cuda_graphs:
        raise InvalidInput([Problem("recipe.cuda_graphs", True, "is planned, and not what the engine does", False)])
    if recipe.activation_checkpointing.inputs == "host":
        rule = "is planned, and not what the engine does"
        raise InvalidInput([Problem("recipe.activation_checkpointing.inputs", "host", rule, "device")])
    if recipe.launch_blocking and device.startswith("cuda") and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
        rule = "needs CUDA_LAUNCH_BLOCKING=1 in the environment, which CUDA reads when the process begins"
        raise InvalidInput([Problem("recipe.launch_blocking", True, rule, False)])


# TF32 keeps 10 of 23 bits of mantissa; torch took it for CUDA matmuls by default from 1.7 to 1.11.
def set_fp32_matmuls(precision: Precision) -> None:
    """fp32 means fp32 on every device, no TF32 in CUDA matmuls, unless the recipe says tf32."""
    torch.set_float32_matmul_precision("high" if precision.rate == "tf32" else "highest")


_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_SAME_BITS = (":4096:8", ":16:8")  # cuBLAS documentation, Results reproducibility


@contextmanager
def arithmetic(recipe: Recipe, device: torch.device, *, keeps: bool) -> Iterator[None]:
    """Inside, matmuls are in the precision of a recipe, and kernels those that it asks for; ``keeps``: freed memory.

    On a GPU ``recipe.deterministic`` takes kernels that give the same bits each time. Raises `InvalidInput` where torch
    has none for an operation.
    """
    set_fp32_matmuls(recipe.precision)
    if device.type == "cpu":
        keep_freed_memory() if keeps else return_freed_memory()
    # Compiled CPU kernels add up in an order that depends on timing by default; eager ones do not.
    if not (recipe.compiles if device.type == "cpu" else recipe.deterministic):
        yield
        return
    if device.type == "cuda":
        os.environ.setdefault(_VARIABLE, _SAME_BITS[0])  # read when the first matmul is made
    before = torch.are_deterministic_algorithms_enabled()
    filling: Any = torch.utils.deterministic
    filled = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        rule = f"has no such kernel on {device.type} here: {str(error).split(' does not')[0]}"
        raise InvalidInput([Problem("recipe.deterministic", True, rule, False)]) from error
    finally:
        torch.use_deterministic_algorithms(before)
        filling.fill_uninitialized_memory = filled


def refuse_workspace(recipe: Recipe, device: str) -> None:
    """Raises InvalidInput where the environment has cuBLAS use workspaces that do not give the same bits each time."""
    given = os.environ.get(_VARIABLE, _SAME_BITS[0])
    if recipe.deterministic and device.startswith("cuda") and given not in _SAME_BITS:
        rule = f"needs {_VARIABLE}={_SAME_BITS[0]}, or none, in the environment, which has {given}"
        raise InvalidInput([Problem("recipe.deterministic", True, rule, False)])
