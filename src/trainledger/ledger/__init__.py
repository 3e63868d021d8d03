"""The account of a training step: what an entry is, what each operation costs, and how a step adds up."""
