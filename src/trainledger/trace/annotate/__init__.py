"""A program line by line: what each line computes, moves, allocates and keeps, and what is wrong with it."""
