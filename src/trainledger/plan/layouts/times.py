"""Seconds of entries whose sizes are arrays: kernels by the roofline, collectives by where their ranks stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainledger.ledger.entry import Entry
from trainledger.predict.collective import Placement, collective_seconds, placement
from trainledger.predict.kernel import larger
from trainledger.predict.overlap import matmuls_overlapping_sum, overlaps_input_gradient_sums
from trainledger.predict.roofline import Roofline
from trainledger.spec.layout import Layout
from trainledger.spec.links import Fabric
from trainledger.spec.model import ModelSpec

BUFFERING = ("split_with_sizes_copy", "chunk_cat")


class Times:
    """What times a machine's operations; ``fabric`` joins its devices. Equal operations are timed once (`forget`).

    ``spec`` is the model, whose router says to how many nodes tokens go.
    """

    def __init__(self, roofline: Roofline, fabric: Fabric, spec: ModelSpec) -> None:
        self.roofline = roofline
        self.fabric = fabric
        self.spec = spec
        self._known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def forget(self) -> None:
        """Let go of what is known: with other sizes there are other operations."""
        self._known.clear()

    def kernel(self, entry: Entry) -> tuple[Any, Any]:
        """Seconds of one run of an operation on a device, and of launching it."""
        sizes = (entry.flops, entry.read, entry.written, *entry.shape, *entry.fused)
        key = (entry.name, entry.kind, entry.dtype, len(entry.fused), *map(_content, sizes))
        if key not in self._known:
            told = self.roofline.time(replace(entry, loop=()))
            self._known[key] = told.seconds, told.launch_seconds
        return self._known[key]

    def message(self, entry: Entry, layout: Layout) -> Any:
        """Seconds of one collective of a layout."""
        key = (entry.name, entry.group, _content(entry.payload), _content(entry.ranks))
        if key not in self._known:
            place = placement(layout, entry.group, entry.ranks, self.fabric.devices_per_node, self.spec)
            self._known[key] = self.collective(entry.name, entry.payload, place), 0.0
        return self._known[key][0]

    def of(
        self, entries: Sequence[Entry], layout: Layout, depth: int, *, without: Sequence[str]
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Seconds of entries one after the other, ``depth`` loops around them taken once.

        Then those of a backward's products among them; beside them those of copies into and out of buffers that are
        gathered and reduced; what the program needs to launch all others; and of the first those in which tokens go
        to experts and back.

        Collectives of the groups in ``without`` are left out. Of sums that go beside products (`predict.overlap`) what
        is longer than those counts. Rounds of a ring go beside the attention that they feed
        (`predict.streams`): what is longer counts.
        """
        total: Any = 0.0
        products: Any = 0.0
        copies: Any = 0.0
        launches: Any = 0.0
        sends: Any = 0.0
        rings: dict[str, tuple[Any, Any]] = {}  # by phase: seconds, and how many rounds
        attention: dict[str, Any] = {}
        hides = overlaps_input_gradient_sums(layout)
        for at, entry in enumerate(entries):
            inner = _product(entry.loop[depth:])
            if entry.kind == "collective":
                if entry.group in without or entry.group == "pipeline":
                    continue
                seconds = self.message(entry, layout) * inner
                beside = matmuls_overlapping_sum(entries, at) if hides else []
                if beside:
                    hidden = sum(self.kernel(entries[index])[0] for index in beside) / 2
                    seconds = larger(0.0, seconds - hidden * inner)
                if entry.overlap != "compute":
                    total = total + seconds
                    sends = sends + seconds if entry.group == "expert" else sends
                elif entry.name == "send":
                    sent, rounds = rings.get(entry.phase, (0.0, 0))
                    rings[entry.phase] = (sent + seconds, larger(rounds, inner))
            elif entry.kind != "transfer":
                once, launch = self.kernel(entry)
                seconds = once * inner
                if entry.name in BUFFERING:
                    copies = copies + seconds
                    continue
                launches = launches + launch * inner
                total = total + seconds
                if entry.kind == "attention":
                    attention[entry.phase] = attention.get(entry.phase, 0.0) + seconds
                elif entry.kind == "matmul" and entry.phase == "backward":
                    products = products + seconds
        # Where attention is not run again, keys and values that are sent again go beside all of the backward.
        if "recompute" in rings and "recompute" not in attention:
            total = total + larger(0.0, sum(sent for sent, _ in rings.values()) - total)
            return total, products, copies, launches, sends
        for phase, (sent, rounds) in rings.items():
            own = attention.get(phase, 0.0)
            total = total + larger(0.0, sent - own * rounds / (rounds + 1))
        return total, products, copies, launches, sends

    def collective(self, name: str, nbytes: Any, place: Placement) -> Any:
        """Seconds of a collective; endless where its ranks are on several nodes and no network joins them."""
        if self.fabric.network is not None:
            return collective_seconds(name, nbytes, place, self.fabric)
        import numpy as np

        near = Placement(place.ranks, place.nodes * 0 + 1, place.in_node)
        seconds = collective_seconds(name, nbytes, near, self.fabric)
        return np.where(np.asarray(place.nodes) > 1, np.inf, seconds) if np.any(place.nodes > 1) else seconds


def _content(size: Any) -> Any:
    """What makes sizes equal: those of arrays are all of their elements."""
    return size.tobytes() if hasattr(size, "tobytes") else size


def _product(loops: Sequence[tuple[str, Any]]) -> Any:
    product: Any = 1
    for _, count in loops:
        product = product * count
    return product
