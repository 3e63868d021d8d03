"""A run: frozen descriptions of model, recipe, layout, cluster and data, without arithmetic."""
