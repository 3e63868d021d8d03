"""Sets of moments beside the same sets written out moment by moment."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainledger.observe.profiler.recording import common, length, union, within, without

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=6)


def made(some):
    spans = np.array(sorted((begin, begin + more) for begin, more in some), dtype=np.int64).reshape(-1, 2)
    return union(spans[:, 0], spans[:, 1])


def moments(intervals):
    return {each for begin, end in intervals.tolist() for each in range(begin, end)}


@given(pairs, pairs, st.integers(0, 36), st.integers(0, 36))
def test_they_are_what_their_moments_are(some, others, begin, end):
    one, other = made(some), made(others)
    assert moments(one) == {each for at, more in some for each in range(at, at + more)}
    assert moments(common(one, other)) == moments(one) & moments(other)
    assert moments(without(one, other)) == moments(one) - moments(other)
    assert moments(within(one, begin, end)) == moments(one) & set(range(begin, end))
    for each in (one, common(one, other), without(one, other)):
        assert length(each) == len(moments(each))
        assert (each[1:, 0] > each[:-1, 1]).all()
