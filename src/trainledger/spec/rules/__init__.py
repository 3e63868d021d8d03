"""Rules between the fields of a run: a sentence each, with the nearest value that works."""
