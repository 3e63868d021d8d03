"""What a ledger means on a device: seconds, ratios, and the whole run."""
