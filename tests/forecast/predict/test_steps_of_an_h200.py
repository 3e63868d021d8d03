"""Eager steps that an H200 took on 2026-11-27: its bytes and FLOPs are the account's, its times those of the forecast.

The figures are those of ``bench/gpu.py``, in ``bench/results``.
"""

import json
from pathlib import Path

import pytest

from trainledger.answers.load import load
from trainledger.catalog import device
from trainledger.forecast.predict.step import step_time
from trainledger.ledger.step import account
from trainledger.spec.calibration import read_calibration
from trainledger.spec.run import Run

RESULTS = Path(__file__).parents[3] / "bench" / "results"
FOUND = json.loads((RESULTS / "gpu-nvidia-h200-2026-11-27.json").read_text(encoding="utf-8"))["rows"]
CALIBRATION = RESULTS / "gpu-nvidia-h200-2026-11-27.calibration.toml"
SIZES = {"gpt2": (1024, 8), "gpt2-medium": (1024, 4), "llama-3.2-1b": (2048, 2)}
WORKSPACES_NBYTES = 2 * 32 * 2**20  # cuBLAS's, of which the caching allocator knows


def run_of(row: dict[str, object]) -> Run:
    seq_len, batch = SIZES[str(row["model"])]
    recipe = {name: row[name] for name in ("precision", "activation_checkpointing")}
    recipe |= {"seq_len": seq_len, "global_batch": batch, "steps": 1}
    return load({"model": {"preset": row["model"]}, "recipe": recipe, "cluster": {"backend": "cuda"}})


@pytest.mark.parametrize("row", FOUND, ids=lambda row: f"{row['model']} {row['precision']}")
def test_its_bytes_and_flops_are_the_accounts(row: dict[str, list[int]]) -> None:
    ledger = account(run_of(row), backend="sm90")
    assert ledger.matmul_flops == row["matmul_flops"][1]
    assert ledger.kept_nbytes == row["kept_nbytes"][1]
    assert ledger.peak().nbytes == row["peak_nbytes"][1]
    beside = row["peak_nbytes"][2] - ledger.peak().nbytes
    assert WORKSPACES_NBYTES < beside < 1.4 * WORKSPACES_NBYTES  # and each tensor's last 512 bytes


@pytest.mark.parametrize(
    "row",
    [each for each in FOUND if each["precision"] == "fp32" or each["model"] == "llama-3.2-1b"],
    ids=lambda row: f"{row['model']} {row['precision']}",
)
def test_steps_that_wait_for_no_program_take_what_is_predicted(row: dict[str, list[float]]) -> None:
    """Small models in bf16 wait for it, and its operations take longer than those of the tiny steps it is timed by."""
    ledger, (_, seconds) = account(run_of(row), backend="sm90"), row["step_seconds"]
    assert step_time(ledger, read_calibration(CALIBRATION)).seconds == pytest.approx(seconds, rel=0.1)
    assert step_time(ledger, device("h200")).seconds == pytest.approx(seconds, rel=0.13)
