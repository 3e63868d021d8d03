"""Identical blocks are traced once and multiplied, where that is proved to give the ledger of all of them."""

from trainledger.trace.blocks.fold import MICRO_BATCHES, Counts, Folded, counted, fold, proved, with_rounds
from trainledger.trace.blocks.once import BLOCKS, LEAST, LEAST_ASKED, Once, traced_once

__all__ = [
    "BLOCKS",
    "LEAST",
    "LEAST_ASKED",
    "MICRO_BATCHES",
    "Counts",
    "Folded",
    "Once",
    "counted",
    "fold",
    "proved",
    "traced_once",
    "with_rounds",
]
