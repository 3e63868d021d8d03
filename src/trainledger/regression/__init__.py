"""Budgets as tests: what targets cost is locked in a file, and what makes one cost more is told with its line."""
