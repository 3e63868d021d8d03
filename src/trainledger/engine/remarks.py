"""Standard error is for remarks: where it cannot be written, work continues without them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TextIO, cast


class Unheard:
    """A text stream that leaves out what cannot be written: to a full disk, a closed pipe, a terminal that is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | ValueError | None = None  # the first refusal; ValueError is that of a closed stream

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        with suppress(ValueError):
            return self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, do: Any) -> None:
        try:
            do()
        except (OSError, ValueError) as refused:
            self.lost = self.lost or refused


def unheard(stream: TextIO) -> TextIO:
    """A stream that may fail without a word."""
    return cast(TextIO, Unheard(stream))
