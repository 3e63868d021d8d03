"""Events from a stream, whatever chunks it comes in, and as far as it goes."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.observe.profiler import read
from trainledger.observe.profiler.read import EVENTS, BrokenOff, entries

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each, max_size=3),
    max_leaves=6,
)
traces = st.dictionaries(st.text(max_size=5), values, max_size=3).flatmap(
    lambda around: st.lists(values, max_size=5).map(lambda events: {**around, EVENTS: events, "last": 1})
)


class Pieces(io.StringIO):
    """A stream that gives a few characters at a time."""

    size = 1

    def read(self, size=-1, /):
        return super().read(min(size, self.size) if size >= 0 else self.size)


@given(traces, st.integers(1, 50), st.sampled_from([None, 1]))
def test_a_trace_is_what_json_says_whatever_pieces_it_comes_in(trace, size, indent):
    stream = Pieces(json.dumps(trace, indent=indent))
    stream.size = size
    found = list(entries(stream))
    assert [each for key, each in found if key == EVENTS] == trace[EVENTS]
    assert {key: each for key, each in found if key != EVENTS} == {
        key: each for key, each in trace.items() if key != EVENTS
    }


@given(traces, st.data())
def test_a_trace_that_breaks_off_gives_its_whole_events_first(trace, data):
    text = json.dumps(trace)
    end = data.draw(st.integers(0, len(text) - 1))
    found = []

    def all_entries() -> None:
        found.extend(each for key, each in entries(io.StringIO(text[:end])) if key == EVENTS)

    with pytest.raises(BrokenOff):
        all_entries()
    # A number at the end may be the beginning of a longer one.
    assert found[:-1] == trace[EVENTS][: max(len(found) - 1, 0)]


def test_events_without_a_frame_are_read(monkeypatch):
    monkeypatch.setattr(read, "_CHUNK", 3)
    assert list(entries(io.StringIO('[{"ph": "X"}, 12]'))) == [(EVENTS, {"ph": "X"}), (EVENTS, 12)]


@pytest.mark.parametrize("text", ["", "nothing", "<html>", '{"a" 1}', '{"a": ', '{"a": tru}'])
def test_what_is_no_json_is_said(text):
    with pytest.raises(BrokenOff, match="is not JSON any longer after"):
        list(entries(io.StringIO(text)))
