"""A snapshot of CUDA's caching allocator (`torch.cuda.memory._dump_snapshot`): its peak, what for and by which lines.

The file is a pickle. It is read by a reader that builds tables, lists, texts and numbers, and refuses everything else,
so that no code of the file runs.
"""

from __future__ import annotations

import gzip
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from trainledger.observe.profiler.step_work import summed
from trainledger.report.document import Answer
from trainledger.spec.durable import opened
from trainledger.spec.problem import InvalidInput, Problem

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS = "parameters", "gradients", "optimizer state", "activations"
LOSS, BACKWARD, BATCH, OTHER = "logits and loss", "backward", "batch", "other"

_OF_OPTIMIZERS = re.compile(r"/torch/optim/|/(apex|bitsandbytes|torchao|deepspeed)/.*(optim|adam)")
_STATES = ("_init_group", "init_state", "_init_state")
_OF_LOSSES = re.compile(r"cross_entropy|nll_loss|log_softmax|_loss$|loss_fn|^loss$", re.IGNORECASE)
_OF_MODULES = re.compile(r"/torch/nn/modules/")
_MADE = ("__init__", "reset_parameters", "_apply", "to_empty", "_initialize_affine_weight")
_RUN = ("forward", "_call_impl", "_wrapped_call_impl")
_OF_DATA = re.compile(r"pin_memory|/utils/data/|send_to_device|_prepare_input", re.IGNORECASE)
_SITES = re.compile(r"/(site|dist)-packages/(?!transformers/)|/lib/python3|^<|^\?\?")


class Origin(NamedTuple):
    """A category of memory, and the line of the program that asked for it, "" where none is known."""

    category: str
    line: str


def origin_of(frames: Sequence[Mapping[str, Any]]) -> Origin:
    """The category of memory that was allocated under these frames, the innermost first.

    Autograd's own threads have no frames of Python: memory without any is what backward made.
    """
    if not frames:
        return Origin(BACKWARD, "")
    files = [str(frame.get("filename", "")) for frame in frames]
    names = [str(frame.get("name", "")) for frame in frames]
    return Origin(_category(files, names), _line(frames, files))


def _category(files: Sequence[str], names: Sequence[str]) -> str:
    for file, name in zip(files, names, strict=True):
        if _OF_OPTIMIZERS.search(file):
            return STATE if name in _STATES or any(each in _STATES for each in names) else OTHER
        if _OF_LOSSES.search(name):
            return LOSS
        if name in _RUN:
            return ACTIVATIONS
        if name in _MADE and (_OF_MODULES.search(file) or any(map(_OF_MODULES.search, files))):
            return PARAMETERS
        if name in ("backward", "_engine_run_backward"):
            return BACKWARD
        if _OF_DATA.search(file) or _OF_DATA.search(name):
            return BATCH
    return OTHER


def _line(frames: Sequence[Mapping[str, Any]], files: Sequence[str]) -> str:
    """The innermost line that is no library's, as the last two parts of its path and its number."""
    for frame, file in zip(frames, files, strict=True):
        if not _SITES.search(file):
            return f"{'/'.join(file.split('/')[-2:])}:{frame.get('line', 0)}"
    return ""


