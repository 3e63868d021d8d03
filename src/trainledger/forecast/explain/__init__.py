"""Where each number of an account comes from: its formula, the numbers put in, its basis and its source."""
