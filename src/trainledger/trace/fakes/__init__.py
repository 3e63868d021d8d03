"""Running a step on fake tensors as it would run on real ones."""
