"""When each piece of memory of a step is live, told anew for some of them."""

from __future__ import annotations

from trainledger.ledger.core.record import Event, Storage


class Lives:
    """When each piece of memory of a step is allocated and freed, by the index of the event."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._changed: dict[int, tuple[Storage, int | None, int | None]] = {}
        self.counted: set[int] = set()  # results of loops that are kept in the place of what goes into them
        self.died = {id(storage): at for at, event in enumerate(events) for storage, _ in event.freed}

    def change(self, storage: Storage, born: int, died: int) -> None:
        """A piece of memory is live from one event to another."""
        self._changed[id(storage)] = storage, born, died

    def ends(self, storage: Storage, died: int) -> bool:
        """Whether a piece of memory that was told anew dies with this event."""
        _, born, until = self._changed.get(id(storage), (storage, None, None))
        return born is not None and until == died

    def end_sooner(self, storage: Storage, died: int) -> bool:
        """Let a piece of memory that was told anew die before, if it lives by then."""
        _, born, _ = self._changed[id(storage)]
        if born is None or born > died:
            return False
        self._changed[id(storage)] = storage, born, died
        return True

    def end(self, storage: Storage, died: int) -> None:
        """A piece of memory is live until this event."""
        self._changed[id(storage)] = storage, None, died

    def remove(self, storage: Storage) -> None:
        """There never is such a piece of memory."""
        self._changed[id(storage)] = storage, -1, None

    def write(self) -> None:
        """Tell the events."""
        kept_birth = {key for key, (_, born, _) in self._changed.items() if born is None}
        for event in self._events:
            changed = self._changed
            event.allocated = [each for each in event.allocated if id(each) not in changed or id(each) in kept_birth]
            event.freed = [(each, copies) for each, copies in event.freed if id(each) not in changed]
        for storage, born, died in self._changed.values():
            if born is not None and born >= 0:
                self._events[born].allocated.append(storage)
            if died is not None:
                self._events[died].freed.append((storage, 1))
