"""The recorder's public events, which observers receive while a program runs.

An observer is a subclass of `Observer` that overrides what it needs, given to ``Recorder(..., observers=[...])``. Calls
come on the thread that dispatches, one at a time, in the order in which things happen. An observer must not run
operations that are dispatched.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload

from trainledger.ledger.core.record import Event, Storage


class Observer:
    """Does nothing at each event; override what is needed."""

    def operation(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, event: Event | None
    ) -> None:
        """An operation has run; ``event`` is its record, None for a view, which does no work and moves no bytes."""

    def storage_born(self, storage: Storage) -> None:
        """Memory was allocated; the operation that made it follows."""

    def storage_freed(self, storage: Storage) -> None:
        """The last reference to memory is gone. Its bytes count as freed by the last operation that was recorded."""

    def module_entered(self, module: nn.Module, path: str) -> None:
        """A module's forward begins; ``path`` is its name below the root, or that of the module around it."""

    def module_left(self, module: nn.Module, output: Any) -> None:
        """A module's forward is over."""

    def backward_began(self, micro_batch: int) -> None:
        """A backward begins, the first with 1: what forward made and is still live is saved for it."""

    def scalar_read(self, tensor: Tensor, line: str) -> None:
        """A value went to the host (``item()``, a truth value), at a line of the user's code."""

    def collective(self, event: Event) -> None:
        """A rank has started a collective; its message, group and size are in ``event.facts``."""
