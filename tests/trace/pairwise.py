"""Few cases that cover every pair of settings: what a product of all settings covers, at a small part of its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from random import Random
from typing import Any

Case = dict[str, Any]


def covering(draw: Callable[[Random], Case], *, drawn: int = 2000, seed: int = 0) -> list[Case]:
    """Cases of ``draw`` in which every pair of settings occurs that occurs in so many draws; the same ones each time.

    Greedy, as in Cohen et al. 1997 (The AETG System): of the cases drawn, each time the one with the most new pairs.

    >>> axes = {"a": (1, 2, 3), "b": (True, False), "c": "xyz", "d": (0, 1)}
    >>> cases = covering(lambda random: {name: random.choice(values) for name, values in axes.items()})
    >>> len(cases) < 14, len({(each["a"], each["c"]) for each in cases})
    (True, 9)
    """
    random = Random(seed)
    pool = [draw(random) for _ in range(drawn)]
    pairs = [frozenset(_pairs(each)) for each in pool]
    missing = set().union(*pairs)
    chosen: list[Case] = []
    gains = sorted(((len(each), at) for at, each in enumerate(pairs)), key=lambda pair: (-pair[0], pair[1]))
    while missing:
        best, best_at = 0, -1
        for at_place, (bound, at) in enumerate(gains):
            if bound <= best:  # bounds only fall, and are in order
                break
            gain = len(pairs[at] & missing)
            gains[at_place] = gain, at
            if gain > best:
                best, best_at = gain, at
        missing -= pairs[best_at]
        chosen.append(pool[best_at])
        gains.sort(key=lambda pair: (-pair[0], pair[1]))
    return chosen


def _pairs(case: Case) -> Iterator[tuple[Any, ...]]:
    settings = sorted((name, repr(value)) for name, value in case.items())
    yield from combinations(settings, 2)
