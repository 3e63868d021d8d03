"""What the fields of a run must obey together: each rule gives its sentence, with the nearest value that works."""
