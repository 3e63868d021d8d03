"""The JSON of a Chrome trace, read from a stream event by event, however large the file is.

Kineto writes what it says of the whole trace (the devices, the ranks, what was recorded) before or after its events.
One pass gives both, and a file that breaks off gives what it has, which a library of streaming parsers would not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

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
