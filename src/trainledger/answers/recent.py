"""A cache of slow answers: a given number of the newest ones."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Values by key: those of the ``most`` keys that were asked for last. Threads may share it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: dict[Key, Value] = {}  # the last requested is last
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """The value of a key, None where it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values[key] = self._values.pop(key)
            return self._values[key]

    def keep(self, key: Key, value: Value) -> None:
        """Keep a value, and forget the ones that were asked for longest ago beyond the most."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            while len(self._values) > self.most:
                del self._values[next(iter(self._values))]
