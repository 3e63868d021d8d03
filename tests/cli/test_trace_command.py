"""The verb that sets the trace of a run beside its closed form."""

import json
import sys
from pathlib import Path

import pytest

from trainledger.answers.load import load
from trainledger.answers.pages.agreement import Row, agree, compare, difference, split, table_of
from trainledger.answers.pages.traced import split as traced_split
from trainledger.cli import main
from trainledger.ledger.ledger import read_ledger
from trainledger.ledger.step import account

RUN = """
[model]
vocab_size = 256
d_model = 32
n_layers = 2
attention.n_heads = 4
feed_forward.d_ff = 64
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


def test_compiled_blocks_are_counted_as_the_eager_ones_that_are_traced(run_file, capsys):
    assert main(["trace", run_file, "--json", "--set", "recipe.compile=true"]) == 0
    compiled = json.loads(capsys.readouterr().out)
    assert main(["trace", run_file, "--json"]) == 0
    assert compiled["rows"] == json.loads(capsys.readouterr().out)["rows"]


def test_json(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", run_file, "--json", "--by", "phase", "--set", "recipe.activation_checkpointing=full"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {each["name"]: each for each in answer["rows"] if not each["part_of"]}
    parts = [each for each in answer["rows"] if each["part_of"] == "peak memory"]
    assert sum(each["traced"] for each in parts) == rows["peak memory"]["traced"]
    assert answer["equal"] is True
    assert answer["uncounted"] == {}
    assert answer["run"]["recipe"]["activation_checkpointing"]["kind"] == "full"
    assert answer["run"]["assumed"] == []
    assert rows["parameters"]["predicted"] == rows["parameters"]["traced"] == account(load(run_file)).parameters
    assert [each["name"] for each in answer["by"]] == ["forward", "backward", "recompute", "other", "clip", "optimizer"]


def test_the_traced_ledger_can_be_kept(run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "traced.json.gz"
    assert main(["trace", run_file, "--output", str(kept)]) == 0
    assert read_ledger(kept).matmul_flops == account(load(run_file)).matmul_flops


def test_wrong_input_is_reported_before_anything_is_traced(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", run_file, "--set", "model.attention.n_heads=5"]) == 2
    assert "model.attention.n_heads" in capsys.readouterr().err
    assert main(["trace", run_file, "--by", "colour"]) == 2


def test_ledgers_that_differ_do_not_agree(run_file: str) -> None:
    predicted = account(load(run_file))
    other = account(load(run_file, {"model.feed_forward.d_ff": 65}))
    assert agree(compare(predicted, predicted))
    rows = compare(predicted, other)
    assert not agree(rows)
    by_name = {each.name: each for each in rows if not each.part_of}
    assert by_name["parameters"].difference == 2 * 3 * 32
    assert by_name["FLOPs, attention"].difference == 0
    assert "+192" in str(table_of(rows).texts())


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


CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

unknown_size = 3

class Picky(Net):
    def forward(self, x):
        return super().forward(x.repeat_interleave(x.long().flatten()).reshape(-1, 8))
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "traced_net", raising=False)
    (tmp_path / "traced_net.py").write_text(CODE)
    return "traced_net:Net"


def test_code_of_ones_own(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", code, "--input", "fp32[4,8]", "--loss", "mse_loss", "--label", "fp32[4,8]"]
    assert main([*words, "--by", "line", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "traced_net.py:11" in out
    assert main([*words, "--json", "--by", "phase", "-o", "ledger.json.gz"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ledger = read_ledger("ledger.json.gz")
    assert answer["parameters"] == 8 * 32 + 32 + 32 * 8 + 8 == ledger.parameters
    assert answer["model_flops"] == 2 * 4 * 8 * 32 * (2 + 3) == ledger.model_flops  # no gradient of the input
    assert answer["by"]["flops"] == ledger.by("phase")
    assert answer["peak_nbytes"] == ledger.peak().nbytes == sum(answer["peak_by_category"].values())


def test_code_that_cannot_be_followed(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "traced_net:Picky", "--input", "fp32[4,8]", "--loss", "sum"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("PARTIAL: traced_net:Picky: 1 operation traced, then forward ended at traced_net.py:17")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["traced_net:Nett"], "traced_net has no 'Nett'; nearest that works: Net"),
        (
            ["traced_net:Net", "--set", "recipe.micro_batch=2"],
            "changes a field of a run file, which code does not have",
        ),
        (["traced_net:Net", "--grad-accum", "0"], "--grad-accum = '0': must be at least 1"),
        (["traced_net:Net", "--kernels", "tpu"], "--kernels = 'tpu': must be cpu, cuda, sm70, sm90, sm100 or other"),
        (["traced_net:Net", "--autocast", "bf17"], "--autocast = 'bf17': must be a 16-bit floating format"),
        (["traced_net:Net", "--input", "fp32[4,8]"], "nearest that works: --loss cross_entropy --label int64[4], "),
        (["traced_net:unknown_size"], "RUN = 'traced_net:unknown_size': must be a module"),
        (["gpt2", "--input", "fp32[4,8]"], "--input = ('fp32[4,8]',): is for your own code"),
        (["gpt2", "--by", "line"], "--by = 'line': is of your own code"),
        (["--hf", "missing.json"], "--hf = 'missing.json': cannot be read"),
    ],
)
def test_wrong_words(code: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *words]) == 2
    assert sentence in capsys.readouterr().err


PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def main():
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
"""


