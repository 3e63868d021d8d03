"""What fits: the largest model, the longest sequence, the largest micro-batch, the fewest devices, the least memory."""
