"""`train --replicas`: replicas that are killed, that come again and that leave, and the same weights worked out by one
process from the run file and the membership log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import commanded
import pytest
from replayed import replayed
from safetensors.torch import load_file
from torch import Tensor

from trainledger.engine.train.checkpoint import all_checkpoints
from trainledger.engine.train.metrics import read
from trainledger.engine.train.replicas import find_torchft

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is missing: pip install 'trainledger[replicas]'"),
]
LOST = ["--rank-timeout", "60"]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    commanded.end_all()


LATE = "late"  # a file: processes that begin while it is there begin later than a lost heartbeat is noticed
_SLEEPS = f"""
import os, time
if "TRAINLEDGER_REPLICA" in os.environ and os.path.exists("{LATE}"):
    time.sleep(10)
"""


def start(folder: Path, *words: str, steps: int = 100_000) -> subprocess.Popen[str]:
    commanded.write(folder, layout="replicate = 2", ranks=2, steps=steps, every=25)
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(_SLEEPS)
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
    return commanded.start(folder, "--replicas", "2", *LOST, *words, environment={"PYTHONPATH": path})


def took(run_dir: Path) -> list[tuple[int, list[int]]]:
    """The membership log: from which step on which replicas took the steps."""
    return [(each["step"], each["took"]) for each in read(run_dir / "metrics.jsonl") if each.get("event") == "replicas"]


def until_took(run_dir: Path, which: list[int], changes: int, process: subprocess.Popen[str]) -> None:
    """Wait until these replicas take steps, after so many changes."""
    deadline = time.monotonic() + commanded.SECONDS
    while time.monotonic() < deadline:
        found = took(run_dir)
        if len(found) > changes and found[-1][1] == which:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"{took(run_dir)}, and never {which}: {process.communicate()}")


def until_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until this step is taken."""
    commanded.until_step(run_dir.parent.parent, step, process)


def steps_of(run_dir: Path) -> list[int]:
    return [each["step"] for each in read(run_dir / "metrics.jsonl") if "learning_rate" in each]


def stop(run_dir: Path, *processes: subprocess.Popen[str]) -> list[list[int]]:
    """Ask for the end; who took the steps until then: the signals come apart, and one may take a last step alone."""
    which = [each for _, each in took(run_dir)]
    for each in processes:
        each.send_signal(signal.SIGTERM)
    return which


def saved(run_dir: Path) -> tuple[int, dict[str, Tensor]]:
    """The newest checkpoint's step and weights."""
    newest = all_checkpoints(run_dir)[-1]
    return int(newest.name.removeprefix("step-")), load_file(newest / "model.safetensors")


def assert_replayed(folder: Path, run_dir: Path) -> None:
    """One process gets the same weights, bit for bit, from the run file and the membership log."""
    step, weights = saved(run_dir)
    again = replayed(folder / "run.toml", folder / "replayed", took(run_dir), step)
    assert weights.keys() == again.keys()
    worst = {name: (each - again[name]).abs().max().item() for name, each in weights.items()}
    assert not any(worst.values()), (step, took(run_dir), worst)


@pytest.mark.parametrize("killed", [0, 1])
def test_others_go_on_and_the_lost_one_comes_again(tmp_path: Path, killed: int) -> None:
    """Replica 0 holds the run's directory when it is killed, and the other takes it; a stop saves, a resume goes on."""
    process = start(tmp_path)
    run_dir = commanded.until_step(tmp_path, 15, process)
    (tmp_path / LATE).touch()
    os.kill(commanded.replicas(process)[killed], signal.SIGKILL)
    until_took(run_dir, [0, 1], changes=2, process=process)
    until_step(run_dir, took(run_dir)[-1][0] + 5, process)
    assert stop(run_dir, process) == [[0, 1], [1 - killed], [0, 1]]
    code, _, err = commanded.end(process)
    assert code == 143, err
    assert f"Replica {killed} was ended by SIGKILL and is started again; the run goes on with replica" in err
    steps = steps_of(run_dir)
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    assert saved(run_dir)[0] == len(steps), "a stop saves"
    assert commanded.state_of(run_dir)["state"] == "interrupted"
    assert_replayed(tmp_path, run_dir)


@pytest.mark.parametrize("killed", [0, 1])
def test_one_that_comes_again_before_the_others_miss_it(tmp_path: Path, killed: int) -> None:
    process = start(tmp_path)
    run_dir = commanded.until_step(tmp_path, 15, process)
    os.kill(commanded.replicas(process)[killed], signal.SIGKILL)
    until_step(run_dir, steps_of(run_dir)[-1] + 300, process)  # longer than it takes to come
    assert stop(run_dir, process)[-1] == [0, 1]
    assert commanded.end(process)[0] == 143
    steps = steps_of(run_dir)
    assert steps == list(range(1, len(steps) + 1))
    assert_replayed(tmp_path, run_dir)


