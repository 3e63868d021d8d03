"""Two torchrun agents, as on two machines that share a run's directory: a lost rank of one, a lost machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import commanded
import pytest

from ports import free_ports
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints

pytestmark = pytest.mark.process
STEPS = 40


def machine(folder: Path, port: int) -> subprocess.Popen[str]:
    """What `srun torchrun` of docs/training.md starts on each machine; the first here is the rendezvous' host."""
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "one-run",
        "-m", "trainledger", "train", "run.toml", "--resume-if-begun",
    ]  # fmt: skip
    there = os.environ | {
        "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=folder, env=there, text=True, stdout=pipe, stderr=pipe)


def machines(folder: Path) -> tuple[list[subprocess.Popen[str]], int]:
    (port,) = free_ports(1)
    host = machine(folder, port)
    deadline = time.monotonic() + commanded.SECONDS
    while time.monotonic() < deadline:
        with socket.socket() as other:
            if not other.connect_ex(("localhost", port)):
                return [host, machine(folder, port)], port
        assert host.poll() is None, host.communicate()
        time.sleep(0.1)
    raise AssertionError("no rendezvous")


def ended(both: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        return [commanded.end(each) for each in both]
    finally:
        for each in both:
            each.kill()


def weights(run_dir: Path) -> dict[str, bytes]:
    last = all_checkpoints(run_dir)[-1]
    assert last.name == f"step-{STEPS:08}"
    return {each.name: each.read_bytes() for each in sorted(last.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    commanded.write(folder, layout="shard = 2", ranks=2, steps=STEPS, every=2)
    code, _, err = commanded.end(commanded.start(folder, ranks=2))
    assert code == 0, err
    (run_dir,) = (folder / "runs").iterdir()
    return weights(run_dir)


def test_a_lost_rank_of_one_machine_is_replaced_on_both_and_the_run_has_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    commanded.write(tmp_path / "run", layout="shard = 2", ranks=2, steps=STEPS, every=2)
    both, _ = machines(tmp_path / "run")
    run_dir = commanded.until_step(tmp_path / "run", 5, both[0])
    os.kill(commanded.children(both[1])[0], signal.SIGKILL)
    for code, _, err in ended(both):
        assert code == 0, err
    assert weights(run_dir) == undisturbed
    assert any(each.get("event") == "resume" for each in read_lines(run_dir / "metrics.jsonl"))


def test_a_machine_that_is_taken_away_and_one_that_comes_for_it(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """As Kubernetes moves a pod: SIGTERM to one agent; the other waits, and goes on with the new one."""
    commanded.write(tmp_path / "run", layout="shard = 2", ranks=2, steps=STEPS, every=1000)
    (host, other), port = machines(tmp_path / "run")
    run_dir = commanded.until_step(tmp_path / "run", 3, host)
    other.send_signal(signal.SIGTERM)
    ((code, _, _),) = ended([other])
    assert code != 0
    assert 3 <= int(all_checkpoints(run_dir)[-1].name.removeprefix("step-")) < STEPS
    for code, _, err in ended([host, machine(tmp_path / "run", port)]):
        assert code == 0, err
    assert weights(run_dir) == undisturbed


def test_a_signal_to_both_machines_ends_them_saved_and_the_same_command_goes_on(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """As SLURM ends a job."""
    commanded.write(tmp_path / "run", layout="shard = 2", ranks=2, steps=STEPS, every=1000)
    both, _ = machines(tmp_path / "run")
    run_dir = commanded.until_step(tmp_path / "run", 3, both[0])
    for each in both:
        each.send_signal(signal.SIGTERM)
    assert all(code for code, _, _ in ended(both))
    assert 3 <= int(all_checkpoints(run_dir)[-1].name.removeprefix("step-")) < STEPS
    for code, _, err in ended(machines(tmp_path / "run")[0]):
        assert code == 0, err
    assert weights(run_dir) == undisturbed
