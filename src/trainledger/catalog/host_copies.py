"""Measured copies between a device and its host, by device: where they are from, and what each took."""

from __future__ import annotations

from typing import Any

from trainledger.catalog import _table
from trainledger.spec.calibration import CopyTime


def host_copies() -> dict[str, dict[str, Any]]:
    """By device ``source``, ``date``, the ``link`` between the two, and ``copies``.

    >>> [each["what"] for each in host_copies()["h200"]["copies"]][:2]
    ['to device, pageable', 'to device, pinned']
    """
    return _table("host_copies.toml")


def measured(device: str) -> tuple[CopyTime, ...]:
    """The copies of a device; none of most."""
    return tuple(CopyTime(**each) for each in host_copies().get(device, {}).get("copies", ()))
