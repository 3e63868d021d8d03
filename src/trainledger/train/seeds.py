"""Seeds derived apart by use, so that changing one stream of chance leaves the others as they were.

The order of the data has its key from the same seed in `trainledger.data.sampler`.
"""

from __future__ import annotations

from hashlib import blake2b


def derive(seed: int, use: str, *indices: int) -> int:
    """A seed of 63 bits for one use of a run's seed, by hashing (BLAKE2b) the use and its indices.

    >>> derive(0, "init") == derive(0, "init"), derive(0, "dropout") == derive(0, "init")
    (True, False)
    """
    text = ":".join([str(seed), use, *map(str, indices)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def init_seed(seed: int) -> int:
    """The seed of the initial weights."""
    return derive(seed, "init")


def adapter_seed(seed: int) -> int:
    """The seed of the adapters that learn beside frozen weights."""
    return derive(seed, "adapters")


def dropout_seeds(seed: int, step: int, grad_accum: int) -> list[int]:
    """One seed per micro-batch of a step: dropout needs no generator state in a checkpoint."""
    return [derive(seed, "dropout", step, index) for index in range(grad_accum)]
