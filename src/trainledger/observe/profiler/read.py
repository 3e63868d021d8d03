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
from pathlib import Path
from typing import Any, TextIO

from trainledger.observe.profiler.recording import (
    COPY,
    GIVEN_A_NUMBER,
    KERNEL,
    NONE,
    SET,
    Message,
    Recorder,
    Recording,
    Shapes,
)
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


def entries(stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Every event as (`EVENTS`, event), every other entry at the top as (key, value), in the order of the file.

    A list without a frame is one of events. Raises `BrokenOff`.

    >>> import io
    >>> list(entries(io.StringIO('{"schemaVersion": 1, "traceEvents": [{"ph": "X"}, {}], "rank": 0}')))
    [('schemaVersion', 1), ('traceEvents', {'ph': 'X'}), ('traceEvents', {}), ('rank', 0)]
    """
    text = _Text(stream)
    if text.next_character() == "[":
        yield from ((EVENTS, each) for each in _items(text))
        return
    text.take("{")
    while text.next_character() != "}":
        key = text.value()
        text.take(":")
        if key == EVENTS and text.next_character() == "[":
            yield from ((EVENTS, each) for each in _items(text))
        else:
            yield str(key), text.value()
        if text.next_character() == ",":
            text.take(",")


def _items(text: _Text) -> Iterator[Any]:
    text.take("[")
    while text.next_character() != "]":
        yield text.value()
        if text.next_character() == ",":
            text.take(",")
    text.take("]")


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

    def value(self) -> Any:
        self.next_character()
        while True:
            try:
                found, end = _decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError):
                self._more()
                continue
            if isinstance(found, int | float) and not self._text[end : end + _LONGEST_NUMBER].strip(_OF_NUMBERS):
                try:  # a number may go on in the next chunk
                    self._more()
                except BrokenOff:
                    self._at = end
                    return found
                continue
            self._at = end
            return found

    def _more(self) -> None:
        chunk = self._stream.read(_CHUNK)
        if not chunk:
            raise BrokenOff(self._before + self._at)
        self._text = self._text[self._at :] + chunk
        self._before, self._at = self._before + self._at, 0


Advance = Callable[[int], None]

_WORK = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": SET}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ASKED_FOR = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops")
_MEMORY, _MOST_DEVICES = "[memory]", 127
_LONGEST_US = 1e12  # eleven days: an event that is longer is a fault of the profiler


def read_profile(path: str | os.PathLike[str], advance: Advance = lambda nbytes: None) -> Recording:
    """The recording of one process; ``advance`` is told how many bytes of the file were read.

    A file that breaks off, as of a process that was killed while it wrote, gives what it has (``broken_off``). Raises
    `InvalidInput` where it cannot be read, is no Chrome trace, or has no event that begins and ends.
    """
    recorder, facts, broken_off, some = Recorder(), dict[str, Any](), False, False
    try:
        with open(path, "rb") as file:
            counted = _Counted(file, advance)
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            raw = _Unpacked(counted) if packed else counted
            text = io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="replace")
            try:
                for key, value in entries(text):
                    if key == EVENTS:
                        some = True
                        _add(recorder, value)
                    elif key in ("deviceProperties", "distributedInfo", *_ASKED_FOR):
                        facts[key] = value
            except BrokenOff as error:
                if not some:
                    rule = "is no Chrome trace of torch.profiler (JSON with traceEvents, or packed by gzip)"
                    raise _refused(path, rule) from error
                broken_off = True
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}") from None
    groups = {name: recorder.spans(name) for name in ("operators", "annotations", "launches", "work", "memory")}
    if not any(len(each) for each in groups.values()):
        raise _refused(path, "has no event with a beginning and an end")
    distributed = facts.get("distributedInfo")
    distributed = distributed if isinstance(distributed, Mapping) else {}
    return Recording(
        names=tuple(recorder.names), arguments=tuple(recorder.arguments), **groups,
        devices=_devices(facts.get("deviceProperties")), rank=_whole(distributed.get("rank")),
        ranks=_whole(distributed.get("world_size")),
        recorded=frozenset(each for each in _ASKED_FOR if facts.get(each)),
        malformed=recorder.malformed, broken_off=broken_off,
    )  # fmt: skip


def _refused(path: str | os.PathLike[str], rule: str) -> InvalidInput:
    return InvalidInput([Problem("--trace", str(Path(path)), rule)])


class _Counted(io.RawIOBase):
    """A file that tells how much of it was read."""

    def __init__(self, file: Any, advance: Advance) -> None:
        self._file, self._advance = file, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._file.readinto(buffer))
        self._advance(count)
        return count


class _Unpacked(io.RawIOBase):
    """What is packed in a file, as far as it can be unpacked."""

    def __init__(self, packed: Any) -> None:
        self._packed = gzip.GzipFile(fileobj=packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self._packed.read1(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return 0
        buffer[: len(found)] = found
        return len(found)


def _add(recorder: Recorder, event: Any) -> None:
    """Keep an event that has a length, and those of the allocator; others are marks, arrows and names of threads."""
    if isinstance(event, Mapping) and event.get("name") == _MEMORY:
        _add_memory(recorder, event)
        return
    if not isinstance(event, Mapping) or event.get("ph") != "X":
        return
    category, name, given = event.get("cat"), event.get("name"), event.get("args")
    args: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    try:
        begin_us, length_us = float(event["ts"]), float(event.get("dur", 0.0))
    except (KeyError, TypeError, ValueError):
        recorder.malformed += 1
        return
    if not (math.isfinite(begin_us) and 0 <= length_us < _LONGEST_US) or not isinstance(name, str):
        recorder.malformed += 1
        return
    operator = _whole(args.get("External id", args.get("external id")), NONE)
    link = _whole(args.get("correlation"), NONE)
    assert operator is not None
    assert link is not None
    if category in _WORK:
        lane = _whole(args.get("stream"), _whole(event.get("tid"), NONE))
        recorder.add(
            "work", name, begin_us, length_us, lane or 0, link=link, operator=operator, more=_message(args),
            kind=_WORK[category],
        )  # fmt: skip
        return
    thread = _whole(event.get("tid"), NONE) or 0
    if category in _LAUNCHES:
        recorder.add("launches", name, begin_us, length_us, thread, link=link, operator=operator)
    elif category == "cpu_op":
        recorder.add(
            "operators", name, begin_us, length_us, thread, operator=operator, more=_shapes(args),
            kind=GIVEN_A_NUMBER if _numbered(args) else 0,
        )  # fmt: skip
    elif category == "user_annotation":
        recorder.add("annotations", name, begin_us, length_us, thread, operator=operator, more=_shapes(args))


def _add_memory(recorder: Recorder, event: Mapping[str, Any]) -> None:
    """Keep what the allocator of the host or of a device had handed out."""
    args, when = event.get("args"), event.get("ts")
    if not isinstance(args, Mapping) or not isinstance(when, int | float) or not math.isfinite(when):
        return
    allocated, reserved = (_whole(args.get(f"Total {each}"), 0) or 0 for each in ("Allocated", "Reserved"))
    device = min((_whole(args.get("Device Id"), 0) or 0) + 1, _MOST_DEVICES) if args.get("Device Type") else 0
    recorder.add("memory", _MEMORY, float(when), 0.0, 0, link=allocated, operator=reserved, kind=device)


def _numbered(args: Mapping[str, Any]) -> bool:
    """Whether autograd gave an operator a sequence number of its own: a backward's has the thread of its forward."""
    number = _whole(args.get("Sequence number"))
    return number is not None and number >= 0 and not args.get("Fwd thread id")


def _shapes(args: Mapping[str, Any]) -> Shapes | None:
    sizes = args.get("Input Dims")
    if not isinstance(sizes, list):
        return None
    types, values = args.get("Input type", []), args.get("Concrete Inputs", [])
    return Shapes(
        tuple(tuple(each) if isinstance(each, list) and all(type(n) is int for n in each) else () for each in sizes),
        tuple(map(str, types)) if isinstance(types, list) else (),
        tuple(map(str, values)) if isinstance(values, list) else (),
    )


def _message(args: Mapping[str, Any]) -> Message | None:
    if "Collective name" not in args:
        return None
    numbers = [_whole(args.get(each), 0) or 0 for each in ("In msg nelems", "Out msg nelems", "Group size")]
    name, dtype = str(args["Collective name"]), str(args.get("dtype", ""))
    return Message(name, numbers[0], numbers[1], dtype, numbers[2], _group(args))


def _group(args: Mapping[str, Any]) -> str:
    """The ranks of a collective's group, as a profiler lists them; empty where it lists only some."""
    ranks = str(args.get("Process Group Ranks", ""))
    return "" if "..." in ranks or ranks == "[]" else ranks


def _devices(told: Any) -> tuple[str, ...]:
    if not isinstance(told, list):
        return ()
    return tuple(str(each["name"]) for each in told if isinstance(each, Mapping) and "name" in each)


def _whole(value: Any, otherwise: int | None = None) -> int | None:
    """A whole number of 64 bits, as a number or a text has it."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return otherwise
    try:
        found = int(value)
    except ValueError:
        return otherwise
    return found if abs(found) < 2**63 else otherwise
