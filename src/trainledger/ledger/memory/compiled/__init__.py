"""What a compiler changes: which operations become one kernel, and when each piece of memory is live."""
