"""Kernels that are replayed as CUDA graphs: the step of a device that launches at once, and who says so."""

from dataclasses import replace

import pytest

import trainledger as tl
from trainledger import catalog
from trainledger.forecast.predict.parallel_step import layout_time
from trainledger.ledger.ranks import accounts
from trainledger.spec.convert.megatron import from_arguments, read_arguments
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run


def run_of(count: int = 2, **recipe: object) -> Run:
    fields = {"seq_len": 512, "global_batch": 4, "micro_batch": 1, "steps": 10, "precision": "bf16"}
    return tl.load({
        "model": {"preset": "gpt2"}, "recipe": fields | recipe, "layout": {"replicate": count},
        "cluster": {"device": "h100-sxm", "count": count},
    })  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_of_graphs_is_that_of_a_device_that_launches_in_no_time(count: int) -> None:
    plain, graphs = run_of(count), run_of(count, cuda_graphs=True)
    device = catalog.placed(catalog.device("h100-sxm"), plain.cluster)
    assert device.efficiency is not None
    at_once = replace(device, efficiency=replace(device.efficiency, launch_seconds=0.0))
    replayed = layout_time(accounts(graphs, backend="cuda"), device)
    assert replayed.seconds == layout_time(accounts(plain, backend="cuda"), at_once).seconds
    launched = layout_time(accounts(plain, backend="cuda"), device)
    assert replayed.seconds is not None
    assert launched.seconds is not None
    assert replayed.seconds < launched.seconds / 2  # so small a model waits for its launches
    assert tl.plan(graphs).forecast.step_seconds == pytest.approx(replayed.seconds, rel=0.05)
    assert tl.plan(graphs).forecast.device_nbytes == tl.plan(plain).forecast.device_nbytes


def test_graphs_and_waiting_for_each_launch_exclude_each_other() -> None:
    with pytest.raises(InvalidInput, match="cuda_graphs = true: launches nothing"):
        run_of(cuda_graphs=True, launch_blocking=True)


@pytest.mark.parametrize(
    ("flag", "graphs"),
    [("--enable-cuda-graph", True), ("--cuda-graph-impl local", True), ("--cuda-graph-impl none", None), ("", None)],
)
def test_megatrons_arguments_say_whether_there_are_graphs(flag: str, graphs: bool | None) -> None:
    text = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
        f"--micro-batch-size 1 --bf16 {flag}"
    )
    assert from_arguments(read_arguments(text), devices=1).table["recipe"].get("cuda_graphs") == graphs
