"""Boxes of words that must not overlap."""

from __future__ import annotations

from collections.abc import Sequence

_APART = 2.0  # pixels between neighbouring words
Box = tuple[float, float, float, float]  # left, top, width, height


class Boxes:
    """What is taken of a drawing, within its edges."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.taken: list[Box] = []

    def take(self, box: Box) -> None:
        """Marks a box as taken."""
        self.taken.append(box)

    def is_free(self, box: Box) -> bool:
        """Whether a box is free and within the edges."""
        left, top, wide, high = box
        if left < 0 or left + wide > self.width:
            return False
        return not any(
            left < x + width + _APART and x < left + wide + _APART and top < y + height and y < top + high
            for x, y, width, height in self.taken
        )

    def free(self, candidates: Sequence[Box]) -> Box:
        """Takes the first that is free, else the first of all.

        >>> boxes = Boxes(100)
        >>> boxes.free([(0, 0, 9, 9)]), boxes.free([(5, 5, 9, 9), (20, 5, 9, 9)])
        ((0, 0, 9, 9), (20, 5, 9, 9))
        """
        first, *others = candidates
        found = next((each for each in candidates if self.is_free(each)), first) if others else first
        self.take(found)
        return found