BEFORE = "before the recording"
_UPDATE = "Optimizer.step"
# Of the allocator's events: what they change of the bytes allocated, and of those reserved.
_CHANGE = {"alloc": 1, "free_completed": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Site:
    """What one line of the program had allocated at the peak."""

    category: str
    line: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class AllocatorPeak(Answer, report="pages.allocator"):
    """The moment of a snapshot at which most was allocated, in bytes that were asked for.

    ``at`` is the number of the event, ``during`` the innermost annotation around it (such as an optimizer's step).
    ``reserved_nbytes`` is what the allocator had of the device at that moment, ``most_reserved_nbytes`` at most.
    """

    path: str
    device: int
    events: int
    at: int
    during: str
    nbytes: int
    by_category: Mapping[str, int]
    sites: tuple[Site, ...]
    reserved_nbytes: int
    most_reserved_nbytes: int
    end_nbytes: int
    doubts: tuple[str, ...] = field(default=())


def allocator_peak(path: str | os.PathLike[str]) -> AllocatorPeak:
    """The peak that a snapshot shows; of several devices that of the one with the most events.

    Raises `InvalidInput` where the file cannot be read, holds more than plain data, or is no snapshot.
    """
    found = _plain(path)
    traces = found.get("device_traces") if isinstance(found, dict) else None
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise _refused(path, "is no snapshot of CUDA's allocator (it has no device_traces)")
    device = max(range(len(traces)), key=lambda number: len(traces[number]), default=0)
    events = traces[device] if traces else []
    if not events:
        rule = "has no events: record them with torch.cuda.memory._record_memory_history() before the program"
        raise _refused(path, rule)
    try:
        return _peak(Path(path).name, device, events, found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _refused(path, f"is damaged: {type(error).__name__} {error}") from None


class _Plain(pickle.Unpickler):
    """Builds plain data only: a pickle that names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def _plain(path: str | os.PathLike[str]) -> Any:
    try:
        with opened(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.open(file) if packed else nullcontext(file) as data:
                return _Plain(data).load()
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}") from None
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError,
            UnicodeDecodeError, MemoryError, OverflowError) as error:  # fmt: skip
        raise _refused(path, f"is no pickle of plain data: {error}") from None


def _refused(path: str | os.PathLike[str], rule: str) -> InvalidInput:
    return InvalidInput([Problem("--memory", os.fspath(path), rule)])


def _peak(name: str, device: int, events: Sequence[Event], found: Mapping[str, Any]) -> AllocatorPeak:
    segments = [segment for segment in found.get("segments", ()) if segment.get("device", 0) == device]
    blocks = [block for segment in segments for block in segment["blocks"] if str(block["state"]).startswith("active")]
    annotations = found.get("external_annotations") or ()
    gradients = _gradients(events, annotations)
    end_nbytes = sum(int(block["requested_size"]) for block in blocks)
    changes = [_CHANGE.get(event["action"], 0) * int(event["size"]) for event in events]
    # What is there at the end, less what events account for, was allocated before the first event.
    allocated = [*accumulate(changes, initial=max(0, end_nbytes - sum(changes)))]
    nbytes = max(allocated)
    at = max(allocated.index(nbytes) - 1, 0)
    live, unknown = _live(events[: at + 1])
    sites = summed((_origin(events[number], number in gradients), (1, events[number]["size"])) for number in live)
    by_category = summed((category, runs) for (category, _), runs in sites.items())
    of_before = nbytes - sum(size for _, size in by_category.values())
    sizes = {category: size for category, (_, size) in by_category.items()} | ({BEFORE: of_before} if of_before else {})
    grown = [_RESERVED.get(event["action"], 0) * event["size"] for event in events]
    reserved = [*accumulate(grown, initial=sum(int(segment["total_size"]) for segment in segments) - sum(grown))]
    return AllocatorPeak(
        path=name,
        device=device,
        events=len(events),
        at=at,
        during=_during(annotations, events[at]),
        nbytes=nbytes,
        by_category=dict(sorted(sizes.items(), key=lambda size: -size[1])),
        sites=tuple(Site(*of, *runs) for of, runs in sorted(sites.items(), key=lambda site: -site[1][1])),
        reserved_nbytes=reserved[at + 1],
        most_reserved_nbytes=max(reserved),
        end_nbytes=end_nbytes,
        doubts=tuple(_doubts(events, unknown, of_before, nbytes)),
    )


def _origin(event: Event, is_gradient: bool) -> Origin:
    origin = origin_of(event.get("frames") or ())
    return Origin(GRADIENTS, origin.line) if is_gradient and origin.category == BACKWARD else origin


def _live(events: Sequence[Event]) -> tuple[list[int], int]:
    """The allocations that are there after these events, by number, and how many frees had none before them."""
    live: dict[int, int] = {}
    unknown = 0
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = number
        elif event["action"] == "free_completed":
            unknown += live.pop(event["addr"], None) is None
    return list(live.values()), unknown


def _gradients(events: Sequence[Event], annotations: Sequence[Event]) -> set[int]:
    """Numbers of the allocations that autograd made and that an update finds still there."""
    updates = (note for note in annotations if note["stage"] == "START" and str(note["name"]).startswith(_UPDATE))
    waiting = sorted(note["time_us"] for note in updates)
    gradients: set[int] = set()
    live: dict[int, int] = {}
    for number, event in enumerate(events):
        while waiting and event["time_us"] >= waiting[0]:
            waiting.pop(0)
            gradients |= {each for each in live.values() if not events[each].get("frames")}
        if event["action"] == "alloc":
            live[event["addr"]] = number
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    return gradients


def _during(annotations: Sequence[Event], event: Event) -> str:
    """The innermost annotation around an event; empty where there is none."""
    inside = [""]
    for note in annotations:
        if note["time_us"] > event["time_us"]:
            break
        if note["stage"] == "START":
            inside.append(str(note["name"]))
        elif inside[-1] == note["name"] and len(inside) > 1:
            inside.pop()
    return inside[-1]


def _doubts(events: Sequence[Mapping[str, Any]], unknown: int, before: int, most: int) -> Iterator[str]:
    if not any(event.get("frames") for event in events):
        yield "No stacks were recorded, so nothing says what memory is for: record with stacks='python' or 'all'."
    if unknown:
        yield (
            f"{unknown:,} frees are of memory that was allocated before the recording began, or whose allocation the "
            "ring of events no longer has (max_entries): of such memory only the bytes are known."
        )
    elif before > most / 10:
        yield "Much of the memory was allocated before the recording began: nothing says what it is for."
