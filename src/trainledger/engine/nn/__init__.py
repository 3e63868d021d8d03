"""The Transformer as plain torch modules, built from a `ModelSpec`."""
