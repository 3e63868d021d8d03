"""No layout that fits is rejected: the search's bound of bytes is never above the account, in the corners either."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_layout_search import bounded, run_for

import trainledger as tl
from trainledger.forecast.plan.layouts.grid import grid_of, runs_of, whole
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.agreement

_WRITTEN = tomllib.loads(Path(__file__).with_name("layout_bounds.toml").read_text(encoding="utf-8"))
CORNERS, SECONDS = _WRITTEN["corners"], _WRITTEN["seconds"]


@pytest.mark.parametrize("corner", CORNERS)
def test_bounds_are_below_the_account_in_the_corners(corner: str) -> None:
    name, devices, recipe, layout, fixed, draws = CORNERS[corner]
    model = name if isinstance(name, dict) else {"preset": name}
    run = run_for(devices, model, **{"global_batch": devices, **recipe})
    run = replace(run, layout=replace(run.layout, **layout))
    found = list(bounded(run, draws, 5, fixed))
    assert len(found) > draws // 2
    for nbytes, _, one in found:
        assert 0.2 < nbytes <= 1, (nbytes, one.layout, one.recipe)


@pytest.mark.parametrize("corner", SECONDS)
def test_bounds_in_seconds_are_not_above_the_account(corner: str) -> None:
    device, name, devices, recipe, fixed = SECONDS[corner]
    run = run_for(devices, {"preset": name}, **recipe)
    run = replace(run, cluster=replace(run.cluster, device=device))
    found = list(bounded(run, 3, 5, fixed))
    assert found
    for _, seconds, one in found:
        assert 0.9 < seconds < 1.003, (seconds, one.layout, one.recipe)


def test_runs_of_layers_are_alike_in_every_way_of_recomputing() -> None:
    run = whole(run_for(4, {"preset": "llama-3-70b"}, seq_len=1024, activation_checkpointing="segments"))
    assert runs_of(run) == [72, 8]  # groups of nine, and what is left of them
    assert runs_of(replace(run, recipe=with_fields(run.recipe, {"activation_checkpointing": "none"}))) == [80]
    fixed = {"activation_checkpointing": "segments"}
    plain = replace(run, recipe=with_fields(run.recipe, {"activation_checkpointing": "none"}))
    assert runs_of(grid_of(plain, 4, fixed).run) == [72, 8]


@pytest.mark.parametrize(("own", "fixed"), [("segments", {}), ("none", {"activation_checkpointing": "segments"})])
def test_segments_are_searched_where_they_do_not_go_evenly(own: str, fixed: dict[str, Any]) -> None:
    """Twenty-four layers in fives: nothing else cuts them there."""
    run = run_for(2, {"preset": "gpt2-medium"}, seq_len=512, activation_checkpointing=own)
    found = tl.layouts(run, fixed={"micro_batch": 1, "pipeline": 1, **fixed}, keep=1)
    assert found.best is not None
    assert found.best.seconds == pytest.approx(tl.predict(found.best.run).step_seconds)
    assert (found.best.run.recipe.activation_checkpointing.kind == "segments") is bool(fixed)


@pytest.mark.parametrize("fixed", [{}, {"activation_checkpointing": "from-start"}])
def test_recomputation_from_the_start_are_refused_with_a_sentence(fixed: dict[str, Any]) -> None:
    again = "none" if fixed else "from-start"
    run = run_for(4, {"preset": "gpt2"}, seq_len=512, precision="fp32", activation_checkpointing=again)
    with pytest.raises(InvalidInput, match=r"= 'from-start': is not searched: .*; nearest that works: full"):
        tl.layouts(run, fixed=fixed)
