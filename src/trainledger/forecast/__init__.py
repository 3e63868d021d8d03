"""Seconds and device memory of an account, and the questions that turn the account round."""
