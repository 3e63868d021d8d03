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
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.amp.autocast_mode
from torch import Tensor

from trainledger.spec.units import GIGA
from trainledger.trace.fakes.refused import Refused
from trainledger.trace.patches import Made, Patch, all_replaced, answering, around
from trainledger.trace.recorder.source_lines import TORCH

GPU_NBYTES = 80 * GIGA
CAPABILITY = (9, 0)
NAME = "a GPU that is not there"
_COMPILER = tuple(os.path.join(TORCH, each) + os.sep for each in ("_inductor", "_functorch", "_dynamo"))
_ABOUT = SimpleNamespace(
    name=NAME, total_memory=GPU_NBYTES, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132,
    is_integrated=0, is_multi_gpu_board=0, max_threads_per_multi_processor=2048, warp_size=32,
    regs_per_multiprocessor=65536, shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024, L2_cache_size=50 * 2**20, gcnArchName="", uuid="", pci_bus_id=0,
    pci_device_id=0, pci_domain_id=0, clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
)  # fmt: skip
# Of torch.cuda, by the answer.
_NOTHING = (
    "empty_cache init _lazy_init _lazy_call manual_seed manual_seed_all seed seed_all set_stream ipc_collect "
    "reset_max_memory_allocated reset_max_memory_cached reset_accumulated_memory_stats "
    "set_per_process_memory_fraction set_rng_state set_rng_state_all set_sync_debug_mode check_error"
)
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

    def __init__(
        self, n_devices: int = 1, index: int = 0, live: Callable[[], int] = lambda: 0,
        synchronized: Callable[[], None] = lambda: None, note: Callable[[str], object] = lambda sentence: None,
    ) -> None:  # fmt: skip
        self.n_devices, self.index = n_devices, index
        self.live, self.synchronized, self.note = live, synchronized, note
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
    patches: list[Patch] = [
        *((torch.cuda, name, made) for name, made in _of_cuda(gpu).items()),
        *((torch.cuda.memory, name, made) for name, made in _memory(gpu).items()),
        (torch.Tensor, "pin_memory", answering_itself),
        (torch.Tensor, "record_stream", answering(None)),
        (torch.cuda.nccl, "version", answering((2, 27, 3))),
        (torch.amp.autocast_mode.autocast, "__init__", _autocast_on_cpu),
        *((torch.cuda.nvtx, name, answering(None)) for name in _MARKS.split()),
        (subprocess.Popen, "__init__", around(_without_nvidia_smi)),
    ]
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None:
        patches.append((flex, "_validate_device", answering(None)))  # which refuses a backward on CPUs
    if hasattr(torch, "accelerator"):
        patches += [(torch.accelerator, name, made) for name, made in _of_any(gpu).items()]
    with all_replaced(*patches):
        yield


def answering_itself(_: Any) -> Callable[..., Tensor]:
    """A method that gives back its tensor: pinned memory is memory of the host like any other."""

    def itself(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self

    return itself


def _without_nvidia_smi(before: Callable[..., None], process: Any, args: Any, *more: Any, **options: Any) -> None:
    """What a program logs of its GPU is nothing where there is no ``nvidia-smi``; any other process is started."""
    words = args.split() if isinstance(args, str) else args if isinstance(args, (list, tuple)) else ()
    if words and words[0] == "nvidia-smi" and shutil.which("nvidia-smi") is None:
        args = "true" if isinstance(args, str) else ["true"]
    before(process, args, *more, **options)


def _truth(value: Any) -> Made:
    """The answer, and to torch's own compiler what torch answers."""

    def made(before: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(_COMPILER):
                return before(*args, **kwargs)
            return value() if callable(value) else value

        return answer

    return made


def _does(action: Callable[[], Any]) -> Made:
    return lambda _: lambda *args, **kwargs: action()


def _memory(gpu: Gpu) -> dict[str, Made]:
    return {
        "memory_allocated": _does(gpu.now), "max_memory_allocated": _does(gpu.most), "memory_reserved": _does(gpu.now),
        "max_memory_reserved": _does(gpu.most), "memory_cached": _does(gpu.now), "max_memory_cached": _does(gpu.most),
        "reset_peak_memory_stats": _does(gpu.reset), "memory_stats": _does(gpu.stats),
        "mem_get_info": _does(lambda: (GPU_NBYTES - gpu.now(), GPU_NBYTES)), "memory_summary": answering(""),
        "memory_snapshot": answering([]), "_record_memory_history": answering(None),
        "_dump_snapshot": answering(None),
    }  # fmt: skip


def _of_cuda(gpu: Gpu) -> dict[str, Made]:
    context, nothing = answering(nullcontext()), answering(None)
    state = _does(lambda: torch.empty(16, dtype=torch.uint8, device="cpu"))
    return {
        **dict.fromkeys(_NOTHING.split(), nothing),
        **_memory(gpu),
        "is_available": _truth(True), "is_initialized": _truth(True), "device_count": _truth(lambda: gpu.n_devices),
        "current_device": _does(lambda: gpu.index), "set_device": lambda _: gpu.set_device,
        "get_device_name": answering(NAME), "get_device_properties": answering(_ABOUT),
        "get_device_capability": answering(CAPABILITY), "is_bf16_supported": answering(True),
        "get_arch_list": answering(["sm_90"]), "can_device_access_peer": answering(True),
        "utilization": answering(0), "temperature": answering(0), "power_draw": answering(0),
        "synchronize": _does(gpu.synchronized), "is_current_stream_capturing": answering(False),
        "get_rng_state": state, "initial_seed": answering(0), "get_rng_state_all": _does(list),
        "Event": lambda _: _Event, "Stream": lambda _: _Stream, "ExternalStream": lambda _: _Stream,
        "current_stream": _does(_Stream), "default_stream": _does(_Stream), "stream": context, "device": context,
        "device_of": context, "CUDAGraph": lambda _: _Graph, "graph": lambda _: gpu.capture,
        "graph_pool_handle": answering((0, 0)), "make_graphed_callables": lambda _: gpu.graphed,
    }  # fmt: skip


def _of_any(gpu: Gpu) -> dict[str, Made]:
    nothing = answering(None)
    return {
        **{name: made for name, made in _memory(gpu).items() if hasattr(torch.accelerator, name)},
        "is_available": _truth(True), "device_count": _truth(lambda: gpu.n_devices),
        "current_accelerator": _truth(torch.device("cuda")),
        "get_memory_info": _does(lambda: (GPU_NBYTES - gpu.now(), GPU_NBYTES)),
        "synchronize": _does(gpu.synchronized), "current_device_index": _does(lambda: gpu.index),
        "current_device_idx": _does(lambda: gpu.index), "set_device_index": lambda _: gpu.set_device,
        "set_device_idx": lambda _: gpu.set_device, "current_stream": _does(_Stream), "set_stream": nothing,
        "empty_cache": nothing, "device_index": answering(nullcontext()),
    }  # fmt: skip


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """``torch.autocast("cuda")`` is the CPU's, in the format that the GPU's has where none is given."""

    @wraps(init)  # a compiler that meets autocast asks for the names of its arguments
    def initialized(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return initialized
