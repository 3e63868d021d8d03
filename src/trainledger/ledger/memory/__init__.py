"""Memory of a step: lifetimes and their peak, static memory, recomputation, offloading, compilers."""
