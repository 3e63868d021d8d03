"""What is sure to go wrong later is said before the first step, with the exit code that it would have had."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import CountingFeed, tiny_run

from trainledger.answers.closed_loop import needs_of
from trainledger.engine.train.engine import train
from trainledger.engine.train.preflight import (
    BESIDE_NBYTES,
    Free,
    Needs,
    checkpoints_at_once,
    code_digest,
    facts_of,
    judge_memory,
    of_machine,
    of_process,
    refuse_different,
    status,
)
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.run_directory import all_checkpoints
from trainledger.engine.train.stop import CannotSave, OutOfMemory
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

ALONE = Ranks(device=torch.device("cpu"))


def looked_at(run: Run, run_dir: Path, needs: Any = needs_of) -> Any:
    return train(run, run_dir, open_feed=CountingFeed, needs_of=needs)


@pytest.fixture
def file_limit() -> Iterator[Any]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "fields",
    [{}, {"optimizer": "sgd"}, {"optimizer": "lion"}, {"precision": "bf16"}, {"optimizer": "adafactor"}],
    ids=str,
)
def test_the_checkpoint_is_as_large_as_it_is_said_to_be(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = tiny_run({"d_model": 128, "feed_forward.d_ff": 512}, **fields)
    needs = needs_of(run, ALONE)
    finished = looked_at(run, tmp_path)
    files = [each.stat().st_size for each in finished.checkpoint.glob("*.safetensors")]
    assert needs.checkpoint <= sum(files) <= needs.checkpoint + 20_000  # headers, and a number of steps for each tensor
    assert max(files) <= needs.file + 20_000


def test_a_disk_that_is_too_small_ends_before_the_first_step(tmp_path: Path) -> None:
    """Ten million checkpoints of a quarter of a megabyte: no disk here has room for them."""
    run = tiny_run(steps=10**8, **{"checkpoints.every": 1, "checkpoints.keep_last": 10**8, "evaluation.every": None})
    with pytest.raises(CannotSave, match=r"The disk of .* has .* left, and 100000001 checkpoints of .* take .* more"):
        looked_at(run, tmp_path)
    assert not (tmp_path / "state.json").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_a_file_size_limit_ends_before_the_first_step(tmp_path: Path, file_limit: Any) -> None:
    run = tiny_run()
    file_limit(needs_of(run, ALONE).file - 1)
    with pytest.raises(CannotSave, match=r"RLIMIT_FSIZE \(ulimit -f\) allows files of .*, and a file of a checkpoint"):
        looked_at(run, tmp_path)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"steps": 10, "checkpoints.every": 2, "checkpoints.keep_last": 2}, 3),
        ({"steps": 10, "checkpoints.every": 2, "checkpoints.keep_last": 9}, 6),
        ({"steps": 10, "checkpoints.every": None}, 2),
        ({"steps": 12, "checkpoints.every": 2, "checkpoints.keep_last": 1, "checkpoints.keep_every": 3}, 4),
    ],
)
def test_no_run_has_more_checkpoints_at_once(tmp_path: Path, fields: dict[str, Any], most: int) -> None:
    run = tiny_run(**fields, **{"evaluation.every": None})
    assert checkpoints_at_once(run.recipe) == most
    train(run, tmp_path, open_feed=CountingFeed)
    assert len(all_checkpoints(tmp_path)) <= most


def test_memory_that_will_not_do_is_said(tmp_path: Path) -> None:
    run = tiny_run()

    def too_much(run: Run, ranks: Ranks) -> Needs:
        return replace(needs_of(run, ranks), peak=10**15)

    with pytest.raises(OutOfMemory) as caught:
        looked_at(run, tmp_path, too_much)
    assert caught.value.exit_code == 6
    assert re.search(
        r"^Rank 0 \(.*\) will need 1\.25 PB, and .* leaves .*; a smaller recipe\.micro_batch", str(caught.value)
    )
    assert looked_at(run, tmp_path).step == 6  # nothing is left of it that would stand in the way


def test_what_a_run_needs_beside_its_tensors() -> None:
    run = tiny_run()
    needs = needs_of(run, ALONE)
    assert needs.host(run.recipe, 0.5) == round(1.5 * needs.peak) + BESIDE_NBYTES
    background = tiny_run(**{"checkpoints.asynchronous": True})
    copies = needs_of(background, ALONE)
    assert copies.copies == copies.checkpoint == needs.checkpoint
    assert copies.host(background.recipe, 0.5) == needs.host(run.recipe, 0.5) + needs.checkpoint


# Memory of several ranks


def rank(host: str, lean: int, kept: int, machine: int, own: int | None = None, **device: int) -> dict[str, Any]:
    return {
        "host": host, "lean": lean, "kept": kept, "device": device.get("device"),
        "machine": {"nbytes": machine, "limit": "this machine's memory"},
        "own": None if own is None else {"nbytes": own, "limit": "RLIMIT_AS (ulimit -v)"},
        "free": {"nbytes": device["free"], "limit": "NVIDIA H100"} if "free" in device else None,
    }  # fmt: skip


def test_ranks_of_a_machine_share_its_memory() -> None:
    assert judge_memory([rank("a", 10, 20, 40), rank("a", 10, 20, 41)])
    assert not judge_memory([rank("a", 10, 20, 40), rank("a", 10, 20, 39)])
    assert judge_memory([rank("a", 10, 20, 20), rank("b", 10, 20, 20)])
    with pytest.raises(OutOfMemory, match=r"2 ranks \(a\) will need 20 B, and this machine's memory leaves 19 B"):
        judge_memory([rank("b", 10, 10, 10), rank("a", 10, 20, 19), rank("a", 10, 20, 25)])


def test_each_rank_has_limits_of_its_own() -> None:
    assert not judge_memory([rank("a", 10, 20, 100, own=15)])
    with pytest.raises(OutOfMemory, match=r"Rank 1 \(a\) will need 10 B, and RLIMIT_AS \(ulimit -v\) leaves 9 B"):
        judge_memory([rank("a", 10, 20, 100, own=15), rank("a", 10, 20, 100, own=9)])
    with pytest.raises(OutOfMemory, match=r"Rank 1 \(a\) will need 81 B, and NVIDIA H100 leaves 80 B"):
        judge_memory([rank("a", 1, 2, 9, device=81, free=82), rank("a", 1, 2, 9, device=81, free=80)])


# Who says how much is free


def test_limits_of_this_process() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert before[0] != resource.RLIM_INFINITY or of_process() is None or of_process() != Free(0, "")
    resource.setrlimit(resource.RLIMIT_DATA, (status()["VmData"] + 10**9, before[1]))
    try:
        found = of_process()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert found is not None
    assert found.limit == "RLIMIT_DATA (ulimit -d)"
    assert abs(found.nbytes - 10**9) < 5 * 10**7


def control_group(path: Path, names: tuple[str, str], most: str, used: int, files: int, key: str) -> None:
    path.mkdir(parents=True)
    (path / names[0]).write_text(f"{most}\n")
    (path / names[1]).write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\n{key} {files}\nother 3\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_around_counts(tmp_path: Path, version: int) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    key = {1: "total_inactive_file", 2: "inactive_file"}[version]
    root = tmp_path / "cgroup" / "memory" if version == 1 else tmp_path / "cgroup"
    none = str(2**63 - 4096) if version == 1 else "max"
    control_group(root / "pod" / "job", names, none, 700, 50, key)
    (root / "pod" / names[0]).write_text("1000\n")
    (root / "pod" / names[1]).write_text("800\n")
    (root / "pod" / "memory.stat").write_text(f"{key} 50\n")
    own = tmp_path / "own"
    own.write_text("4:memory:/pod/job\n0::/\n" if version == 1 else "0::/pod/job\n")
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemAvailable:    2 kB\n")
    found = of_machine(tmp_path / "cgroup", tmp_path, own=own)
    assert found == Free(250, f"the control group {root / 'pod'}")
    (root / "pod" / names[0]).write_text("900000\n")
    assert of_machine(tmp_path / "cgroup", tmp_path, own=own) == Free(2048, "this machine's memory")


def test_this_machine_says_how_much_it_has() -> None:
    found = of_machine()
    assert found is not None
    assert 10**7 < found.nbytes < 10**14


# Ranks that are not alike


def test_ranks_that_differ_are_named() -> None:
    own = facts_of(tiny_run())
    refuse_different([own, own | {"host": "elsewhere"}])
    with pytest.raises(InvalidInput) as caught:
        refuse_different([own, own | {"host": "b", "torch": "2.11.0"}, own | {"torch": "2.12.0", "trainledger": "old"}])
    said = str(caught.value)
    assert f"torch: is 2.11.0 on rank 1 (b), and {torch.__version__} on rank 0 ({own['host']})" in said
    assert "trainledger: is old on rank 2" in said
    assert facts_of(tiny_run())["run file"] != facts_of(tiny_run(seed=1))["run file"]
    assert re.fullmatch("[0-9a-f]{12}", code_digest())
