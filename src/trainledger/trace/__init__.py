"""The ledger of code that was not written for us: any module or training step, on fake or real tensors."""

from trainledger.trace.trace import trace

__all__ = ["trace"]
