"""Read a Chrome trace of torch.profiler (Kineto; CPU, CUDA, ROCm) as a `Recording`, event by event, however large.

Of the metadata only the devices, the ranks and what was recorded are taken: the rest holds environments and paths.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO, overload

from trainledger.observe.profiler.recording import (
    DEVICE_WORK,
    GIVEN_A_NUMBER,
    NONE,
    Message,
    Recorder,
    Recording,
    Shapes,
)
from trainledger.spec.durable import opened
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import MIB

EVENTS = "traceEvents"
_CHUNK = 4 * MIB
_OF_NUMBERS, _LONGEST_NUMBER = "0123456789+-.eE", 32
_decode = json.JSONDecoder().raw_decode


class BrokenOff(ValueError):  # noqa: N818 - not always an error
    """The text ends, or is not JSON any longer, before its last bracket; ``at`` characters were read."""

    def __init__(self, at: int) -> None:
        super().__init__(f"is not JSON any longer after {at:,} characters")
        self.at = at


# Kineto writes what it says of the whole trace (the devices, the ranks, what was recorded) before or after its events.
# One pass gives both, and a file that breaks off gives what it has, which a library of streaming parsers would not.
def entries(stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Every event as (`EVENTS`, event), every other entry at the top as (key, value), in the order of the file.

    A list without a frame is one of events. Raises `BrokenOff`.

    >>> import io
    >>> list(entries(io.StringIO('{"schemaVersion": 1, "traceEvents": [{"ph": "X"}, {}], "rank": 0}')))
    [('schemaVersion', 1), ('traceEvents', {'ph': 'X'}), ('traceEvents', {}), ('rank', 0)]
    """
    text = _Text(stream)
    if text.next_character() == "[":
        yield from ((EVENTS, event) for event in text.items())
        return
    text.take("{")
    while text.next_character() != "}":
        key = text.value()
        text.take(":")
        if key == EVENTS and text.next_character() == "[":
            yield from ((EVENTS, event) for event in text.items())
        else:
            yield str(key), text.value()
        text.skip_comma()


class _Text:
    """The part of a stream that is being read; what stands before ``_at`` is gone with the next chunk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text, self._at, self._before = "", 0, 0

    def next_character(self) -> str:
        """The next character that is no space, without taking it."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            self._more()

    def take(self, character: str) -> None:
        if self.next_character() != character:
            raise BrokenOff(self._before + self._at)
        self._at += 1

    def skip_comma(self) -> None:
        if self.next_character() == ",":
            self._at += 1

    def items(self) -> Iterator[Any]:
        """The values of a list."""
        self.take("[")
        while self.next_character() != "]":
            yield self.value()
            self.skip_comma()
        self._at += 1

    def value(self) -> Any:
        self.next_character()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError):
                self._more()
                continue
            if isinstance(value, int | float) and not self._text[end : end + _LONGEST_NUMBER].strip(_OF_NUMBERS):
                try:  # a number may go on in the next chunk
                    self._more()
                    continue
                except BrokenOff:
                    pass
            self._at = end
            return value

    def _more(self) -> None:
        chunk = self._stream.read(_CHUNK)
        if not chunk:
            raise BrokenOff(self._before + self._at)
        self._text = self._text[self._at :] + chunk
        self._before, self._at = self._before + self._at, 0


Advance = Callable[[int], None]

# Categories of Kineto's events.
_ON_HOST = {"cpu_op": "operators", "user_annotation": "annotations"}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ASKED_FOR = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops")
_FACTS = ("deviceProperties", "distributedInfo", *_ASKED_FOR)
_MEMORY, _MOST_DEVICES = "[memory]", 127
_LONGEST_US = 1e12  # eleven days: an event that is longer is a fault of the profiler


def read_profile(path: str | os.PathLike[str], advance: Advance = lambda nbytes: None) -> Recording:
    """The recording of one process; ``advance`` is told how many bytes of the file were read.

    A file that breaks off, as of a process that was killed while it wrote, gives what it has (``broken_off``). Raises
    `InvalidInput` where it cannot be read, is no Chrome trace, or has no event that begins and ends.
    """
    recorder, facts, broken_off, some = Recorder(), dict[str, Any](), False, False
    try:
        with opened(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            raw = _Stream(file.readinto, advance)
            raw = _Stream(partial(_unpacked, gzip.GzipFile(fileobj=raw))) if packed else raw
            text = io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="replace")
            for key, value in entries(text):
                if key == EVENTS:
                    some = True
                    _add(recorder, value)
                elif key in _FACTS:
                    facts[key] = value
    except BrokenOff as error:
        if not some:
            rule = "is no Chrome trace of torch.profiler (JSON with traceEvents, or packed by gzip)"
            raise _refused(path, rule) from error
        broken_off = True
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}") from None
    groups = {name: recorder.spans(name) for name in ("operators", "annotations", "launches", "work", "memory")}
    if not any(len(spans) for spans in groups.values()):
        raise _refused(path, "has no event with a beginning and an end")
    distributed = facts.get("distributedInfo")
    distributed = distributed if isinstance(distributed, Mapping) else {}
    devices = facts.get("deviceProperties")
    return Recording(
        names=tuple(recorder.names),
        arguments=tuple(recorder.arguments),
        **groups,
        devices=tuple(str(each["name"]) for each in _list(devices) if isinstance(each, Mapping) and "name" in each),
        rank=_whole(distributed.get("rank")),
        ranks=_whole(distributed.get("world_size")),
        recorded=frozenset(name for name in _ASKED_FOR if facts.get(name)),
        malformed=recorder.malformed,
        broken_off=broken_off,
    )


