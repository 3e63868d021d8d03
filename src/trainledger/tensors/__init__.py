"""Tensors without torch: sizes, strides, views and copies, einsums, and numbers in each format; for teaching."""
