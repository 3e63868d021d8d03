"""A GPU that is not there: what programs ask of ``torch.cuda`` and ``torch.accelerator``, answered as by one of 80 GB.

Only questions are answered here. Where tensors lie is decided by who uses this: the annotator lets them pass for the
GPU's, a rank's program has them on the CPU. Torch's own compiler is told the truth, as it would write code for the GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.amp.autocast_mode

from trainledger.spec.units import GIGA
from trainledger.trace.patches import Made, Patch, all_replaced, answering, around
from trainledger.trace.recorder.source_lines import TORCH, Refused

GPU_NBYTES = 80 * GIGA
CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3 (not there)"  # scripts look up peaks by the name
_COMPILER = tuple(os.path.join(TORCH, part) + os.sep for part in ("_inductor", "_functorch", "_dynamo"))
# An H100 SXM's, as torch.cuda.get_device_properties names them.
_COUNTS = """
    multi_processor_count 132 is_integrated 0 is_multi_gpu_board 0 max_threads_per_multi_processor 2048 warp_size 32
    regs_per_multiprocessor 65536 shared_memory_per_block 49152 shared_memory_per_block_optin 232448
    shared_memory_per_multiprocessor 233472 L2_cache_size 52428800 pci_bus_id 0 pci_device_id 0 pci_domain_id 0
    clock_rate 1980000 memory_clock_rate 2619000 memory_bus_width 5120
"""
_WORDS = _COUNTS.split()
_ABOUT = SimpleNamespace(
    **dict(zip(_WORDS[::2], map(int, _WORDS[1::2]), strict=True)),
    name=NAME,
    total_memory=GPU_NBYTES,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    gcnArchName="",
    uuid="",
)
# Names of torch.cuda, torch.cuda.memory and torch.accelerator that do nothing here.
_NOTHING = """
    empty_cache init _lazy_init _lazy_call manual_seed manual_seed_all seed seed_all set_stream ipc_collect
    reset_max_memory_allocated reset_max_memory_cached reset_accumulated_memory_stats
    set_per_process_memory_fraction set_rng_state set_rng_state_all set_sync_debug_mode check_error
    _record_memory_history _dump_snapshot
"""
_CONTEXTS = "stream device device_of device_index"
_MARKS = "range_push range_pop mark range_start range_end"  # for NVIDIA's tools


class _Event:
    """A GPU's event: nothing runs there, so that nothing has taken time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def is_capturing(self) -> bool:
        return False


class _Stream(_Event):
    """A GPU's stream, which is also a context in which it is the current one."""

    device = torch.device("cuda", 0)
    device_index = stream_id = cuda_stream = priority = 0

    wait_stream = wait_event = _Event.record

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Graph:
    """A CUDA graph. What it captures runs as it is captured, which its first replay stands for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._replays = 0

    def replay(self) -> None:
        self._replays += 1
        if self._replays > 1:
            raise Refused(
                "a CUDA graph is replayed, of which no operation is seen; turn CUDA graphs off, or end it before the "
                "second replay"
            )

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self._replays = 0

    def capture_end(self) -> None:
        pass

    reset = register_generator_state = enable_debug_mode = debug_dump = instantiate = _Event.record

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class Gpu:
    """What a program hears of the GPUs of its machine: how many there are, which is its own, how much is in use.

    ``live`` gives the bytes that are in use now; ``synchronized`` hears that the program waits for the device, ``note``
    a sentence about what is not followed.
    """

    def __init__(self, n_devices: int = 1, index: int = 0, live: Callable[[], int] = lambda: 0) -> None:
        self.n_devices, self.index, self.live = n_devices, index, live
        self.synchronized: Callable[[], None] = lambda: None
        self.note: Callable[[str], object] = lambda sentence: None
        self.most_nbytes = 0

    def now(self) -> int:
        """Bytes in use."""
        nbytes = self.live()
        self.most_nbytes = max(self.most_nbytes, nbytes)
        return nbytes

    def most(self) -> int:
        """The most bytes that were in use, as far as they were looked at."""
        self.now()
        return self.most_nbytes

    def reset(self) -> None:
        """Begin to look for the most anew."""
        self.most_nbytes = 0
        self.now()

    def stats(self) -> dict[str, int]:
        """What the caching allocator counts; 0 for what it would count of itself."""
        found: dict[str, int] = defaultdict(int)
        for each in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
            found[f"{each}.all.current"] = self.now()
            found[f"{each}.all.peak"] = self.most()
        for each in ("num_alloc_retries", "num_ooms"):
            found[each] = 0
        return found

    @contextmanager
    def capture(self, graph: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
        """``torch.cuda.graph``."""
        self.note("a CUDA graph is accounted for as what it captures; the memory that its pool keeps is left out")
        graph.capture_begin()
        yield

    def graphed(self, callables: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.cuda.make_graphed_callables``."""
        self.note("graphed callables run as they are; the memory that the pool of a CUDA graph keeps is left out")
        return callables

    def set_device(self, device: Any) -> None:
        """The program chooses one of them."""
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            self.index = index


