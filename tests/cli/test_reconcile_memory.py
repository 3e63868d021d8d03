"""`reconcile --memory` as a person types it: text, JSON, a page, and what is refused."""

import json
from pathlib import Path

import pytest

from trainledger.cli import main

SNAPSHOT = Path(__file__).parents[1] / "observe" / "profiler" / "snapshots" / "h200_gpt2_two_steps.pickle.gz"
RUN = """
[model]
preset = "gpt2"
[recipe]
seq_len = 1024
global_batch = 8
steps = 1
precision = "bf16-mixed"
[cluster]
device = "h200"
"""


def test_a_snapshot_beside_the_forecast_of_its_run(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(RUN)
    words = ["reconcile", "--memory", str(SNAPSHOT), "--run", str(tmp_path / "run.toml")]
    assert main([*words, "--html", str(tmp_path / "memory.html")]) == 0
    said = capsys.readouterr().out
    assert "parameters            497.8 MB   497.8 MB           0" in said
    assert "activations           3.311 GB   3.311 GB           0" in said
    page = (tmp_path / "memory.html").read_text()
    assert "optimizer state" in page
    assert "<script" not in page


def test_json(capsys):
    assert main(["reconcile", "--memory", str(SNAPSHOT), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["by_category"].values()) == found["nbytes"] == 9_814_148_568


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--against", "x"), "cannot be combined with --against"),
        (("--trace", "x"), "cannot be combined with --trace"),
        (("--set", "recipe.seq_len=8"), "changes a field of the run; name it with --run"),
    ],
)
def test_what_is_refused(words, sentence, capsys):
    assert main(["reconcile", "--memory", str(SNAPSHOT), *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_none(tmp_path, capsys):
    (tmp_path / "x.pickle").write_bytes(b"nothing")
    assert main(["reconcile", "--memory", str(tmp_path / "x.pickle")]) == 2
    assert "is no pickle of plain data" in " ".join(capsys.readouterr().err.split())
