"""Reads what a profiler recorded of a program, and says where the time of its steps went."""
