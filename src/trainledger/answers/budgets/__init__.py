"""Resource regressions as tests: a lock file has what targets cost, and a check names the lines that cost more."""
