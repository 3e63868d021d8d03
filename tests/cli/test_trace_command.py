"""The verb that sets the trace of a run beside its closed form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainledger.api import load
from trainledger.cli import main
from trainledger.ledger.step import account
from trainledger.ledger.store import read_ledger
from trainledger.report.agreement import Row, agree, compare, difference, split, text

RUN = """
[model]
vocab_size = 256
d_model = 32
n_layers = 2
n_heads = 4
d_ff = 64
max_seq_len = 32
[recipe]
seq_len = 32
global_batch = 4
micro_batch = 2
steps = 10
precision = "bf16-mixed"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return str(path)


def test_all_is_equal(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", run_file, "--by", "path"]) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    for name in ("parameters", "FLOPs, matmul", "FLOPs, attention", "model FLOPs", "kept for backward", "peak memory"):
        assert lines[name].endswith("equal"), lines[name]
    for name in ("- gradients", "- optimizer state", "layers.*.mlp.up_proj", "outside the model"):
        assert name in lines
    assert max(len(line) for line in out.splitlines()) <= 80


def test_json(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", run_file, "--json", "--by", "phase", "--set", "recipe.activation_checkpointing=full"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {each["name"]: each for each in told["rows"] if not each["part_of"]}
    parts = [each for each in told["rows"] if each["part_of"] == "peak memory"]
    assert sum(each["traced"] for each in parts) == rows["peak memory"]["traced"]
    assert told["equal"] is True
    assert told["uncounted"] == {}
    assert rows["parameters"]["predicted"] == rows["parameters"]["traced"] == account(load(run_file)).parameters
    assert [each["name"] for each in told["by"]] == ["forward", "backward", "recompute", "other", "clip", "optimizer"]


def test_the_traced_ledger_can_be_kept(run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "traced.json.gz"
    assert main(["trace", run_file, "--output", str(kept)]) == 0
    assert read_ledger(kept).matmul_flops == account(load(run_file)).matmul_flops


def test_wrong_input_is_told_before_anything_is_traced(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", run_file, "--set", "model.n_heads=5"]) == 2
    assert "model.n_heads" in capsys.readouterr().err
    assert main(["trace", run_file, "--by", "colour"]) == 2


def test_ledgers_that_differ_do_not_agree(run_file: str) -> None:
    predicted = account(load(run_file))
    other = account(load(run_file, {"model.d_ff": 65}))
    assert agree(compare(predicted, predicted))
    rows = compare(predicted, other)
    assert not agree(rows)
    by_name = {each.name: each for each in rows if not each.part_of}
    assert by_name["parameters"].difference == 2 * 3 * 32
    assert by_name["FLOPs, attention"].difference == 0
    assert "+192" in text(rows)


def test_a_difference_that_may_be(run_file: str) -> None:
    rows = [Row("peak memory", "nbytes", 1000, 1010), Row("parameters", "count", 5, 5, exact=True)]
    assert agree(rows)
    assert [difference(each) for each in rows] == ["+10 B (+1 %)", "equal"]


def test_by_category_is_each_at_its_most(run_file: str) -> None:
    ledger = account(load(run_file))
    rows = {each.name: each.predicted for each in split(ledger, ledger, "category")}
    peak = ledger.peak().by_category
    assert all(rows[name] >= nbytes for name, nbytes in peak.items())
    assert rows["gradients"] == 4 * ledger.parameters
