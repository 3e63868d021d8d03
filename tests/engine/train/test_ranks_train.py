"""Runs on several real processes (gloo): the same losses and weights as one process, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import train_on_ranks
from spread_runs import told, train_all, train_alone, train_each, weights
from tiny_run import TINY

from trainledger.engine.nn.weights import read_weights
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints, damage, model_files, read_facts
from trainledger.spec.optimizers import IMPLEMENTATIONS

# A vocabulary and widths that no number of ranks divides evenly where torch allows it; tied embeddings.
FIELDS: dict[str, Any] = {"steps": 12, "global_batch": 8, "micro_batch": 1, "checkpoints.every": 4}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "replicas": {"replicate": 2},
        "shards": {"shard": 2},
        "shards that stay gathered": {"shard": 2, "reshard_after_forward": False},
        "tensor": {"tensor": 2},
        "tensor and sequence": {"tensor": 2, "sequence_parallel": True},
    },
    4: {
        "replicas of shards": {"replicate": 2, "shard": 2},
        "shards of tensor ranks": {"shard": 2, "tensor": 2},
        "four shards": {"shard": 4},
    },
}
NAMES = [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts]
# One layout of two processes runs in `make test`, all in `make test-all`.
EACH = pytest.mark.parametrize(
    ("ranks", "name"),
    [pytest.param(*each, marks=[] if each == (2, "shards") else [pytest.mark.process], id=each[1]) for each in NAMES],
)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_lines(run_dir / "metrics.jsonl"))


def compare(where: Path, name: str, fields: dict[str, Any]) -> None:
    """Losses, gradient norms and final weights of a layout's run are those of one process."""
    assert told(where / name, "loss") == pytest.approx(told(where / "alone", "loss"), rel=1e-5)
    alone, spread = (weights(where / each, fields) for each in ("alone", name))
    assert alone.keys() == spread.keys()
    for each in alone:
        # Adam divides a gradient by its own size: where that is rounding, so is the direction of an update of 1e-2.
        torch.testing.assert_close(
            spread[each], alone[each], rtol=1e-3, atol=5e-4, msg=lambda said, name=each: f"{name}: {said}"
        )
    norms = [[line["grad_norm"] for line in metrics(where / each) if "loss" in line] for each in ("alone", name)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def trained(folder: Path, request: pytest.FixtureRequest) -> Path:
    """The runs of as many ranks as the test has, made once."""
    ranks = request.node.callspec.params["ranks"] if hasattr(request.node, "callspec") else 2
    if not (folder / "alone").exists():
        train_alone(folder, FIELDS)
    if not (folder / next(iter(LAYOUTS[ranks]))).exists():
        train_each(folder, ranks, LAYOUTS[ranks], FIELDS)
    return folder


@pytest.mark.slow
def test_losses_and_weights_of_fifty_steps_are_those_of_one_process(tmp_path: Path) -> None:
    fields = FIELDS | {"steps": 50, "checkpoints.every": 50}
    train_all(tmp_path, LAYOUTS, fields)
    for _, name in NAMES:
        compare(tmp_path, name, fields)


@EACH
@pytest.mark.long
def test_losses_and_weights_are_those_of_one_process(trained: Path, ranks: int, name: str) -> None:
    compare(trained, name, FIELDS)


@pytest.mark.process
def test_dropout_of_data_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    fields, layouts = FIELDS | {"steps": 4, "dropout": 0.2}, LAYOUTS[2]
    spread = {name: layouts[name] for name in ("replicas", "shards")}
    train_all(tmp_path, {2: spread}, fields)
    for name in spread:
        compare(tmp_path, name, fields)


@pytest.mark.long
@EACH
def test_every_rank_writes_its_part_and_no_other(trained: Path, ranks: int, name: str) -> None:
    newest = all_checkpoints(trained / name)[-1]
    assert damage(newest) is None
    assert len(list(newest.glob("model-*.safetensors"))) == ranks
    stored = sum(each.stat().st_size for each in newest.glob("*.safetensors"))
    alone = sum(each.stat().st_size for each in all_checkpoints(trained / "alone")[-1].glob("*.safetensors"))
    assert stored == pytest.approx(alone, abs=16_000 * ranks)  # the headers of the files
    by_torch, ours = weights(trained / name, FIELDS), read_weights(TINY, *model_files(newest))
    for parameter, value in ours.named_parameters():
        assert torch.equal(value, by_torch[parameter])


@pytest.mark.process
def test_a_run_goes_on_on_other_numbers_of_ranks(trained: Path, tmp_path: Path) -> None:
    """1 -> 2 -> 4 -> 2 tensor ranks -> 1: each told to stop, each resumed by the next."""
    where = str(tmp_path / "run")
    common = {"dir": where, "fields": FIELDS, "resume": True}
    stages = [
        ({"stop_after": 2}, 1), ({"layout": {"shard": 2}, "stop_after": 5}, 2),
        ({"layout": {"replicate": 2, "shard": 2}, "stop_after": 7}, 4),
        ({"layout": {"tensor": 2}, "stop_after": 10}, 2), ({}, 1),
    ]  # fmt: skip
    for stage, ranks in stages:
        codes = train_on_ranks(tmp_path, [common | stage], ranks)
        assert codes == [[143 if "stop_after" in stage else 0] * ranks]
        if "stop_after" in stage:
            # Several ranks agree once a step: a signal that comes after that stops them a step later.
            assert read_facts(all_checkpoints(Path(where))[-1])["step"] == stage["stop_after"] + (ranks > 1)
    assert told(Path(where), "loss") == pytest.approx(told(trained / "alone", "loss"), rel=1e-5)


@pytest.mark.process
def test_a_resumed_run_of_ranks_ends_with_the_same_bits(trained: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("shards", "tensor and sequence", "replicas"):
        common = {"dir": str(tmp_path / name), "layout": LAYOUTS[2][name], "fields": FIELDS}
        runs += [common | {"stop_after": 5}, common | {"resume": True}]
    assert train_on_ranks(tmp_path, runs, 2) == [[143, 143], [0, 0]] * 3
    for name in ("shards", "tensor and sequence", "replicas"):
        one, other = (all_checkpoints(where / name)[-1] for where in (trained, tmp_path))
        for file in [*one.glob("model*"), *one.glob("optimizer*")]:
            assert (other / file.name).read_bytes() == file.read_bytes(), f"{name}: {file.name}"


@pytest.mark.process
@pytest.mark.parametrize("name", ["shards", "replicas"])
@pytest.mark.parametrize("loss", ["full", "compiled"])
def test_resumed_and_metered_compiled_ranks_end_with_the_same_bits(name: str, loss: str, tmp_path: Path) -> None:
    fields = FIELDS | {"steps": 9, "compile": True, "loss": loss}
    common = {"layout": LAYOUTS[2][name], "fields": fields, "metered": True}
    parts = common | {"dir": str(tmp_path / "parts")}
    runs = [common | {"dir": str(tmp_path / "whole")}, parts | {"stop_after": 5}, parts | {"resume": True}]
    runs.append({**common, "dir": str(tmp_path / "unmetered"), "metered": False})
    assert train_on_ranks(tmp_path, runs, 2) == [[0, 0], [143, 143], [0, 0], [0, 0]]
    whole, *others = (all_checkpoints(tmp_path / each)[-1] for each in ("whole", "parts", "unmetered"))
    for other in others:
        for file in [*whole.glob("model*"), *whole.glob("optimizer*")]:
            assert (other / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.process
def test_what_one_process_only_trains_is_refused_on_all_ranks(tmp_path: Path) -> None:
    refused = [
        {"dir": str(tmp_path / "a"), "layout": {"shard": 2}, "fields": {"optimizer": "adafactor"}},
        {"dir": str(tmp_path / "b"), "layout": {"tensor": 2}, "fields": {"dropout": 0.1}},
        {"dir": str(tmp_path / "c"), "layout": {"shard": 4}},
    ]
    assert train_on_ranks(tmp_path, refused, 2) == [[2, 2]] * 3


@pytest.mark.process
def test_every_optimizer_trains_on_shards_or_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """PyTorch's fused kernels but for Adam's take no parts of parameters."""
    fields = FIELDS | {"steps": 2, "checkpoints.every": 2}
    asked = [(kind, way) for kind, ways in IMPLEMENTATIONS.items() for way in ways]
    runs = [
        {"dir": str(tmp_path / f"{kind}-{way}"), "layout": {"shard": 2},
         "fields": fields | {"optimizer": kind, "optimizer.implementation": way}}
        for kind, way in asked
    ]  # fmt: skip
    ends = dict(zip(asked, train_on_ranks(tmp_path, runs, 2), strict=True))
    refused = {each for each in asked if each[0] in ("adafactor", "adamw-8bit", "adam-8bit")}
    refused |= {(kind, "fused") for kind in ("sgd", "momentum", "nesterov", "adagrad")}
    assert ends == {each: [2, 2] if each in refused else [0, 0] for each in asked}
