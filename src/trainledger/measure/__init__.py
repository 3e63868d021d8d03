"""What really happens: a machine's rates, and a run's own ledger."""

from trainledger.measure.meter import meter

__all__ = ["meter"]
