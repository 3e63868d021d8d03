"""The recorder: what is dispatched, which memory is live, and which code caused it."""
