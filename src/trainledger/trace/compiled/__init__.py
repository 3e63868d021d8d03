"""The ledger of compiled modules and steps: the compiler's own code, with its kernels left out, on fake tensors."""

from trainledger.trace.compiled.dynamo import captured, is_compiled

__all__ = ["captured", "is_compiled"]
