"""What is kept for whoever asks again: the newest, in bounded number, whatever threads ask."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainledger as tl
from trainledger.answers import layout
from trainledger.answers.recent import Recent

RECIPE = {"seq_len": 128, "global_batch": 8, "steps": 10}


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_the_keys_asked_for_last_are_kept(most: int, asked: list[tuple[bool, int]]) -> None:
    recent: Recent[int, str] = Recent(most)
    order: list[int] = []  # kept keys, the one that was asked for longest ago first
    for keep, key in asked:
        if keep:
            recent.keep(key, f"of {key}")
        else:
            assert recent.get(key) == (f"of {key}" if key in order else None)
        if keep or key in order:
            order = [*(each for each in order if each != key), key][-most:]
    assert len(recent) == len(order)
    assert [recent.get(key) for key in order] == [f"of {key}" for key in order]


def test_threads_may_share_it() -> None:
    recent: Recent[int, int] = Recent(3)

    def ask(first: int) -> None:
        for key in range(first, first + 3000):
            recent.keep(key % 7, key)
            recent.get(key % 5)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))
    assert len(recent) == 3


def test_a_server_that_searches_many_layouts_keeps_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Recent[object, tl.Run] = Recent(4)
    monkeypatch.setattr(layout, "_FOUND", kept)
    run = tl.load({"model": {"preset": "gpt2"}, "recipe": RECIPE, "cluster": {"device": "this-machine"}})
    asked = [replace(run, layout=replace(run.layout, auto=True), recipe=replace(run.recipe, seq_len=each))
             for each in range(100, 120)]  # fmt: skip
    found = [layout.with_layout(each) for each in asked]
    assert len(kept) == 4
    assert [each.recipe.seq_len for each in found] == list(range(100, 120))


def test_the_same_question_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_FOUND", Recent(4))
    cluster = {"device": "h100-sxm", "count": 2}
    run = tl.load({"model": {"preset": "gpt2"}, "recipe": RECIPE, "cluster": cluster, "layout": "auto"}, search=False)
    heard: list[str] = []
    first = layout.with_layout(run, progress=lambda what, done, of: heard.append(what))
    assert heard
    heard.clear()
    assert layout.with_layout(run, progress=lambda what, done, of: heard.append(what)) == first
    assert heard == []
