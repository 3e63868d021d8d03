"""The parts of a model on a tape: parameters, embedding, attention, feed-forward, blocks, head and loss."""
