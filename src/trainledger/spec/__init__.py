"""What a run is: frozen descriptions of model, recipe, layout, cluster and data, without arithmetic."""
