"""The search for a layout: which are allowed, what each needs at least, and the exact account of the best."""
