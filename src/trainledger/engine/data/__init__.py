"""From text to batches: corpora, tokenizers, the token store, and which tokens a step trains on.

`trainledger.engine.data.loader` brings the batches to a device and is the only module here that imports torch.
"""

from trainledger.engine.data.mixture import train_batch, validation_batch
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.store import TokenStore, check_lengths, check_vocabulary, open_store

__all__ = [
    "TokenStore",
    "check_lengths",
    "check_vocabulary",
    "open_store",
    "prepare",
    "train_batch",
    "validation_batch",
]
