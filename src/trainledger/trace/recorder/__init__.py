"""The recorder: what is dispatched, which memory lives, and whose code asked for it."""
