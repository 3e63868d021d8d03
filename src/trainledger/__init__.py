"""trainledger accounts for every byte and every FLOP of a training run."""

__version__ = "0.1.0"
