"""The training engine: model, data, steps on one device and many."""