@contextmanager
def gpu_answers(gpu: Gpu) -> Iterator[None]:
    """Inside, a program that asks for a GPU has one, and its number formats and memory are answered."""
    owners = (torch.cuda, torch.cuda.memory, torch.accelerator)
    patches: list[Patch] = [
        *((owner, name, made) for owner in owners for name, made in _answers(gpu).items()),
        (torch.Tensor, "pin_memory", lambda _: lambda tensor, *args, **kwargs: tensor),  # the host's like any other
        (torch.Tensor, "record_stream", answering(None)),
        (torch.cuda.nccl, "version", answering((2, 27, 3))),
        (torch.amp.autocast_mode.autocast, "__init__", _autocast_on_cpu),
        *((torch.cuda.nvtx, name, answering(None)) for name in _MARKS.split()),
        (subprocess.Popen, "__init__", around(_without_nvidia_smi)),
    ]
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None:
        # Which refuses a backward on CPUs
        patches.append((flex, "_validate_device", answering(None)))
    with all_replaced(*patches):
        yield


def _answers(gpu: Gpu) -> dict[str, Made]:
    """By name; what an owner lacks of them is left out."""
    truths: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": lambda: gpu.n_devices,
        "current_accelerator": torch.device("cuda"),
    }
    values: dict[str, Any] = {
        **dict.fromkeys(_NOTHING.split()),
        **dict.fromkeys(_CONTEXTS.split(), nullcontext()),
        **dict.fromkeys(("utilization", "temperature", "power_draw", "initial_seed"), 0),
        "get_device_name": NAME,
        "get_device_properties": _ABOUT,
        "get_device_capability": CAPABILITY,
        "is_bf16_supported": True,
        "can_device_access_peer": True,
        "is_current_stream_capturing": False,
        "get_arch_list": ["sm_90"],
        "memory_summary": "",
        "memory_snapshot": [],
        "graph_pool_handle": (0, 0),
    }
    called: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), gpu.now),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), gpu.most),
        **dict.fromkeys(("mem_get_info", "get_memory_info"), lambda: (GPU_NBYTES - gpu.now(), GPU_NBYTES)),
        "reset_peak_memory_stats": gpu.reset,
        "memory_stats": gpu.stats,
        "get_rng_state_all": list,
        **dict.fromkeys(("current_stream", "default_stream"), _Stream),
        **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), lambda: gpu.index),
        "get_rng_state": lambda: torch.empty(16, dtype=torch.uint8, device="cpu"),
        "synchronize": lambda: gpu.synchronized(),
    }
    instead: dict[str, Any] = {
        **dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), gpu.set_device),
        "Event": _Event,
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "CUDAGraph": _Graph,
        "graph": gpu.capture,
        "make_graphed_callables": gpu.graphed,
    }
    return {
        **{name: _truth(value) for name, value in truths.items()},
        **{name: answering(value) for name, value in values.items()},
        **{name: _does(call) for name, call in called.items()},
        **{name: partial(_first, meanwhile) for name, meanwhile in instead.items()},
    }


def _without_nvidia_smi(before: Callable[..., None], process: Any, args: Any, *more: Any, **options: Any) -> None:
    # What a program logs of its GPU is nothing where there is no ``nvidia-smi``; any other process is started.
    words = args.split() if isinstance(args, str) else args if isinstance(args, (list, tuple)) else ()
    if words and words[0] == "nvidia-smi" and shutil.which("nvidia-smi") is None:
        args = "true" if isinstance(args, str) else ["true"]
    before(process, args, *more, **options)


def _truth(value: Any) -> Made:
    # Torch's own compiler is told the truth, as it would write code for a GPU.

    def made(before: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(_COMPILER):
                return before(*args, **kwargs)
            return value() if callable(value) else value

        return answer

    return made


def _does(call: Callable[[], Any]) -> Made:
    return lambda _: lambda *args, **kwargs: call()


def _first(meanwhile: Any, before: Any) -> Any:
    return meanwhile


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """``torch.autocast("cuda")`` is the CPU's, in the format that the GPU's has where none is given."""

    # A compiler that meets autocast asks for the names of its arguments
    @wraps(init)
    def initialized(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return initialized
