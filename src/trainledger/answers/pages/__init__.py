"""The document of each answer."""
