"""What really happens: a machine's rates, and a run's own ledger."""
