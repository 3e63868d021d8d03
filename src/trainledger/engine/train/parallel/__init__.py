"""A layout applied to a model from outside: one file for each kind of parallelism, composed in `model_on_rank`."""
