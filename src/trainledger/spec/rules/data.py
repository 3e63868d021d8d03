"""What the sources of a mixture must obey together."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.data import BLOCK_ROWS, STANDARD_LIBRARY, DataSpec, dealt
from trainledger.spec.problem import Problem


def data_problems(data: DataSpec) -> Iterator[Problem]:
    """Every contradiction between the fields of the data."""
    if not data.mixture:
        return
    if data.path != (STANDARD_LIBRARY,):  # the default, which a run file may spell out
        rule = "give either path, or mixture with a path for each of its sources, not both"
        yield Problem("data.path", list(data.path), rule)
    total = sum(data.weights)
    for (name, each), rows in zip(data.mixture, dealt(BLOCK_ROWS, data.weights), strict=True):
        if not rows:
            rule = f"gives it none of {BLOCK_ROWS:,} sequences, since all weights together are {total:g}"
            least = float(f"{(total - each.weight) / (BLOCK_ROWS - 100):.2g}")
            yield Problem(f"data.mixture.{name}.weight", each.weight, rule, least)
