import json
import os
import subprocess
import sys

import pytest

from trainledger.engine.data.mixture import open_mixture
from trainledger.observe.measure.loader import (
    AHEAD,
    BYTES_VOCABULARY,
    RANKS,
    READ,
    TOKENIZE,
    loader_tokens_per_second,
    made_run,
    measure_loader,
)
from trainledger.spec.calibration import Calibration, KernelTime, write_calibration
from trainledger.spec.units import KIB


def test_made_text_is_that_long_and_has_sequences_on_both_sides(tmp_path):
    run = made_run(tmp_path, 400 * KIB)
    mixture = open_mixture(run.data, vocab_size=BYTES_VOCABULARY, progress=False)
    (source,) = mixture.sources
    tokens = source.store.train.tokens + source.store.validation.tokens
    assert tokens == pytest.approx(400 * KIB, rel=0.15)
    mixture.check_lengths(run.recipe.seq_len)


def test_each_way_of_reading_is_timed():
    found = measure_loader(text_nbytes=300 * KIB, seconds=0.03, workers=[0], ranks=[])
    assert [(each.what, each.workers) for each in found.times] == [(TOKENIZE, 0), (READ, 1), (AHEAD, 1)]
    batch = found.global_batch * found.seq_len
    assert all(each.tokens % batch == 0 and each.tokens > 0 and each.seconds > 0 for each in found.times[1:])


def test_the_calibrations_rate_is_one_of_reading_ahead():
    assert loader_tokens_per_second(300 * KIB, 0.03) > 1e5  # a step of a small model takes a hundredth of that


@pytest.mark.process
def test_ranks_read_at_once(tmp_path):
    run = made_run(tmp_path, 300 * KIB)
    found = measure_loader(run, seconds=0.03, ranks=[2, 5])
    assert [(each.what, each.workers) for each in found.times] == [(READ, 1), (AHEAD, 1), (RANKS, 2)]
    assert "12 sequences cannot be divided evenly among 5 ranks" in found.notes


RUN = """
[model]
vocab_size = 257
d_model = 16
n_layers = 1
max_seq_len = 16
attention.n_heads = 2
feed_forward.d_ff = 32
[recipe]
seq_len = 16
global_batch = 6
steps = 2
[data]
path = ["text.jsonl"]
"""


def _kernel(kind, phase=""):
    return KernelTime(kind=kind, dtype="fp32", shape=(8, 8, 8), flops=10**4, nbytes=10**4, seconds=1e-5, phase=phase)


@pytest.mark.process
def test_the_loader_of_a_run_is_set_against_what_its_steps_take(tmp_path):
    kernels = (_kernel("matmul"), _kernel("attention"), _kernel("attention", "backward"), _kernel("copy"))
    machine = Calibration(
        title="a machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=1, kernels=kernels
    )
    write_calibration(machine, tmp_path / "machine.toml")
    with open(tmp_path / "text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"{each}: to be or not to be " * 20}) + "\n" for each in range(200))
    (tmp_path / "run.toml").write_text(RUN)
    found = asked(tmp_path, "run.toml", "--json")
    assert found["data"] == "the run's data"
    assert found["needed_tokens_per_second"] > 0


def asked(folder, *words):
    command = [sys.executable, "-m", "trainledger", "measure", "loader", *words]
    environment = os.environ | {"TRAINLEDGER_CALIBRATION": str(folder / "machine.toml")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