def _refused(path: str | os.PathLike[str], rule: str) -> InvalidInput:
    return InvalidInput([Problem("--trace", str(Path(path)), rule)])


class _Stream(io.RawIOBase):
    """What a function reads into buffers; ``advance`` is told how many bytes each time."""

    def __init__(self, read: Callable[[Any], int], advance: Advance = lambda nbytes: None) -> None:
        self._read, self._advance = read, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._read(buffer)
        self._advance(count)
        return count


def _unpacked(packed: gzip.GzipFile, buffer: Any) -> int:
    """Read what is packed, as far as it can be unpacked."""
    try:
        data = packed.read1(len(buffer))
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return 0
    buffer[: len(data)] = data
    return len(data)


def _add(recorder: Recorder, event: Any) -> None:
    """Keep an event that has a length, and those of the allocator; others are marks, arrows and names of threads."""
    if not isinstance(event, Mapping):
        return
    name, args = event.get("name"), event.get("args")
    args = args if isinstance(args, Mapping) else {}
    if name == _MEMORY:
        _add_memory(recorder, args, event.get("ts"))
    if name == _MEMORY or event.get("ph") != "X":
        return
    try:
        begin_us, length_us = float(event["ts"]), float(event.get("dur", 0.0))
    except (KeyError, TypeError, ValueError):
        begin_us = length_us = math.nan
    if not (math.isfinite(begin_us) and 0 <= length_us < _LONGEST_US) or not isinstance(name, str):
        recorder.malformed += 1
        return
    category, thread = event.get("cat"), _whole(event.get("tid"), NONE)
    operator = _whole(args.get("External id", args.get("external id")), NONE)
    facts: dict[str, Any] = {"operator": operator}
    if category in DEVICE_WORK or category in _LAUNCHES:
        facts["link"] = _whole(args.get("correlation"), NONE)
    if category in DEVICE_WORK:
        group, thread = "work", _whole(args.get("stream"), thread)
        facts |= {"more": _message(args), "kind": DEVICE_WORK[category]}
    elif category in _LAUNCHES:
        group = "launches"
    elif category in _ON_HOST:
        group, facts["more"] = _ON_HOST[category], _shapes(args)
        facts["kind"] = GIVEN_A_NUMBER if group == "operators" and _numbered(args) else 0
    else:
        return
    recorder.add(group, name, (begin_us, length_us), thread or 0, **facts)


def _add_memory(recorder: Recorder, args: Mapping[str, Any], when: Any) -> None:
    """Keep what the allocator of the host or of a device had handed out."""
    if not args or not isinstance(when, int | float) or not math.isfinite(when):
        return
    allocated, reserved = (_whole(args.get(f"Total {name}"), 0) for name in ("Allocated", "Reserved"))
    device = min(_whole(args.get("Device Id"), 0) + 1, _MOST_DEVICES) if args.get("Device Type") else 0
    recorder.add("memory", _MEMORY, (float(when), 0.0), link=allocated, operator=reserved, kind=device)


def _numbered(args: Mapping[str, Any]) -> bool:
    """Whether autograd gave an operator a sequence number of its own: a backward's has the thread of its forward."""
    return _whole(args.get("Sequence number"), NONE) >= 0 and not args.get("Fwd thread id")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _shapes(args: Mapping[str, Any]) -> Shapes | None:
    sizes = args.get("Input Dims")
    if not isinstance(sizes, list):
        return None
    tensors = (size if isinstance(size, list) and all(type(n) is int for n in size) else () for size in sizes)
    types, values = (tuple(map(str, _list(args.get(name)))) for name in ("Input type", "Concrete Inputs"))
    return Shapes(tuple(map(tuple, tensors)), types, values)


def _message(args: Mapping[str, Any]) -> Message | None:
    if "Collective name" not in args:
        return None
    elements_in, elements_out, ranks = (
        _whole(args.get(name), 0) for name in ("In msg nelems", "Out msg nelems", "Group size")
    )
    group = str(args.get("Process Group Ranks", ""))
    group = "" if "..." in group or group == "[]" else group  # of large groups Kineto lists only some ranks
    return Message(str(args["Collective name"]), elements_in, elements_out, str(args.get("dtype", "")), ranks, group)


@overload
def _whole(value: Any) -> int | None: ...
@overload
def _whole(value: Any, otherwise: int) -> int: ...
def _whole(value: Any, otherwise: int | None = None) -> int | None:
    """A whole number of 64 bits, as a number or a text has it."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return otherwise
    try:
        whole = int(value)
    except ValueError:
        return otherwise
    return whole if abs(whole) < 2**63 else otherwise
