"""A meter for anybody's training loop: its phases, its memory, its speed, and what leaves the usual."""
