"""Inverse questions: what is needed, what fits, what is missing."""
