"""Memory over a step: loops are followed in their first and last iteration, and tell the same as every iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes, timeline


def entry(
    name: str, allocated: int = 0, freed: int = 0, loop: tuple[tuple[str, object], ...] = (), **more: object
) -> Entry:
    moves = {"allocated": (("activations", allocated),), "freed": (("activations", freed),)}
    return Entry(name, "", "forward", "copy", loop=loop, **{**moves, **more})  # type: ignore[arg-type]


def of(*entries: Entry, resident: int = 0) -> Ledger:
    return Ledger(entries, resident=(("parameters", resident),))


def test_without_loops() -> None:
    ledger = of(entry("a", 10, 4), entry("b", 7, 13), entry("c", 8, 8), resident=100)
    assert [each.nbytes for each in timeline(ledger)] == [110, 113, 108]
    peak = ledger.peak()
    assert (peak.nbytes, peak.entry.name, peak.index) == (113, "b", 1)
    assert peak.by_category == {"parameters": 100, "activations": 13}


def test_the_first_of_equal_peaks() -> None:
    assert of(entry("a", 5, 5), entry("b", 5, 5)).peak().entry.name == "a"


def test_scratch_is_there_only_while_it_runs() -> None:
    ledger = of(entry("a", 1, scratch=9), entry("b", 2))
    assert [each.nbytes for each in timeline(ledger)] == [10, 3]
    assert ledger.peak().by_category == {"activations": 1, "scratch": 9}


def test_growth_peaks_in_the_last_iteration() -> None:
    ledger = of(entry("grow", 10, 3, loop=(("layers", 5),)), entry("after", 1))
    moments = timeline(ledger)
    assert [(each.iteration, each.nbytes) for each in moments] == [((0,), 10), ((4,), 38), ((), 36)]
    assert ledger.peak().nbytes == 38


def test_shrinkage_peaks_in_the_first_iteration() -> None:
    ledger = of(entry("before", 50), entry("shrink", 2, 10, loop=(("layers", 5),)), entry("after", 1))
    assert [each.nbytes for each in timeline(ledger)] == [50, 52, 20, 11]


def test_a_loop_of_one_is_met_once_and_of_none_never() -> None:
    assert [each.nbytes for each in timeline(of(entry("a", 5, loop=(("layers", 1),))))] == [5]
    ledger = of(entry("a", 1), entry("b", 500, loop=(("layers", 0),)), entry("c", 1))
    assert [each.nbytes for each in timeline(ledger)] == [1, 2]


def test_nested_loops() -> None:
    outer, inner = ("micro-batches", 3), ("layers", 4)
    ledger = of(
        entry("start", 1, loop=(outer,)),
        entry("keep", 10, 2, loop=(outer, inner)),
        entry("drop", 0, 5, loop=(outer, inner)),
        entry("end", 0, 7, loop=(outer,)),
    )
    # Each inner iteration leaves 3 and each outer one 1 + 4 * 3 - 7 = 6; the last "keep" runs on 2 * 6 + 1 + 3 * 3.
    assert ledger.peak().nbytes == 2 * 6 + 1 + 3 * 3 + 10
    assert len(timeline(ledger)) == 2 * (1 + 2 * 2 + 1)


def test_the_number_of_moments_does_not_depend_on_the_count() -> None:
    def moments(layers: int) -> int:
        return len(timeline(of(entry("a", 1, loop=(("layers", layers),)))))

    assert moments(2) == moments(10**6) == 2


def test_arrays_of_counts_one_peak_each_and_no_phantom_iteration() -> None:
    layers = np.array([0, 1, 2, 50])
    ledger = of(entry("start", 3), entry("big", 100, 90, loop=(("layers", layers),)), entry("end", 20))
    assert peak_nbytes(ledger).tolist() == [
        peak_nbytes(of(entry("start", 3), entry("big", 100, 90, loop=(("layers", each),)), entry("end", 20)))
        for each in layers.tolist()
    ]


def test_peak_of_an_empty_ledger_is_an_error() -> None:
    with pytest.raises(ValueError):
        of().peak()


@st.composite
def bodies(draw: st.DrawFn, loop: tuple[tuple[str, int], ...] = (), names: count[int] | None = None) -> list[Entry]:
    """Entries and loops of entries, nested at most three deep, that allocate and free what they like."""
    names = names or count()
    nbytes = st.integers(0, 50)
    found: list[Entry] = []
    for _ in range(draw(st.integers(1, 4))):
        if len(loop) < 3 and draw(st.booleans()):
            inside = (*loop, (f"loop {next(names)}", draw(st.integers(1, 4))))
            found += draw(bodies(inside, names))
        else:
            found.append(entry("op", draw(nbytes), draw(nbytes), loop, scratch=draw(nbytes)))
    return found


def brute_force(entries: Sequence[Entry], depth: int = 0) -> Iterator[Entry]:
    for loop, group in groupby(entries, key=lambda each: each.loop[depth : depth + 1]):
        body = list(group)
        for _ in range(loop[0][1] if loop else 1):
            yield from brute_force(body, depth + 1) if loop else body


@given(bodies())
def test_peak_with_loops_is_that_of_every_iteration(entries: list[Entry]) -> None:
    live = highest = 1000
    for each in brute_force(entries):
        live += each.allocated[0][1]
        highest = max(highest, live + each.scratch)
        live -= each.freed[0][1]
    found = of(*entries, resident=1000).peak().nbytes
    assert max(found, 1000) == highest
