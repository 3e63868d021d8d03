"""Collectives on a tape, and the sizes that a rank has of what a group of ranks shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.frozen import frozen
from trainledger.ledger.core.array import Array
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


def several(ranks: Int) -> Int:
    """1 where a group has more than one rank, else 0; a symbol stands for more than one.

    >>> several(1), several(8)
    (0, 1)
    """
    if isinstance(ranks, int):
        return int(ranks > 1)
    return (ranks > 1) * 1 if hasattr(ranks, "shape") else 1


def share(whole: Int, ranks: Int) -> Int:
    """The largest part of something split over ranks in whole pieces: FSDP2's chunk of dim 0, or a padded flat part.

    >>> share(10, 4)
    3
    """
    return -(-whole // ranks)
