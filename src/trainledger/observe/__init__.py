"""Measurements of machines, steps, loops and profiler traces, and their comparison with the forecast."""
