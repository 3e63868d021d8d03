"""Memory that a cluster keeps free: plans and searches fit beside it, and the chance of fitting stays what it was."""

from __future__ import annotations

from typing import Any

import pytest

import trainledger as tl
from thinned import thinned
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

MARGIN = 20 * 10**9


def run_with(**cluster: Any) -> Run:
    return tl.load(
        {
            "model": {"preset": "llama-3.1-8b"},
            "recipe": {
                "seq_len": 8192, "micro_batch": 1, "global_batch": 64, "steps": 10, "activation_checkpointing": "full",
            },
            "layout": {"shard": 8},
            "cluster": {"device": "h100-sxm", "count": 8, **cluster},
        }
    )  # fmt: skip


def test_a_plan_fits_beside_what_is_kept_free_and_its_chance_stays() -> None:
    as_it_is, careful = tl.plan(run_with()), tl.plan(run_with(memory_margin_nbytes="20GB"))
    usable = as_it_is.forecast.usable_nbytes
    assert usable is not None
    assert careful.forecast.usable_nbytes == usable - MARGIN
    assert careful.forecast.device_nbytes == as_it_is.forecast.device_nbytes
    assert careful.forecast.chance_of_fitting == as_it_is.forecast.chance_of_fitting
    assert careful.forecast.step_seconds == as_it_is.forecast.step_seconds
    free = usable - (as_it_is.forecast.device_nbytes or 0)
    assert tl.plan(run_with(memory_margin_nbytes=free)).forecast.fits
    assert tl.plan(run_with(memory_margin_nbytes=free + 1)).forecast.fits is False


def test_the_devices_of_a_fit_have_so_much_free() -> None:
    own = [tl.fit(run_with(memory_margin_nbytes=kept), of="memory", changes=False) for kept in (0, "40GB")]
    assert [(fit.memory.fits, "h100-sxm" in (fit.devices or ())) for fit in own] == [(True, True), (False, False)]


@pytest.mark.long
def test_a_search_has_only_layouts_that_leave_so_much_free() -> None:
    free = []
    for cluster in ({}, {"memory_margin_nbytes": MARGIN}):
        found = tl.layouts(run_with(**cluster), fixed={"context": 1, "pipeline": 1, "tensor": 1}, keep=5, chance=0.5)
        usable = tl.plan(run_with()).forecast.usable_nbytes
        assert usable is not None
        for each in found.ranked:
            needed = tl.plan(each.run).forecast.device_nbytes
            assert needed is not None
            free.append((usable - needed, cluster))
    assert min(left for left, cluster in free if cluster) >= MARGIN
    assert min(left for left, cluster in free if not cluster) < MARGIN


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"memory_margin_nbytes": "90GB"}, "leaves nothing of the 85.02 GB of NVIDIA H100 SXM 80GB; nearest that"),
        (
            {"device": "this-machine", "memory_margin_nbytes": "1GB"},
            "is for devices of the catalog: this machine is predicted as it was measured",
        ),
    ],
)  # fmt: skip
def test_margins_that_leave_nothing_are_refused(cluster: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        tl.plan(run_with(**cluster))
    assert "cluster.memory_margin_nbytes" in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(("model", "device"), thinned([("llama-3.2-1b", "a100-sxm-40gb"), ("llama-3-8b", "mi300x")]))
@pytest.mark.long
def test_a_search_without_a_margin_takes_what_is_as_likely_as_not_to_fit(model: str, device: str) -> None:
    named = {"cluster.device": device, "cluster.count": 2, "recipe.global_batch": 8}
    careful = tl.layouts(model, named, keep=20)
    bold = tl.layouts(model, {**named, "cluster.memory_margin_nbytes": 0}, keep=20)
    assert careful.fitting < bold.fitting
    assert careful.usable_nbytes == bold.usable_nbytes is not None
    assert sum("kept free" in each for each in careful.notes) == 1
    assert not any("kept free" in each for each in bold.notes)
    chances = [tl.plan(each.run).forecast.chance_of_fitting for each in careful.ranked]
    if device == "mi300x":  # of which nothing outside the tensors is known
        assert set(chances) == {None}
        assert max(each.device_nbytes for each in careful.ranked) < 0.95 * careful.usable_nbytes
    else:
        assert min(each for each in chances if each is not None) >= 0.5
