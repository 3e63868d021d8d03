"""What a program on fake tensors cannot have, said in a sentence."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818
    """Something that cannot be done here; the text says what and what to do instead."""