def test_a_run_ends_well_without_a_replica_that_is_not_started_again(tmp_path: Path) -> None:
    process = start(tmp_path, "--restarts", "0", steps=60)
    run_dir = commanded.until_step(tmp_path, 15, process)
    os.kill(commanded.replicas(process)[0], signal.SIGKILL)
    code, out, err = commanded.end(process)
    assert code == 0, err
    assert "validation loss" in out
    assert [each for _, each in took(run_dir)] == [[0, 1], [1]]
    assert steps_of(run_dir) == list(range(1, 61))
    assert commanded.state_of(run_dir)["state"] == "finished"
    assert_replayed(tmp_path, run_dir)


def test_one_that_is_asked_to_leave_leaves_and_a_resume_goes_on_after_a_stop(tmp_path: Path) -> None:
    process = start(tmp_path)
    run_dir = commanded.until_step(tmp_path, 15, process)
    os.kill(commanded.replicas(process)[0], signal.SIGTERM)
    until_took(run_dir, [1], changes=1, process=process)
    until_step(run_dir, took(run_dir)[-1][0] + 5, process)
    process.send_signal(signal.SIGTERM)
    code, _, err = commanded.end(process)
    assert code == 143, err
    assert "This replica leaves after step" in err
    process = start(tmp_path, "--resume")
    until_step(run_dir, saved(run_dir)[0] + 5, process)
    assert stop(run_dir, process) == [[0, 1], [1], [0, 1]]
    assert commanded.end(process)[0] == 143
    assert steps_of(run_dir) == list(range(1, saved(run_dir)[0] + 1))
    assert_replayed(tmp_path, run_dir)


def test_all_killed_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path)
    run_dir = commanded.until_step(tmp_path, 30, process)
    for each in commanded.replicas(process).values():
        os.kill(each, signal.SIGKILL)
    until_step(run_dir, 35, process)
    process.send_signal(signal.SIGTERM)
    code, _, err = commanded.end(process)
    assert code == 143, err
    assert any(each.get("event") == "resume" for each in read(run_dir / "metrics.jsonl"))
    steps = steps_of(run_dir)
    assert steps == list(range(1, len(steps) + 1))
    assert_replayed(tmp_path, run_dir)


def test_a_run_that_diverges_is_not_started_again(tmp_path: Path) -> None:
    process = start(tmp_path, "--set", "recipe.learning_rate=1e30", "--set", "recipe.grad_clip=none")
    code, _, err = commanded.end(process)
    assert code == 3, err
    assert err.count("is not finite") + err.count("not finite") >= 1
    assert "is started again" not in err


@contextmanager
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse of its own, as machines have one together."""
    find_torchft()  # which quietens it
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=5000)
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def machine(folder: Path, replica: int, address: str, *words: str) -> subprocess.Popen[str]:
    """One of two machines that share the run's directory, each with one replica."""
    own = ["--replicas", "1", "--first-replica", str(replica), "--resume-if-begun", *LOST, *words]
    return commanded.start(folder, *own, environment={"TORCHFT_LIGHTHOUSE": address})


def test_a_machine_that_is_lost_comes_again(tmp_path: Path) -> None:
    with lighthouse() as address:
        commanded.write(tmp_path, layout="replicate = 2", ranks=2, every=25)
        lost, stays = machine(tmp_path, 0, address), machine(tmp_path, 1, address)
        run_dir = commanded.until_step(tmp_path, 5, lost)
        until_took(run_dir, [0, 1], changes=0, process=stays)
        replica = commanded.replicas(lost)[0]
        lost.kill()
        os.kill(replica, signal.SIGKILL)
        until_took(run_dir, [1], changes=1, process=stays)
        again = machine(tmp_path, 0, address)
        until_took(run_dir, [0, 1], changes=2, process=again)
        stop(run_dir, again, stays)
        assert [commanded.end(each)[0] for each in (again, stays)] == [143, 143]
    steps = steps_of(run_dir)
    assert steps == list(range(1, len(steps) + 1))
    assert_replayed(tmp_path, run_dir)


def test_a_replica_of_another_run_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    """Somebody starts a machine with another learning rate under the same lighthouse."""
    with lighthouse() as address:
        commanded.write(tmp_path, layout="replicate = 2", ranks=2, every=25)
        stays = machine(tmp_path, 1, address)
        run_dir = commanded.until_step(tmp_path, 5, stays)
        other = machine(tmp_path, 0, address, "--set", "recipe.learning_rate=1e-3")
        code, _, err = commanded.end(other)
        assert code == 2, err
        assert "run file: is" in err
        until_step(run_dir, steps_of(run_dir)[-1] + 5, stays)
        stays.send_signal(signal.SIGTERM)
        assert commanded.end(stays)[0] == 143
    assert [each for _, each in took(run_dir)] == [[1]]
