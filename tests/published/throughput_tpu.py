"""maxtext on TPU v4, v5e and v5p."""

from __future__ import annotations

from published_case import Row
from throughput_case import TimeCase, TimeSource, case, from_palm_flops

from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe

SOURCES: tuple[TimeSource, ...] = ()


def tpu_case(row: Row) -> TimeCase | str:
    return "no calibration of this device"
