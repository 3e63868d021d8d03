"""Programs of many ranks traced without any: one rank's step under a fake process group, on fake tensors."""

from trainledger.trace.distributed.program import trace_rank
from trainledger.trace.distributed.world import fake_world

__all__ = ["fake_world", "trace_rank"]
