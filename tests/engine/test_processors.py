"""Cores that are there and that are free, as the system's own files say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainledger.engine.processors import cores, free_cores, make_way


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"job/cpu.max": "50000 100000"}, 1),
        ({"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_a_quota_of_a_control_group_is_a_bound(files: dict[str, str], most: int | None, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores(tmp_path, own) == (most or len(os.sched_getaffinity(0)))


def test_a_busy_machine_gets_fewer_threads_that_wait_passively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = os.cpu_count() or 1
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (15.0 * n, 0.0, 0.0))
    (tmp_path / "loadavg").write_text("0.1 0.1 0.1 1/99 1\n")
    assert free_cores(tmp_path) == cores(), "the load of a minute ago may be over"
    (tmp_path / "loadavg").write_text(f"0.1 0.1 0.1 {15 * n + 1}/99 1\n")
    assert free_cores(tmp_path) == 0
    monkeypatch.setattr("trainledger.engine.processors.free_cores", lambda: 0.4)
    sentence = make_way()
    if cores() == 1:
        assert sentence is None
        return
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("1", "passive")
    assert sentence == f"Other processes leave about 0.4 of {cores()} cores: threads here: 1, waiting passively."


@pytest.mark.parametrize("given", [None, "active"])
def test_a_training_on_a_busy_machine_waits_passively_with_the_threads_that_its_bits_are_of(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    monkeypatch.setattr("trainledger.engine.processors.free_cores", lambda: 0.4)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert make_way(fewer=False) is None, "of a quiet machine nothing is asked"
    monkeypatch.setattr(os, "getloadavg", lambda: (15.0 * (os.cpu_count() or 1), 0.0, 0.0))
    sentence = make_way(fewer=False)
    assert "OMP_NUM_THREADS" not in os.environ
    if given or cores() == 1:
        assert (sentence, os.environ.get("OMP_WAIT_POLICY")) == (None, given)
        return
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("passive", "0")
    assert sentence == f"Other processes leave about 0.4 of {cores()} cores: threads wait passively."
