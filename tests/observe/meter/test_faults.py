"""Planted faults, each in a real run of its own, are found and named; clean runs have no finding."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("loop_program.py")
pytestmark = pytest.mark.process


def run(fault, folder, steps, *, ranks=1, **environment):
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), fault, str(folder), str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(each) for each in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {each["name"]: each["sentence"] for each in lines if each.get("event") == "finding"}
    for sentence in found.values():
        assert sentence in done.stderr  # it was said at once
    return found, lines


def test_a_slow_loader(tmp_path):
    found, lines = run("slow data", tmp_path / "run", 30)
    assert "Steps wait for their data: " in found["slow data"]
    steps = [each for each in lines if "loss" in each]
    assert all(each["phase_seconds"]["data"] >= 0.05 for each in steps)


def test_a_wait_for_the_device_in_the_loop(tmp_path):
    found, _ = run("item", tmp_path / "run", 12)
    line = 1 + PROGRAM.read_text().splitlines().index(
        "            total = sum(each.grad.norm().item() for each in model.parameters())"
    )
    assert f"loop_program.py:{line}: .item() 75 times, in 5 of 5 steps" in found["synchronization in a loop"]


def test_a_hidden_copy(tmp_path):
    found, _ = run("hidden copy", tmp_path / "run", 12)
    assert "hidden.transpose(1, 2).reshape(hidden.shape[0], -1)` copies 1.049 MB" in found["hidden copy"]


def test_sizes_that_matrix_units_do_not_take(tmp_path):
    found, _ = run("odd sizes", tmp_path / "run", 12)
    assert "100.0 % of the FLOPs" in found["odd sizes"]
    assert "most of them 1001" in found["odd sizes"]
    assert "1024 is the next good size" in found["odd sizes"]


def test_graphs_that_pile_up(tmp_path):
    found, _ = run("leak", tmp_path / "run", 160)
    assert "Memory grows by " in found["memory grows"]
    assert "float32[] of AddBackward0 more" in found["leak"]
    assert "in `losses` (list), added at " in found["leak"]
    assert "keep .detach() of it" in found["leak"]


def test_a_checkpoint_on_a_slow_disk(tmp_path):
    disk = tmp_path / "disk"
    os.mkfifo(disk)
    over = threading.Event()

    def read_slowly():
        while not over.is_set():
            with open(disk, "rb") as file:
                while file.read(1 << 16):
                    time.sleep(0.005)

    reader = threading.Thread(target=read_slowly, daemon=True)
    reader.start()
    found, _ = run("slow checkpoint", tmp_path / "run", 30, DISK=str(disk))
    over.set()
    assert found["slow checkpoint"].startswith("The checkpoint before step 11 took ")


def test_a_slow_rank(tmp_path):
    found, lines = run("slow rank", tmp_path / "run", 60, ranks=2)
    assert found["slow rank"].startswith("Rank 1 computes ")
    steps = [each for each in lines if "loss" in each]
    waits = [each["phase_seconds"]["gradient wait"] for each in steps[5:]]
    assert sorted(waits)[len(waits) // 2] > 0.01  # the first rank waits for the other


def test_a_processor_that_others_take(tmp_path):
    cores = len(os.sched_getaffinity(0))
    began = threading.Event()
    burning = []

    def burn():
        while not (tmp_path / "run" / "metrics.jsonl").exists() or (
            (tmp_path / "run" / "metrics.jsonl").read_text().count('"loss"') < 30
        ):
            time.sleep(0.05)
        burning.extend(subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores))
        began.set()

    threading.Thread(target=burn, daemon=True).start()
    try:
        found, _ = run("none", tmp_path / "run", 150)
    finally:
        for each in burning:
            each.kill()
    assert began.is_set()
    assert "other processes take " in found["others on the processor"]


@pytest.mark.slow
def test_clean_runs_have_no_finding(tmp_path):
    """Of ten runs; others on the processor are said where there are any, which is no false alarm."""
    for number in range(10):
        found, _ = run("none", tmp_path / f"run{number}", 120)
        found.pop("others on the processor", None)
        assert not found, (number, found)
    found, _ = run("deep", tmp_path / "deep", 60)
    found.pop("others on the processor", None)
    assert not found
