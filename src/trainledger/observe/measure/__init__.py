"""What really happens: a machine's rates, and a run's own ledger."""

from trainledger.observe.measure.meter import meter

__all__ = ["meter"]
