"""Objects that ranks send each other while a program is built, as pipeline stages tell the next one their shapes.

A rank that waits for an object stops; the program runs as the sender until it has sent it, and then the first rank
runs again from its beginning, with the object there. Programs must do the same each time they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainledger.trace.patches import replaced

EVERYONE = -1
Key = tuple[int, int, int]  # sender, receiver, the how-manieth between the two


class Awaited(BaseException):
    """A rank needs an object that has not been sent yet."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


class Sent(BaseException):
    """The object that somebody waits for is there."""


class Messages:
    """What ranks have sent each other so far."""

    def __init__(self) -> None:
        self._sent: dict[Key, Any] = {}

    @contextmanager
    def of(self, rank: int, until: Key | None = None) -> Iterator[None]:
        """Send and receive as this rank; `Sent` is raised when the object ``until`` is there."""
        counts: dict[tuple[int, int], int] = {}

        def number(sender: int, receiver: int) -> Key:
            counts[sender, receiver] = at = counts.get((sender, receiver), 0) + 1
            return sender, receiver, at

        def put(receiver: int, value: Any) -> None:
            key = number(rank, receiver)
            self._sent[key] = value
            if key == until:
                raise Sent

        def take(sender: int) -> Any:
            key = number(sender, rank)
            if key not in self._sent:
                raise Awaited(key)
            return self._sent[key]

        def peer(global_rank: int | None, group: Any, group_rank: int | None) -> int:
            if global_rank is not None:
                return global_rank
            assert group_rank is not None
            return dist.get_global_rank(group or dist.group.WORLD, group_rank)  # type: ignore[arg-type]

        def send(_: Any) -> Callable[..., None]:
            def sent(objects: Any, dst: Any = None, group: Any = None, device: Any = None, group_dst: Any = None,
                     use_batch: bool = False) -> None:  # fmt: skip
                put(peer(dst, group, group_dst), list(objects))

            return sent

        def receive(_: Any) -> Callable[..., int]:
            def received(objects: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None,
                         use_batch: bool = False) -> int:  # fmt: skip
                sender = peer(src, group, group_src)
                objects[:] = take(sender)
                return sender

            return received

        def broadcast(_: Any) -> Callable[..., None]:
            def told(objects: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None
                     ) -> None:  # fmt: skip
                sender = peer(src, group, group_src or 0)
                if sender == rank:
                    put(EVERYONE, list(objects))
                else:
                    key = number(sender, EVERYONE)
                    if key not in self._sent:
                        raise Awaited(key)
                    objects[:] = self._sent[key]

            return told

        def gather(_: Any) -> Callable[..., None]:
            def gathered(objects: Any, value: Any, group: Any = None) -> None:
                objects[:] = [value] * len(objects)  # every rank is taken to have the like

            return gathered

        names = (("send_object_list", send), ("recv_object_list", receive), ("broadcast_object_list", broadcast),
                 ("all_gather_object", gather))  # fmt: skip
        with ExitStack() as stack:
            for name, made in names:
                for owner in (dist, distributed_c10d):
                    stack.enter_context(replaced(owner, name, made, needed=False))
            yield
