"""Runs of Megatron-LM on the command line: planned from a script or a launch line, and written as a run file."""

import json
from pathlib import Path

import pytest

import trainledger as tl
from trainledger.cli import main

SCRIPT = """#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-2}
MODEL=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --normalization RMSNorm --swiglu
  --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256
  --attention-dropout 0.0 --hidden-dropout 0.0)
RUN=(--micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 1e-4 --min-lr 1e-5 --bf16 --use-new-thing 3)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py ${MODEL[@]} ${RUN[@]} \\
  --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --save $(date)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_a_script_is_planned(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(script), "--device", "h100-sxm", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["run"]["layout"]["shard"] == 8
    assert plan["run"]["layout"]["zero"] == 1
    assert plan["run"]["recipe"]["framework"] == "megatron-core"
    assert main(["plan", str(script), "--device", "h100-sxm", "--count", "64", "--full"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "64 x h100-sxm" in text
    assert "Not understood: --use-new-thing." in text
    assert "Transformer Engine workspace" in text


def test_a_launch_line_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 "
        "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --bf16"
    )
    assert main(["plan", line, "--device", "a100-sxm-80gb"]) == 0
    assert "(124.5M) on 8 x a100-sxm-80gb, DP 8: 32 sequences" in capsys.readouterr().out


def test_a_run_file_is_written_of_it(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path), "--from", str(script), "--count", "32"]) == 0
    assert "not understood: --use-new-thing" in capsys.readouterr().out
    run = tl.load(path)
    assert run == tl.load(str(script), {"cluster.count": 32})
    assert (run.cluster.count, run.layout.shard, run.model.n_layers) == (32, 16, 32)


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = {shard}
tensor_parallel_degree = {tensor}
"""
AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 2\nsequence_len: 4096\nbf16: true\n"


@pytest.mark.parametrize(("shard", "tensor", "devices"), [(-1, 2, 2), (2, 1, 2), (-1, 1, 1), (4, 2, 8), (0, 0, 1)])
@pytest.mark.parametrize("count", [None, 16])
def test_a_run_file_of_another_trainers_file_is_the_run_that_is_planned_and_is_said(
    shard: int, tensor: int, devices: int, count: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = tmp_path / ("titan.toml" if tensor else "axolotl.yml"), tmp_path / "run.toml"
    source.write_text(TITAN.format(shard=shard, tensor=tensor) if tensor else AXOLOTL)
    if count and shard > 1:
        count = devices
    given = [] if count is None else ["--count", str(count)]
    assert main(["init", str(path), "--from", str(source), *given]) == 0
    said = capsys.readouterr().out
    with pytest.warns(UserWarning, match="assuming"):
        planned = tl.load(str(source), {} if count is None else {"cluster.count": count})
    assert tl.load(path) == planned
    assert planned.cluster.count == count or devices
    assert f"{planned.recipe.precision.kind}, {planned.recipe.optimizer.kind}" in said.splitlines()[1]
    assert (f"{devices} device" in said and "--count N gives others" in said) == (count is None)
    assert planned.origin.assumed
    assert all(name in said for name in planned.origin.assumed)


RESERVED = {
    "pretrain.sh": (SCRIPT, ["--use-new-thing"]),
    "titan.toml": (
        TITAN.format(shard=1, tensor=2) + "[compile]\nenable = true\n",
        ["the loss is counted of all logits at once"],
    ),
    "axolotl.yml": (
        AXOLOTL + "adapter: lora\nlora_r: 16\nnum_epochs: 3\nnew_key: 3\n",
        ["PEFT keeps them in fp32", "3 epochs of data of a size that is not known", "not understood: new_key"],
    ),
    "plain.yml": (AXOLOTL + "max_steps: 10\n", []),
}


@pytest.mark.parametrize("verb", ["plan", "fits", "breaks", "advise"])
@pytest.mark.parametrize("name", RESERVED)
def test_what_changes_the_numbers_of_a_file_is_said_without_full(
    name: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(RESERVED[name][0])
    main([verb, str(tmp_path / name), "--device", "h100-sxm", *(["--along", "batch"] if verb == "breaks" else [])])
    said = " ".join(capsys.readouterr().err.split())
    assert all(reservation in said for reservation in RESERVED[name][1])
    assert ("As read: " in said) == bool(RESERVED[name][1])
    assert "defaults of" not in said


def test_the_engine_asks_for_a_run_file(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(script)]) == 2
    assert f"trainledger init run.toml --from {script}" in capsys.readouterr().err


def test_the_wrong_number_of_devices_is_refused(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(script), "--count", "7"]) == 2
    assert "must be a multiple of the 2 devices of a replica" in capsys.readouterr().err


def test_the_engine_does_not_train_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "run.toml"
    line = (
        "pretrain_gpt.py --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --train-iters 1 "
        "--max-position-embeddings 32 --micro-batch-size 1 --vocab-size 256 --attention-backend unfused"
    )
    source = tmp_path / "line.sh"
    source.write_text(line, encoding="utf-8")
    assert main(["init", str(path), "--from", str(source), "--count", "1"]) == 0
    text = tmp_path / "text.txt"
    text.write_text("words " * 1000, encoding="utf-8")
    assert main(["train", str(path), "--set", f"data.path={text}"]) == 2
    assert "the engine trains PyTorch's modules; nearest that works: torch" in capsys.readouterr().err
