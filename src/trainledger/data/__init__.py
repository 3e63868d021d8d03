"""From text to batches: corpora, tokenizers, the token store, and which tokens a step trains on.

`trainledger.data.loader` brings the batches to a device and is the only module here that imports torch.
"""

from trainledger.data.prepare import prepare
from trainledger.data.sampler import train_batch, validation_batch
from trainledger.data.store import TokenStore, check_lengths, check_vocabulary, open_store

__all__ = [
    "TokenStore",
    "check_lengths",
    "check_vocabulary",
    "open_store",
    "prepare",
    "train_batch",
    "validation_batch",
]
