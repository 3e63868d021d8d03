"""Identical blocks are traced once and multiplied, where that is proved to give the ledger of all of them."""
