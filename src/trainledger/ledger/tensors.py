"""The pieces of memory of a step one by one: what each is, who made it, and from when until when it is live."""

from __future__ import annotations

from trainledger.frozen import frozen


@frozen
class TensorLife:
    """One piece of memory of a traced step.

    ``born`` is the index of the entry that made it, -1 where it was there before the step; ``died`` that of the
    entry after which it is gone, None where it outlives the step. ``shape`` and ``dtype`` are those of the tensor it
    was made for, ``name`` the parameter's or the operation's, ``line`` the user's code ("file:line").

    >>> life = TensorLife(nbytes=32, category="scratch", name="mm", shape=(2, 4), dtype="fp32", born=3, died=5)
    >>> [life.lives(at) for at in (2, 3, 5, 6)]
    [False, True, True, False]
    """

    nbytes: int
    category: str
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    path: str = ""
    phase: str = ""
    line: str = ""
    born: int = -1
    died: int | None = None

    def lives(self, at: int) -> bool:
        """Whether it is live while the entry with this index runs."""
        return self.born <= at and (self.died is None or at <= self.died)
