"""The ledger of code that was not written for us: any module or training step, on fake or real tensors."""

from trainledger.trace.fakes.tensors import make_states
from trainledger.trace.step import trace, trace_step

__all__ = ["make_states", "trace", "trace_step"]
