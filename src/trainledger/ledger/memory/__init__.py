"""Memory of a step: lifetimes and their peak, what is there without a step, recomputation, offloading, compilers."""
