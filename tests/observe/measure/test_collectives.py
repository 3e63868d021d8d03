import json
import os
import subprocess
import sys

import pytest
import torch

from trainledger.observe.measure.collectives import measure_collectives
from trainledger.spec.calibration import COLLECTIVES
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.process


def test_every_collective_runs_over_every_group():
    told = []
    found = measure_collectives(
        3, "gloo", sizes=[1200, 12000], block_seconds=0.002, tell=lambda share, name: told.append(share)
    )
    expected = [
        (name, ranks, nbytes // 4 // ranks * ranks * 4)
        for ranks in (2, 3)
        for name in COLLECTIVES
        for nbytes in (1200, 12000)
    ]
    assert [(each.name, each.ranks, each.nbytes) for each in found] == expected
    assert all(each.seconds > 0 and each.backend == "gloo" for each in found)
    assert told == sorted(told)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() > 8, reason="there are as many GPUs")
def test_nccl_without_a_gpu_for_each_rank_is_a_sentence():
    with pytest.raises(InvalidInput, match="nccl takes a GPU for each, and this machine has"):
        measure_collectives(9, "nccl")


def test_more_ranks_than_cores_and_memory_serve_are_not_started():
    with pytest.raises(
        InvalidInput, match=r"--ranks = 100000: each is a process with 0\.5 GiB of memory, and 8 share a"
    ):
        measure_collectives(100_000, "gloo")


def test_the_verb_prints_bus_bandwidths_and_fits(tmp_path):
    command = [sys.executable, "-m", "trainledger", "measure", "collectives", "--json", "--html", "found.html"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gathered = next(each for each in found["times"] if each["name"] == "all_gather")
    assert gathered["bus_bytes_per_second"] == pytest.approx(gathered["nbytes"] / gathered["seconds"] / 2)
    assert [each["name"] for each in found["fits"]] == list(COLLECTIVES)
    assert "Bus bandwidth over the bytes" in (tmp_path / "found.html").read_text()
