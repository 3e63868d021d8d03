"""The published runs most like a run: what is compared, what each difference adds, and where nothing is found."""

from dataclasses import fields
from typing import Any

import pytest

import trainledger as tl
from trainledger import catalog
from trainledger.forecast.plan.published import FARTHEST, PublishedRun, Resemblance, nearest

# Row R0002, torchtitan's Llama 3 8B on eight H100.
TITAN: dict[str, dict[str, Any]] = {
    "model": {"preset": "llama-3-8b"},
    "recipe": {
        "seq_len": 8192, "global_batch": 16, "micro_batch": 2, "steps": 1, "precision": "bf16-sharded",
        "activation_checkpointing": "selective",
    },
    "layout": {"shard": 8},
    "cluster": {"device": "h100-sxm-96gb-500w", "count": 8},
}  # fmt: skip
ALL = 10**4


def run_of(*changes: str) -> tl.Run:
    return tl.load(TITAN, list(changes))


def of_row(found: tuple[Resemblance, ...], row: str) -> Resemblance:
    return next(each for each in found if each.published.id == row)


def test_a_published_run_is_at_distance_0_of_itself() -> None:
    first = nearest(run_of())[0]
    assert (first.published.id, first.distance) == ("R0002", 0)
    assert first.differs == "the same in all that is compared"
    assert first.published.source.startswith("pytorch/torchtitan")
    assert first.published.tokens_per_second_per_device == 6667
    assert first.published.step_seconds == pytest.approx(16 * 8192 / 8 / 6667, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "distance", "differs"),
    [
        (["layout.shard=16", "cluster.count=16", "recipe.global_batch=32"], 1, "0.5 times the devices"),
        (["recipe.global_batch=32"], 1, "0.5 times the tokens for each device"),
        (["recipe.seq_len=4096", "recipe.global_batch=32"], 1, "2 times the tokens of a sequence"),
        (["recipe.micro_batch=1"], 0.25, "2 times the sequences of a micro-batch"),
        (["layout.shard=4", "layout.tensor=2"], 0.25, "0.5 times the tensor ranks"),
        (["recipe.activation_checkpointing=full"], 1, "selective recomputation, not full"),
        (["recipe.activation_checkpointing=none"], 1, "selective recomputation, not none"),
        (["recipe.precision=fp8-tensorwise-sharded"], 4, "matmuls in 16 bits, not 8"),
        (["recipe.precision=bf16-mixed"], 0, "the same in all that is compared"),
        (["cluster.device=h100-sxm"], 1, "h100-sxm-96gb-500w, not h100-sxm"),
        (["cluster.device=a100-sxm-80gb"], 3, "h100-sxm-96gb-500w, not a100-sxm-80gb"),
    ],
)
def test_each_difference_adds_what_is_stated(changes: list[str], distance: float, differs: str) -> None:
    found = of_row(nearest(run_of(*changes), ALL), "R0002")
    assert (found.distance, found.differs) == (pytest.approx(distance), differs)


def test_the_largest_differences_are_named_first() -> None:
    changes = ["layout.shard=32", "cluster.count=32", "recipe.global_batch=64", "cluster.device=h100-sxm"]
    found = of_row(nearest(run_of(*changes), ALL), "R0002")
    assert (found.distance, found.differs) == (5, "0.25 times the devices; h100-sxm-96gb-500w, not h100-sxm")


def test_experts_are_compared_by_their_active_parameters_and_add_to_the_distance() -> None:
    found = nearest(tl.load({**TITAN, "model": {"preset": "mixtral-8x7b"}}))
    assert found
    assert all(each.distance >= 4 and "dense, without experts" in each.differs for each in found)


def test_found_runs_are_in_order_and_not_too_far() -> None:
    found = nearest(run_of("cluster.device=h100-sxm"), ALL)
    distances = [each.distance for each in found]
    assert len(found) > 5
    assert distances == sorted(distances)
    assert distances[-1] <= FARTHEST
    assert nearest(run_of("cluster.device=h100-sxm"), 2) == found[:2]
    assert nearest(run_of(), 0) == ()


@pytest.mark.parametrize(
    "changes",
    [
        ["cluster.device=this-machine"],
        ["cluster.device=mi300x"],  # no published run is of its maker
        ["model.n_layers=1", "model.d_model=64", "model.vocab_size=512"],
        ["recipe.precision=fp32", "recipe.seq_len=128", "recipe.global_batch=16"],
    ],
)
def test_nothing_is_found_where_nothing_is_near(changes: list[str]) -> None:
    assert nearest(run_of(*changes)) == ()


def test_every_row_of_the_table_is_a_published_run() -> None:
    names, *lines = catalog.published_runs()
    assert names.split("\t") == [each.name for each in fields(PublishedRun)]
    assert len(lines) > 900
    sources = catalog.published_sources()
    at = names.split("\t").index("source")
    assert {line.split("\t")[at] for line in lines} == set(sources)
    assert sum(len(line) for line in lines) < 200_000
    devices = catalog.device_names()
    for line in lines:
        cells = dict(zip(names.split("\t"), line.split("\t"), strict=True))
        assert cells["device"] in devices
        assert bool(cells["step_seconds"]) == bool(cells["predicted_step_seconds"])
        assert bool(cells["peak_nbytes"]) == bool(cells["predicted_peak_nbytes"])
        assert cells["step_seconds"] or cells["peak_nbytes"]