def test_one_rank_of_many(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traced_program.py").write_text(PROGRAM)
    words = ["trace", "traced_program:main", "--world-size", "64", "--input", "fp32[8,64]", "--loss", "mean"]
    assert main([*words, "--step", "sgd", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == 2 * (64 * 64 + 64) // 64
    sent = {(each["name"], each["phase"], each["ranks"]): each for each in answer["collectives"]}
    assert sent["all_gather", "forward", 64]["times"] == 2
    assert sent["reduce_scatter", "backward", 64]["times"] == 2
    assert sent["all_gather", "forward", 64]["payload"] == 2 * 4 * (64 * 64 + 64)
    assert main([*words, "--rank", "64"]) == 2
    assert "rank = 64" in capsys.readouterr().err
    assert main([*words, "--dtype", "bf16"]) == 2
    assert "--dtype = 'bf16': cannot be given with a world" in capsys.readouterr().err


WARNS = """
import warnings
import torch
from torch import nn

class Model(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)
        warnings.warn("made with care,\\nand told over two lines that are together too long for a terminal")

    def forward(self, x):
        for _ in range(3):
            warnings.warn("ran with care", FutureWarning)
        return super().forward(x)

def never():
    warnings.warn("about to give up")
    raise ValueError("no")
"""


def test_what_the_code_warns_of_stands_behind_the_result_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "warning_model.py").write_text(WARNS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["trace", "warning_model:Model", "--input", "fp32[8,64]", "--loss", "mean"]) == 0
    out, err = capsys.readouterr()
    assert "Warning" not in out
    assert err.splitlines() == [
        "",
        "UserWarning in warning_model.py:9: made with care, and told over two lines that",
        "are together too long for a terminal",
        "FutureWarning in warning_model.py:13: ran with care",
    ]
    assert main(["trace", "warning_model:never", "--input", "fp32[8,64]"]) == 2
    first, *others = capsys.readouterr().err.strip().splitlines()
    assert first == "UserWarning in warning_model.py:17: about to give up"
    assert "ValueError: no" in " ".join(others)


@pytest.mark.parametrize("by", ["kind", "path"])
def test_rows_that_a_table_leaves_out_are_added_up_in_its_last(run_file: str, by: str) -> None:
    ledger = account(load(run_file))
    whole, cut = traced_split(ledger, by, top=10**6), traced_split(ledger, by, top=2)
    assert len(cut.rows) == 3
    assert cut.rows[:2] == whole.rows[:2]
    assert cut.rows[2][0] == f"{len(whole.rows) - 2} more"
    sums = [ledger.flops, *(ledger.total(name) for name in ("read", "written")), ledger.kept_nbytes]
    for table in (whole, cut):
        assert [sum(column) for column in list(zip(*table.rows, strict=True))[1:]] == sums  # type: ignore[arg-type]
