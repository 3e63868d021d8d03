from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from trainledger.engine.train.device import find_device
from trainledger.spec.problem import InvalidInput

# A block of 64 MiB is taken and given back sixteen times; by default each is mapped afresh and faults on every page.
FAULTS = """
import ctypes, resource, sys
from trainledger.engine.train.device import keep_freed_memory
if "keep" in sys.argv: print(keep_freed_memory(), file=sys.stderr)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(16):
    block = libc.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return int(done.stdout), done.stderr.strip()


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or "glibc" not in " ".join(platform.libc_ver()), reason="glibc's allocator"
)
def test_kept_memory_is_faulted_in_once() -> None:
    afresh, _ = faults()
    kept, said = faults("keep")
    assert said == "True"
    assert kept * 4 < afresh
    assert faults("keep", MALLOC_ARENA_MAX_="2")[1] == "False", "a person's own settings stay"


def test_auto_finds_a_device_and_the_named_one_is_taken() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type in ("cpu", "cuda", "mps")


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(InvalidInput, match=r"cluster.backend = 'mps'"):
        find_device("mps")


# In a process of its own: one that has run an engine keeps freed memory, and would take the block from there.
GROWTH = """
import torch
from trainledger.engine.train.device import memory_in_use
before = memory_in_use(torch.device("cpu"))
held = torch.ones(2**24)  # 64 MiB
print(-1 if before is None else (memory_in_use(torch.device("cpu")) - before) / held.nbytes)
"""


def test_memory_of_the_process_grows_with_what_it_holds() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    growth = float(done.stdout)
    if growth < 0:
        pytest.skip("this system does not say")
    assert 0.9 < growth < 1.5
