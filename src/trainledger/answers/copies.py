"""How long a copy from a host to its accelerator takes, by copies that were measured."""

from __future__ import annotations

from typing import Any

from trainledger import catalog
from trainledger.catalog.host_copies import host_copies, measured
from trainledger.report.document import Table
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import format_nbytes, format_seconds, parse_nbytes

EVIDENCE = "h200"  # whose copies stand for those of others


@frozen(kw_only=True)
class CopySeconds:
    """One copy to a device: its time at ``bytes_per_second``, and where that rate comes from.

    ``basis`` is ``measured`` on the device itself, else ``assumed`` from another. What a small copy waits for besides
    its bytes is not in it.
    """

    nbytes: int
    device: str
    pinned: bool
    seconds: float
    bytes_per_second: float
    basis: str
    source: str

    def __repr__(self) -> str:
        size, rate = format_nbytes(self.nbytes), format_nbytes(self.bytes_per_second)
        memory = "pinned" if self.pinned else "pageable"
        took = f"{format_seconds(self.seconds)} at {rate}/s"
        return f"{size} to {self.device}, {memory}: {took} ({self.basis}: {self.source})"


def copy_seconds(nbytes: int | str, device: Device | str, *, pinned: bool = True) -> CopySeconds:
    """How long a copy of so many bytes takes from its host's memory to a device, pinned or pageable.

    On the device whose copies the catalog has, by its measured rate. On another, pinned memory gives the same share of
    its host link's data sheet; from pageable memory the host copies into a pinned buffer first, which its processor
    limits and not the link: at the measured rate, or the link's where that is slower. Raises `InvalidInput` where the
    link to the host is not known.

    >>> copy_seconds("100MB", "h200").basis, copy_seconds("100MB", "a100-sxm-80gb").basis
    ('measured', 'assumed')
    """
    size = parse_nbytes(nbytes) if isinstance(nbytes, str) else nbytes
    there = device if isinstance(device, Device) else catalog.device(device, "device")
    if size < 0:
        raise InvalidInput([Problem("nbytes", size, "must be 0 or more", 0)])
    entry = host_copies()[EVIDENCE]
    rates = {copy_time.what: copy_time.bytes_per_second or 0.0 for copy_time in measured(EVIDENCE)}
    rate, source, basis = rates[f"to device, {'pinned' if pinned else 'pageable'}"], str(entry["source"]), "measured"
    if there.name != EVIDENCE:
        if there.fabric is None or there.fabric.host is None:
            raise InvalidInput([Problem("device", there.name, "has no known link to its host's memory")])
        link, own = there.fabric.host, catalog.link(entry["link"])
        share = rates["to device, pinned"] / own.bytes_per_second
        reached = link.bytes_per_second * share
        rate, basis = (reached if pinned else min(rate, reached)), "assumed"
        from_pinned = f"{link.title}, of which an {EVIDENCE} reached {share:.0%} from pinned memory"
        source = f"{from_pinned if rate == reached or pinned else f'the host of an {EVIDENCE}'}; {source}"
    made: dict[str, Any] = {"device": there.name, "pinned": pinned, "basis": basis, "source": source}
    return CopySeconds(nbytes=size, seconds=size / rate, bytes_per_second=rate, **made)


def table(device: str) -> Table | None:
    """The copies of a device that the catalog has, each with its rate."""
    cells = tuple(
        (copy_time.what, copy_time.nbytes, copy_time.seconds, copy_time.bytes_per_second, copy_time.note)
        for copy_time in measured(device)
    )
    units = ("", "nbytes", "seconds", "nbytes_per_second")
    columns = (f"measured on {device}", "bytes", "one", "rate", "")
    return Table("host copies", columns, cells, units, align="lrrrl") if cells else None
