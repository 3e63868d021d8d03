"""Rates of a machine, and the metered ledger of a run."""
