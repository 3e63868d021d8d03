"""A program line by line: what each line computes, moves, allocates and keeps, and what is wrong with it."""

from trainledger.trace.annotate.annotate import annotate

__all__ = ["annotate"]
