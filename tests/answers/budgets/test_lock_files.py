"""The lock's file: written and read without loss, the same bytes for the same figures; sentences for what is none."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.answers.budgets.lockfile import Locked, read_lock, to_toml, write_lock
from trainledger.answers.budgets.summary import Collectives, Place, Summary
from trainledger.answers.budgets.target import Target
from trainledger.spec.problem import InvalidInput

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
WORDS = TEXTS.map(lambda text: text.replace(": ", ":").strip() or "x")
AMOUNTS = st.integers(0, 2**70)
TOTALS = ("parameters", "flops", "model_flops", "kept", "peak")
PLACES = st.builds(
    Place, where=WORDS, text=st.one_of(st.just(""), WORDS), parameters=AMOUNTS, flops=AMOUNTS, peak=AMOUNTS,
    kept=st.dictionaries(TEXTS, AMOUNTS, max_size=3).map(lambda kept: tuple(kept.items())),
)  # fmt: skip
FOOTPRINTS = st.builds(
    Summary,
    totals=st.tuples(*(AMOUNTS for _ in TOTALS)).map(lambda amounts: dict(zip(TOTALS, amounts, strict=True))),
    peak=st.dictionaries(TEXTS, AMOUNTS, max_size=3),
    collectives=st.dictionaries(TEXTS, st.builds(Collectives, AMOUNTS, AMOUNTS), max_size=3),
    uncounted=st.dictionaries(TEXTS, AMOUNTS, max_size=2),
    places=st.lists(PLACES, max_size=4, unique_by=lambda each: each.key).map(tuple),
    functions=st.dictionaries(TEXTS, TEXTS, max_size=2),
)
TARGETS = st.one_of(
    st.builds(Target, run=TEXTS, set=st.lists(TEXTS, max_size=2).map(tuple), by=st.sampled_from(["", "trace"])),
    st.builds(Target, module=TEXTS, input=st.lists(TEXTS, max_size=2).map(tuple), grad_accum=st.integers(1, 9)),
)
FIGURES = {"totals": dict.fromkeys(TOTALS, 1), "peak": {}, "collectives": {}, "uncounted": {}, "places": ()}
FOOTPRINT = Summary(**FIGURES, functions={})
LOCKED = Locked(Target(run="run.toml"), "trainledger 0", FOOTPRINT)


@settings(max_examples=60, deadline=None)
@given(locks=st.dictionaries(TEXTS, st.builds(Locked, TARGETS, TEXTS, FOOTPRINTS), max_size=3))
def test_what_is_written_is_read(locks: dict[str, Locked], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lock") / "trainledger.lock"
    write_lock(path, locks)
    assert read_lock(path) == dict(sorted(locks.items()))
    assert to_toml(read_lock(path)) == path.read_text() == to_toml(dict(reversed(locks.items())))


def test_a_figure_that_moves_is_one_line_of_a_diff() -> None:
    moved = Summary(**{**FIGURES, "totals": {**FIGURES["totals"], "peak": 12_345_678}}, functions={})  # type: ignore[dict-item]
    before, after = (
        to_toml({"a": LOCKED, "b": LOCKED}),
        to_toml({"a": LOCKED, "b": Locked(LOCKED.target, "trainledger 0", moved)}),
    )
    assert set(after.splitlines()) - set(before.splitlines()) == {"peak = 12_345_678"}
    assert len(before.splitlines()) == len(after.splitlines())


def refused(text: str | bytes, tmp_path: Path) -> str:
    path = tmp_path / "trainledger.lock"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInput) as error:
        read_lock(path)
    return str(error.value)


def test_files_that_are_no_lock(tmp_path: Path) -> None:
    whole = to_toml({"a": LOCKED})
    assert "is not TOML" in refused("format = ", tmp_path)
    assert "is not TOML" in refused(b"\xff", tmp_path)
    assert "line 2" in refused("format = 1\n= 3", tmp_path)
    assert "take either side" in refused(f"<<<<<<< mine\n{whole}=======\n{whole}>>>>>>> theirs\n", tmp_path)
    newer = refused(whole.replace("format = 1", "format = 2"), tmp_path)
    assert "format = 2" in newer
    assert "use the version that wrote it" in newer
    assert "nearest that works: 1" in newer
    assert "format: is not a format" in refused("", tmp_path)
    assert "targets.a.totals.peak" in refused(whole.replace("peak = 1", 'peak = "1"'), tmp_path)
    assert "targets.a.totals.peak: is missing" in refused(whole.replace("peak = 1", ""), tmp_path)
    assert "targets.a.totals.weight: is not a total" in refused(whole + "weight = 3", tmp_path)
    assert "targets.a.colour" in refused(whole.replace("run =", "colour = 3\nrun ="), tmp_path)
    assert "targets.a" in refused("format = 1\n[targets]\na = 3", tmp_path)
    assert "surprise" in refused(f"surprise = 1\n{whole}", tmp_path)
    torn = refused(whole.rstrip("\n"), tmp_path)
    assert "is torn: its last line has no end; take it from version control" in torn
    assert "targets.a.totals.flops = -1: must not be negative" in refused(
        whole.replace("\nflops = 1", "\nflops = -1"), tmp_path
    )
    assert "is no lock of trainledger's" in refused('[[package]]\nname = "a"\n', tmp_path)
    os.mkfifo(tmp_path / "pipe.lock")
    with pytest.raises(InvalidInput, match="it is not a regular file"):
        read_lock(tmp_path / "pipe.lock")
    with pytest.raises(InvalidInput, match="is not there; `trainledger lock` writes it"):
        read_lock(tmp_path / "none.lock")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_lock(tmp_path)


def test_it_is_plain_toml(tmp_path: Path) -> None:
    """Any reader of TOML sees the figures, whoever's line has quotes and backslashes in it."""
    text = 'x = "a\\b"  # é\x7f'
    places = (Place("model.py f", text, flops=3, kept=(("my_lib::op", 2),)),)
    table = tomllib.loads(
        to_toml({"a b": Locked(LOCKED.target, "", Summary(**{**FIGURES, "places": places}, functions={}))})
    )  # type: ignore[dict-item]
    assert table["targets"]["a b"]["places"] == {f"model.py f: {text}": {"flops": 3, "kept": {"my_lib::op": 2}}}
