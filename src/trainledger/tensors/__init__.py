"""Tensors without torch: sizes, strides, views and copies, products, and numbers in each format; for teaching."""
