"""Identical blocks are traced once and multiplied, where that is proved to give the ledger of all of them."""

from trainledger.trace.blocks.extrapolate import (
    MICRO_BATCHES,
    Counts,
    Extrapolation,
    counted,
    extrapolate,
    proved,
    with_rounds,
)
from trainledger.trace.blocks.repeat_blocks import BLOCKS, LEAST, LEAST_ASKED, Once, traced_once

__all__ = [
    "BLOCKS",
    "LEAST",
    "LEAST_ASKED",
    "MICRO_BATCHES",
    "Counts",
    "Extrapolation",
    "Once",
    "counted",
    "extrapolate",
    "proved",
    "traced_once",
    "with_rounds",
]
