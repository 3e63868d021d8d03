"""Collectives on a tape, and the sizes that a rank has of what a group of ranks shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.frozen import frozen
from trainledger.ledger.core.arithmetic import several
from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int

COMMUNICATION = "communication"  # the category of what is sent, and of buffers for what arrives


@frozen
class Group:
    """The ranks that take part: the mesh axes they lie on, joined by ``x``, and how many they are."""

    axes: str
    ranks: Int


def collective(
    tape: Tape,
    name: str,
    group: Group,
    payload: Int,
    *,
    reads: Sequence[Array] = (),
    makes: Sequence[tuple[Int, str]] = (),
    changes: Sequence[Array] = (),
    overlap: str = "",
    category: str | None = None,
    **more: Any,
) -> list[Array]:
    """One collective of ``payload`` bytes (see `Entry`); a group of one rank sends nothing."""
    return tape.emit(
        name, "collective", reads=reads, makes=makes, changes=changes, category=category, overlap=overlap,
        payload=payload * several(group.ranks), group=group.axes, ranks=group.ranks,
        source=f"ledger.collectives.{name}", **more,
    )  # fmt: skip
