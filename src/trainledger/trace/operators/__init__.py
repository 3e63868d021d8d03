"""The account of each operator: kind, FLOPs, shape, and scratch of CPU kernels."""
