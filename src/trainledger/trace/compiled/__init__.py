"""The ledger of compiled modules and steps: the compiler's own code, with its kernels left out, on fake tensors."""

from trainledger.trace.compiled.dynamo import captured, is_compiled
from trainledger.trace.compiled.torch_internals import compiled_runs_eagerly, no_word_of_hooks

__all__ = ["captured", "compiled_runs_eagerly", "is_compiled", "no_word_of_hooks"]
