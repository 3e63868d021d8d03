"""The ledger of compiled modules and steps: the compiler's own code, on fake tensors without its kernels."""

from trainledger.trace.compiled.dynamo import captured, compiled_runs_eagerly, is_compiled, metered, no_word_of_hooks

__all__ = ["captured", "compiled_runs_eagerly", "is_compiled", "metered", "no_word_of_hooks"]
