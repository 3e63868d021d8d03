"""Seconds of entries whose sizes are arrays: kernels by the roofline, collectives by where their ranks stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.ledger.entry import Entry
from trainledger.predict.collective_time import Placement, collective_seconds, placement
from trainledger.predict.kernel_time import larger
from trainledger.predict.roofline import Roofline
from trainledger.spec.layout import Layout
from trainledger.spec.links import Fabric

BUFFERING = ("split_with_sizes_copy", "chunk_cat")


class Times:
    """What times a machine's operations; ``fabric`` joins its devices."""

    def __init__(self, roofline: Roofline, fabric: Fabric) -> None:
        self.roofline = roofline
        self.fabric = fabric

    def of(
        self, entries: Sequence[Entry], layout: Layout, depth: int, *, without: Sequence[str]
    ) -> tuple[Any, Any, Any, Any]:
        """Seconds of entries one after the other, ``depth`` loops around them taken once.

        Then those of a backward's products among them; beside them those of copies into and out of buffers that are
        gathered and reduced; and what the program needs to launch all of them.

        Collectives of the groups in ``without`` are left out. Rounds of a ring go beside the attention that they feed
        (`predict.rank_time`): what is longer counts.
        """
        total: Any = 0.0
        products: Any = 0.0
        copies: Any = 0.0
        launches: Any = 0.0
        rings: dict[str, tuple[Any, Any]] = {}  # by phase: seconds, and how many rounds
        attention: dict[str, Any] = {}
        for entry in entries:
            inner = _product(entry.loop[depth:])
            if entry.kind == "collective":
                if entry.group in without or entry.group == "pipeline":
                    continue
                place = placement(layout, entry.group, entry.ranks, self.fabric.devices_per_node)
                seconds = self.collective(entry.name, entry.payload, place) * inner
                if entry.overlap != "compute":
                    total = total + seconds
                elif entry.name == "send":
                    sent, rounds = rings.get(entry.phase, (0.0, 0))
                    rings[entry.phase] = (sent + seconds, larger(rounds, inner))
            elif entry.kind != "transfer":
                told, often = self.roofline.time(entry), inner / entry.times
                seconds = told.seconds * often
                launches = launches + told.launch_seconds * often
                if entry.name in BUFFERING:
                    copies = copies + seconds
                    continue
                total = total + seconds
                if entry.kind == "attention":
                    attention[entry.phase] = attention.get(entry.phase, 0.0) + seconds
                elif entry.kind == "matmul" and entry.phase == "backward":
                    products = products + seconds
        # Where attention is not run again, keys and values that are sent again go beside all of the backward.
        if "recompute" in rings and "recompute" not in attention:
            return total + larger(0.0, sum(sent for sent, _ in rings.values()) - total), products, copies, launches
        for phase, (sent, rounds) in rings.items():
            own = attention.get(phase, 0.0)
            total = total + larger(0.0, sent - own * rounds / (rounds + 1))
        return total, products, copies, launches

    def collective(self, name: str, nbytes: Any, place: Placement) -> Any:
        """Seconds of a collective; endless where its ranks are on several nodes and no network joins them."""
        if self.fabric.network is not None:
            return collective_seconds(name, nbytes, place, self.fabric)
        import numpy as np

        near = Placement(place.ranks, place.nodes * 0 + 1, place.in_node)
        seconds = collective_seconds(name, nbytes, near, self.fabric)
        return np.where(np.asarray(place.nodes) > 1, np.inf, seconds) if np.any(place.nodes > 1) else seconds


def _product(loops: Sequence[tuple[str, Any]]) -> Any:
    product: Any = 1
    for _, count in loops:
        product = product * count
    return product
