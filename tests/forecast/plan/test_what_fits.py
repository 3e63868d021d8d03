"""What fits: the found run fits and the next does not, by the verdict of a plan; and what limits it has a name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainledger as tl
from models import sizes as model_fields
from thinned import thinned
from trainledger.answers.fit import page
from trainledger.answers.load import load
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.plan import plan
from trainledger.forecast.plan import memory_model as memories
from trainledger.forecast.plan import sizes
from trainledger.forecast.plan.edges import edge
from trainledger.forecast.plan.fit import QUESTIONS, divides_batch, saving_recipes, what_fits
from trainledger.forecast.plan.memory_model import memory_model
from trainledger.forecast.plan.sizes import Sweep
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import account_of_stage, heaviest_stages, static_memory
from trainledger.spec.rules.run import run_problems

pytestmark = pytest.mark.sweep

MODEL = model_fields(V=4096, D=512, L=8, H=8, KV=4, F=1536, T=4096)


def run_of(model=None, layout=None, device="rtx-3090", **recipe):
    layout = layout or {}
    ranks = layout.get("replicate", 1) * layout.get("shard", 1)
    count = ranks * layout.get("context", 1) * layout.get("tensor", 1) * layout.get("pipeline", 1)
    given_recipe = {"seq_len": 1024, "global_batch": 8 * ranks, "micro_batch": 2, "steps": 1, "precision": "bf16-mixed"}
    return load(
        {
            "model": model or MODEL,
            "recipe": given_recipe | recipe,
            "layout": layout,
            "cluster": {"device": device, "count": count},
        }
    )


RUNS = st.builds(
    run_of,
    layout=st.sampled_from(
        [{}, {"shard": 4}, {"shard": 2, "zero": 1}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2},
         {"pipeline": 4}, {"shard": 2, "pipeline": 2, "tensor": 2}, {"shard": 2, "context": 2}]
    ),
    device=st.sampled_from(["rtx-3090", "l4", "a100-sxm-40gb", "h100-sxm", "mi300x"]),
    seq_len=st.sampled_from([256, 1024, 4096]),
    micro_batch=st.sampled_from([1, 2]),
    optimizer=st.sampled_from(["adamw", "sgd", "lion"]),
    activation_checkpointing=st.sampled_from(["none", "full", "selective"]),
)  # fmt: skip


def verdict(run):
    """That of a plan, with nothing of the search in it."""
    held = plan(run).device_memory
    assert held is not None
    return held


def is_likely(run, chance):
    """By the chance of its forecast; where nothing but tensors is known of a device there is none, and memory says."""
    likely = tl.predict(run).chance_of_fitting
    return (
        memory_model(machine_of(run), backend=kernels_of(run), chance=max(0, chance)).fits(run)
        if likely is None
        else (likely >= chance)
    )


@pytest.mark.agreement
@given(run=RUNS, question=st.sampled_from(list(QUESTIONS)), chance=st.sampled_from([0, 0.8, 0.95]))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_edge_is_exact(run, question, chance):
    """By the memory that a plan has, and by the chance that it gives: a percent of a percent is rounding."""
    machine, backend = machine_of(run), kernels_of(run)
    found = what_fits(run, machine, backend=backend, of=[question], changes=False, chance=chance)[question]
    if question == "memory":
        assert found.size == verdict(run).nbytes
        return
    if found.run is not None:
        assert list(run_problems(found.run)) == []
        assert verdict(found.run).fits
        assert is_likely(found.run, chance - 1e-4)
        assert found.memory is not None
        assert found.memory.nbytes == verdict(found.run).nbytes
    if found.beyond_run is not None:
        assert not (verdict(found.beyond_run).fits and is_likely(found.beyond_run, chance + 1e-4))
        assert found.beyond is not None
        assert found.beyond.nbytes == verdict(found.beyond_run).nbytes
        assert sum(found.beyond.by_category.values()) == found.beyond.peak_nbytes
    if found.size is not None and found.beyond_size is not None:
        next_one = {
            "sequence": found.size + sizes.sequence_unit(run), "micro-batch": found.size + 1,
            "devices": found.size - run.layout.context * run.layout.tensor * run.layout.pipeline,
        }  # fmt: skip
        assert found.beyond_size == next_one.get(question, found.beyond_size)
        assert question != "model" or found.beyond_size > found.size


@pytest.mark.long
def test_sizes_are_those_of_the_runs_found():
    run = run_of(layout={"shard": 2})
    fit = tl.fit(run, changes=False)
    assert fit["model"].size == parameters(fit["model"].run.model).total
    assert fit["sequence"].size == fit["sequence"].run.recipe.seq_len
    assert fit["micro-batch"].size == fit["micro-batch"].run.recipe.micro_batch
    assert fit["devices"].size == fit["devices"].run.layout.devices == 1
    assert fit["memory"].size == fit.memory.nbytes == verdict(run).nbytes


def test_a_larger_memory_never_fits_less():
    run = run_of(micro_batch=1)
    small, large = machine_of(run), machine_of(run_of(device="h100-sxm"))
    found = [what_fits(run, each, backend="cuda", of=["model", "sequence"], changes=False) for each in (small, large)]
    for question in ("model", "sequence"):
        assert found[0][question].size < found[1][question].size


@pytest.mark.agreement
def test_changes_of_the_recipe_are_lines_to_paste_and_fit_more():
    run = run_of({"preset": "llama-3.2-1b"}, layout={"replicate": 2, "shard": 2}, micro_batch=2)
    fit = tl.fit(run, of=["model", "memory"])
    assert [row.name for row in fit.rows] == [
        "unchanged", "+ states sharded in full", "+ micro-batches of 1", "+ activation checkpointing full",
        "+ loss chunked",
    ]  # fmt: skip
    for before, after in zip(fit.rows, fit.rows[1:], strict=False):
        assert set(before.settings) < set(after.settings)
        assert after.answers["memory"].size < before.answers["memory"].size
        assert (after.answers["model"].size or 0) >= (before.answers["model"].size or 0)
    for recipe in saving_recipes(run):
        section = {"preset": "llama-3.2-1b"}
        again = {name: vars(getattr(run, name)) for name in ("recipe", "layout", "cluster")}
        pasted = load({"model": section, **again}, recipe.settings)
        assert (pasted.recipe, pasted.layout) == (recipe.run.recipe, recipe.run.layout)


def test_a_run_that_saves_already_has_no_changes():
    run = run_of(micro_batch=1, activation_checkpointing="full", loss="chunked")
    assert [each.name for each in saving_recipes(run)] == ["unchanged"]


def test_nothing_fits():
    run = run_of({"preset": "llama-3-70b"}, device="t4", precision="fp16-mixed", micro_batch=1, global_batch=2)
    fit = tl.fit(run, of=["sequence", "devices", "memory"], changes=False)
    assert fit["sequence"].size is None
    assert fit["sequence"].note == "not even the smallest fits"
    assert fit["sequence"].beyond.nbytes > fit["sequence"].beyond.usable_nbytes
    assert fit["devices"].size is None
    assert fit["devices"].note == "not even with states in 16,384 parts: the rest is not sharded"
    assert not fit.memory.fits
    assert fit.devices == ()


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"activation_checkpointing": "full"}, "not even with states in 16,384 parts"),
    ],
)  # fmt: skip
def test_states_that_cannot_be_sharded_are_refused_with_the_rule(recipe, why):
    fields = {"seq_len": 1024, "global_batch": 1, "steps": 1, **recipe}
    run = load({"model": {"preset": "llama-3-70b"}, "recipe": fields, "cluster": {"device": "l4"}})
    found = tl.fit(run, of="devices", changes=False)["devices"]
    assert found.note.startswith(why)


def test_what_the_heaviest_rank_is_called():
    run = run_of(layout={"pipeline": 4}, micro_batch=1)
    scale = memory_model(machine_of(run), backend=kernels_of(run))
    held = scale.use_of(run)
    assert held.rank == f"stage {held.stage + 1} of 4"
    weights = [scale.nbytes(run, stage) for stage in range(4)]
    assert max(weights) == weights[held.stage] == held.nbytes
    assert scale.use_of(run_of()).rank == "every rank"


@pytest.mark.parametrize("again", thinned(["none", "full"]))
@pytest.mark.parametrize("shard", thinned([1, 2]))
@pytest.mark.parametrize(
    "layout",
    [
        {"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "zero-bubble"},
        {"schedule": "interleaved", "virtual_stages": 2}, {"stage_layers": [1, 3, 3, 1]},
        {"stage_layers": [1, 2, 4, 1]},
    ],
)  # fmt: skip
def test_the_heaviest_stage_is_among_the_first_of_each_kind(layout, shard, again):
    """Weighed stage by stage, none is heavier; of equal stages one is weighed instead of all."""
    table = {"pipeline": 4, "shard": shard, **layout}
    for sequences in (4, 2 * 8, 64):
        run = run_of(layout=table, micro_batch=1, global_batch=sequences * shard, activation_checkpointing=again)
        scale = memory_model(machine_of(run), backend=kernels_of(run))
        weights = [scale.nbytes(run, stage) for stage in range(4)]
        weighed = heaviest_stages(run)
        held = scale.use_of(run)
        assert max(weights) == weights[held.stage] == held.nbytes
        assert held.stage in weighed
        assert scale.fits(run) is (max(weights) <= scale.usable_nbytes)
        if sequences == 64:  # with fewer some stages have nothing but micro-batches in flight
            assert len(weighed) == (4 if layout == {"stage_layers": [1, 2, 4, 1]} else 3)


@pytest.mark.parametrize("start", [0, 3, 50, 99])
@given(last=st.integers(-1, 99), holes=st.sets(st.integers(1, 98), max_size=40))
def test_the_search_on_a_line(start, last, holes):
    """On any line with holes: the last that fits and the first that does not, whatever place it starts from."""
    line = Sweep("", range(100), lambda place: place, start=start)  # type: ignore[arg-type, return-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "memory_problems", lambda place: iter(["a hole"] if place in holes else []))
        found, beyond = edge(line, lambda place: place <= last)
    there = [place for place in range(100) if place not in holes]
    assert found == next(((each, each) for each in reversed(there) if each <= last), None)
    assert beyond == next(((each, each) for each in there if each > last), None)


def test_a_family_is_searched_a_little_beyond_its_edge():
    """But not to models that are as wide and as deep as one that does not fit: the sixth is narrower."""
    widths, fits = [1, 1, 1, 1, 9, 5, *[9] * 14], {0, 1, 2, 3, 5}
    asked = []

    def member(place):
        return SimpleNamespace(place=place, model=SimpleNamespace(d_model=widths[place], n_layers=place))

    def holds(run):
        asked.append(run.place)
        return run.place in fits

    line = Sweep("", range(20), member, ahead=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "memory_problems", lambda run: iter(()))
        last, beyond = edge(line, holds)
    assert (last[0], beyond[0]) == (5, 6)
    assert 8 not in asked[-3:]
    assert 9 not in asked[-3:]


@pytest.mark.agreement  # 65 accounts of a model with two kinds of layers take 25 s
def test_what_fits_nowhere_is_seen_without_a_search(monkeypatch):
    """A T4 has no room for the states of 12B in eight parts, nor for their activations however many parts there are."""
    accounts = []
    account = memories.account_of_stage
    monkeypatch.setattr(memories, "account_of_stage", lambda *of, **more: accounts.append(of) or account(*of, **more))
    fit = tl.fit("gemma-3-12b", device="t4", count=8)
    for row in fit.rows[:2]:
        assert [row.answers[name].size for name in ("model", "sequence", "micro-batch", "devices")] == [None] * 4
    assert fit.rows[-1].answers["model"].size > 2e9
    assert len(accounts) == len(set(accounts)) <= 85  # 373 were made


@pytest.mark.agreement
@given(run=RUNS)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_known_without_an_account_is_never_too_much(run):
    """Static memory, and what no further rank shards, are at most the peak of the account."""
    for stage in range(run.layout.pipeline):
        static = static_memory(rank_plan(run, stage), backend="cuda")
        assert static.resident + static.gradients <= account_of_stage(run, stage, backend="cuda").peak().nbytes
    wide = sizes.shards(run).allowed(sizes.MOST_SHARDS - 1)
    if wide is not None:
        memory = memory_model(machine_of(run), backend="cuda", chance=0)
        kept = sum(memory.use_of(wide[1]).by_category.get(name, 0) for name in ("activations", "logits and loss"))
        for shard in (2, 8, 64):
            fewer = sizes.shards(run).allowed(shard - 1)
            assert fewer is None or kept <= memory.use_of(fewer[1]).peak_nbytes


def test_micro_batches_that_divide():
    run = run_of(global_batch=12, micro_batch=1)
    assert [divides_batch(run, each) for each in (1, 5, 7, 100)] == [1, 4, 6, 12]


def test_what_is_not_known_is_a_sentence():
    run = run_of()
    with pytest.raises(tl.InvalidInput, match=r"of = 'modle': must be one of model, sequence.*nearest.*model"):
        tl.fit(run, of=["modle"])
    with pytest.raises(tl.InvalidInput, match="must be some of"):
        tl.fit(run, of=[])
    with pytest.raises(tl.InvalidInput, match="was not measured yet"):
        what_fits(run, None, backend="cuda")
    unknown = replace(tl.device("l4"), memory_nbytes=None, usable_nbytes=None)
    with pytest.raises(tl.InvalidInput, match="has no known memory"):
        what_fits(run, unknown, backend="cuda")


def test_the_answers_as_plain_data():
    import json

    answer = page(tl.fit(run_of(layout={"shard": 2}), changes=False)).data()
    assert json.loads(json.dumps(answer)) == answer
    row = answer["rows"][0]
    assert set(row["answers"]) == set(QUESTIONS)
    assert row["answers"]["model"]["model"]["d_model"] > 0
    assert row["answers"]["sequence"]["beyond"]["category"] in row["answers"]["sequence"]["beyond"]["by_category"]


@pytest.mark.agreement
def test_parameters_that_stay_after_forward_are_let_go_before_a_model_is_called_the_largest():
    table = {
        "model": {"preset": "llama-3-8b"},
        "recipe": {
            "seq_len": 1024,
            "global_batch": 64,
            "steps": 1,
            "micro_batch": 1,
            "precision": "bf16-sharded",
            "activation_checkpointing": "full",
        },
        "cluster": {"device": "h100-sxm", "count": 64},
        "layout": {"shard": 64, "reshard_after_forward": False},
    }
    run = load(table)
    names = [each.name for each in saving_recipes(run)]
    assert "+ parameters gathered again in backward" in names
    first, last = (tl.fit(run, of=["model"]).rows[place].answers["model"].size for place in (0, -1))
    assert last > 3 * first


@pytest.mark.agreement
def test_adapters_end_with_frozen_weights_in_four_bits() -> None:
    found = tl.fit("llama-3-8b", {"cluster.device": "rtx-4090", "recipe.lora.rank": 16, "recipe.seq_len": 2048},
                   of="micro-batch")  # fmt: skip
    assert found.rows[-1].name == "+ frozen weights in nf4"
    assert "recipe.lora.base_format=nf4" in found.rows[-1].settings
    sizes = [row.answers["micro-batch"].size or 0 for row in found.rows]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[-2]
    run = tl.load(found.run, found.rows[-1].settings)
    assert tl.plan(run).forecast.fits


@pytest.mark.parametrize(("model", "sets"), [("llama-3.1-8b", {"method": "qlora"}), ("gpt2", {"recipe.loss": "fused"})])
def test_a_plan_takes_each_device_that_is_named(model: str, sets: dict[str, str]) -> None:
    named = tl.fit(model, sets, device="rtx-4090", of=["memory"]).devices
    assert named
    assert "h100-sxm" in named
    for device in named:
        forecast = tl.plan(model, sets, device=device).forecast
        assert forecast.fits
        assert forecast.as_likely_as(0.8)
