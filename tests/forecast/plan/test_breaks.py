"""What breaks: every edge is exact by a prediction made apart, and the figures are those of that prediction."""

from dataclasses import replace
from math import lcm, log10
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_runs import ACROSS_NODES, ALONE, MESH, SHARDED, TOO_LARGE, Table

import trainledger as tl
from drawn import marks
from trainledger.answers.breaks import figures, page
from trainledger.cli import main
from trainledger.forecast.plan import breaks as breaks_module
from trainledger.forecast.plan.breaks import RULE, Breaks
from trainledger.forecast.plan.limits import (
    LIMITS,
    Limit,
    Limits,
    Reading,
    critical_batch,
    critical_batch_of_tokens,
    remedy,
)
from trainledger.forecast.plan.other_layouts import _laid_out_as, longer_model
from trainledger.forecast.plan.sizes import AXES, grow
from trainledger.report.chart import Line
from trainledger.report.terminal import text
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep

RUNS = {"alone": ALONE, "sharded": SHARDED, "mesh": MESH}


def _holds(limit: str, run: Run, **known: Any) -> bool:
    """Whether something holds, from a prediction of the run alone and without the tables of the module."""
    if limit == RULE:
        return not list(run_problems(run))
    answer = tl.predict(run)
    causes = answer.step_causes
    bars = {each.cause: each.seconds for each in answer.waterfall}
    tokens = run.recipe.total_steps * run.recipe.tokens_per_step
    known_to_hold = {
        "device memory": lambda: answer.fits is not False,
        "vocabulary logits": lambda: 2 * answer.peak_by_category.get("logits and loss", 0) <= (answer.peak_nbytes or 0),
        "critical batch": lambda: run.recipe.global_batch * run.recipe.seq_len <= critical_batch(run),
        "exposed communication": lambda: causes["exposed communication"] <= 0.2 * sum(causes.values()),
        "pipeline bubble": lambda: causes["pipeline bubble"] <= 0.2 * sum(causes.values()),
        "failures": lambda: bars["checkpoints"] + bars["failures"] <= 0.1 * (answer.total_seconds or 0),
        "data throughput": lambda: not bars["data"],
        "positions": lambda: run.recipe.seq_len <= known["positions"],
        "dataset exhausted": lambda: tokens <= known["unique"],
        "repetition": lambda: tokens <= 4 * known["unique"],
    }
    return bool(known_to_hold[limit]())


def _changed(table: Table, changes: tuple[str, ...]) -> Run:
    return tl.load(table, list(changes))


@pytest.mark.parametrize(
    "name", [each if each != "mesh" else pytest.param(each, marks=pytest.mark.slow) for each in RUNS]
)
@pytest.mark.long
def test_every_edge_is_exact(name: str) -> None:
    table = RUNS[name]
    run = tl.load(table)
    unique = 3 * (run.recipe.tokens or 0)
    axes = [each for each in AXES if name == "alone" or each in ("sequence", "devices", "depth")]
    found = tl.breaks(run, along=axes, unique_tokens=unique)
    known = {"positions": run.model.max_seq_len, "unique": unique}
    seen = [each for along in found.along for each in (*along.breaks, *along.warnings)]
    assert len({each.limit for each in seen}) > 2
    for each in seen:
        way = grow(run, each.axis, breaks_module.REACH)
        at = way.values.index(each.holds)
        assert way.values[at + 1] == each.breaks  # no value lies between
        before, after = way.at(at), way.at(at + 1)
        assert _holds(each.limit, before, **known), each
        assert not _holds(each.limit, after, **known), each
        if each.limit != RULE:
            assert _changed(table, each.changes) == after
        else:
            with pytest.raises(InvalidInput):
                _changed(table, each.changes)
    for along in found.along:
        assert [each.breaks for each in along.breaks] == sorted(each.breaks for each in along.breaks)


def test_a_longer_sequence_breaks_where_its_own_prediction_says_so() -> None:
    found = tl.breaks(tl.load(ALONE), along=["sequence"], keep_tokens=False)
    edge = next(each for each in found.along[0].breaks if each.limit == "device memory")
    for T, fits in ((edge.holds, True), (edge.breaks, False)):
        answer = tl.predict(tl.load(ALONE, {"recipe.seq_len": T, "model.max_seq_len": T}))
        assert answer.fits is fits
        assert answer.device_nbytes == (edge.before if fits else edge.after)
    assert edge.breaks == edge.holds + 1
    assert edge.planned == tl.predict(tl.load(ALONE)).device_nbytes


@pytest.mark.parametrize(
    "field", ["recipe.lora.rank=16", "recipe.initial_weights=a.safetensors", "recipe.tokens=16_384"]
)
def test_the_law_of_the_critical_batch_is_of_training_from_scratch(field: str) -> None:
    """Of adapters of 8B it said 52.66 tokens, from the loss of a model that has seen a step's tokens."""
    fields = ["cluster.device=h100-sxm", "recipe.tokens=100M", "recipe.global_batch=16", field]
    found = tl.breaks("gpt2", fields, along=["batch"])
    assert "critical batch" in found.unknown
    assert all(broken.limit != "critical batch" for broken in (*found.already, *found.along[0].breaks))
    assert "critical batch" not in tl.breaks("gpt2", fields[:-1], along=["batch"]).unknown


def test_the_critical_batch_is_the_formula_solved_by_hand() -> None:
    found = tl.breaks(tl.load(ALONE), along=["batch"])
    edge = next(each for each in found.along[0].breaks if each.limit == "critical batch")
    # Kaplan's 2.1e8 / L^4.8, with L by Besiroglu's coefficients at 124M parameters and the tokens of whole steps.
    N = 124_439_808
    for batch, holds in ((edge.holds, True), (edge.breaks, False)):
        steps = 10**10 // (batch * 1024)
        loss = 1.8172 + 482.01 / N**0.3478 + 2085.43 / (steps * batch * 1024) ** 0.3658
        assert (batch * 1024 <= 2.1e8 / loss**4.8) is holds
    assert edge.basis == "assumed"
    assert "McCandlish" in edge.source


def test_a_batch_law_by_tokens_alone_grows_with_them() -> None:
    small, large = (tl.load(ALONE, {"recipe.tokens": each}) for each in ("1B", "100B"))
    assert critical_batch_of_tokens(large) / critical_batch_of_tokens(small) == pytest.approx(100**0.462, rel=1e-3)


def test_a_dataset_breaks_when_it_is_used_up_and_again_after_four_passes() -> None:
    run = tl.load(ALONE)
    found = tl.breaks(run, along=["dataset"], unique_tokens=25 * 10**9)
    (first,), (second,) = found.along[0].warnings, found.along[0].breaks
    step = run.recipe.tokens_per_step
    assert (first.limit, second.limit) == ("dataset exhausted", "repetition")
    # A run is whole steps: the tokens of the file may pass the edge by less than one of them.
    assert first.breaks // step * step > 25 * 10**9 >= first.holds // step * step
    assert second.breaks // step * step > 100 * 10**9 >= second.holds // step * step
    assert second.after == pytest.approx(4, abs=1e-4)


MARKS = {"vocabulary logits", "dataset exhausted"}  # beyond which a run goes on as well as before


def test_a_run_beyond_a_mark_is_warned_of_and_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    more = {"recipe.micro_batch": 32, "recipe.global_batch": 32, "cluster.device": "h100-sxm"}
    found = tl.breaks(tl.load(ALONE, more), along=["depth"], unique_tokens=6 * 10**9)
    assert found.already == ()
    assert {each.limit for each in found.warnings} == MARKS
    assert all(each.warns and each.after > each.most for each in found.warnings)
    said = " ".join(text(page(found), full=True).split())
    assert "Warning, as planned: vocabulary logits. " in said
    assert "Broken" not in said
    data = found.document().data()
    assert [each["limit"] for each in data["warnings"]] == [each.limit for each in found.warnings]


@pytest.mark.parametrize("most", [1, 3])
def test_a_warning_is_never_among_what_breaks(most: int) -> None:
    """The share of the logits passes a half on the way to where memory ends, or after all limits that are asked for."""
    found = tl.breaks(tl.load(ALONE), along=["batch", "sequence", "vocabulary", "dataset"], unique_tokens=2 * 10**10,
                      most=most)  # fmt: skip
    for along in found.along:
        assert not MARKS & {each.limit for each in along.breaks}
        assert {each.limit for each in along.warnings} <= MARKS
        last = along.breaks[-1].breaks if len(along.breaks) == most else along.reached
        assert all(each.breaks <= last for each in along.warnings)
    assert any(along.warnings for along in found.along)
    table = found.document().tables["dataset"]
    assert table.rows[0][:2] == ("warning", "dataset exhausted")


def test_what_is_not_known_is_not_judged_and_named() -> None:
    found = tl.breaks(tl.load(ALONE), along=["dataset"])
    assert {"dataset exhausted", "repetition"} <= set(found.unknown)
    assert found.along[0].breaks == ()
    assert "--unique-tokens" in text(page(found), full=True)


def test_what_does_not_hold_as_planned_is_said_first_and_not_again() -> None:
    found = tl.breaks(tl.load(TOO_LARGE), along=["width"])
    assert "device memory" in [each.limit for each in found.already]
    assert "device memory" not in [each.limit for each in found.along[0].breaks]
    assert str(found).startswith("Broken as planned: device memory (")


def test_micro_batches_that_shrink_as_devices_are_added_are_named() -> None:
    """A batch of 64 in micro-batches of 4 ends 16 devices; 64 have one sequence each."""
    recipe = {"seq_len": 1024, "global_batch": 64, "micro_batch": 4, "steps": 10, "precision": "bf16-mixed"}
    table: Table = {"model": {"preset": "gpt2"}, "recipe": recipe, "cluster": {"device": "h100-sxm"}}
    carries = grow(tl.load(table), "devices", 64).carries
    assert carries.endswith("the global batch shared out (in smaller micro-batches where a rank has fewer sequences)")
    one = {**table, "recipe": {**recipe, "micro_batch": 1}}
    assert grow(tl.load(one), "devices", 64).carries.endswith("the global batch shared out")


def test_more_devices_end_where_a_rank_gets_no_sequence() -> None:
    found = tl.breaks(tl.load(SHARDED), along=["devices"], exposed=1.0, lost=1.0)
    (edge,) = found.along[0].breaks
    assert (edge.limit, edge.holds, edge.breaks) == (RULE, 256, 512)
    assert "must be a multiple of micro_batch = 1 x 512 data ranks" in edge.why


def test_a_bearable_share_moves_the_edge() -> None:
    def edge(exposed: float) -> int:
        found = tl.breaks(tl.load(SHARDED), along=["devices"], exposed=exposed)
        one = [each.breaks for each in found.along[0].breaks if each.limit == "exposed communication"]
        return one[0] if one else 10**9

    start = tl.predict(tl.load(SHARDED)).step_causes
    now = start["exposed communication"] / sum(start.values())
    assert edge(now + 0.001) <= edge(now + 0.1) <= edge(0.99)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.2, 4.0), st.integers(1100, 60_000), st.sampled_from([1, 2, 8]))
def test_the_search_finds_the_first_value_beyond_any_curve(power: float, most: int, context: int) -> None:
    table: Table = {**ALONE, "layout": {"context": context}, "cluster": {"device": "h100-sxm", "count": context}}
    run = tl.load(table)

    def read(other: Run, answer: Any, limits: Limits) -> Reading:
        return Reading(float(other.recipe.seq_len) ** power, float(most) ** power, "exact")

    asked = []
    curve = Limit("curve", "share", "", "", "", lambda *each: asked.append(each) or read(*each), "", False)  # type: ignore[func-returns-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaks_module, "LIMITS", (curve,))
        found = tl.breaks(run, along=["sequence"], keep_tokens=False)
    step = 2 * context if context > 1 else 1
    beyond = 1024 + (most - 1024) // step * step + step  # the first of 1024, 1024 + step, ... that is larger
    assert [each.breaks for each in found.along[0].breaks] == [beyond]
    assert len(asked) < 200


@pytest.mark.long
def test_no_vocabulary_before_the_edge_breaks() -> None:
    run = tl.load(ACROSS_NODES)
    found = tl.breaks(run, along=["vocabulary"])
    edge = next(each for each in found.along[0].breaks if each.limit == "exposed communication")
    values = grow(run, "vocabulary", breaks_module.REACH).values
    assert edge.holds % 128 == edge.breaks % 128 == 0
    at = values.index(edge.holds)
    for rows in {*values[: at + 1 : 97], *values[at - 15 : at + 1]}:
        assert _holds(edge.limit, tl.load(ACROSS_NODES, {"model.vocab_size": rows})), rows
    assert not _holds(edge.limit, tl.load(ACROSS_NODES, {"model.vocab_size": edge.breaks}))


@pytest.mark.parametrize(("start", "tensor", "multiple", "first"), [
    (50304, 1, 1, 50432), (50257, 1, 1, 50304), (50264, 8, 1, 51200), (50257, 1, 96, 50304), (65, 1, 1, 128),
])  # fmt: skip
def test_vocabularies_are_those_that_models_have(start: int, tensor: int, multiple: int, first: int) -> None:
    model = {**ACROSS_NODES["model"], "vocab_size": start, "vocab_multiple": multiple}
    layout = {"shard": 32 // tensor, "tensor": tensor}
    values = grow(tl.load({**ACROSS_NODES, "model": model, "layout": layout}), "vocabulary", 64).values
    assert values[:2] == (start, first)
    assert all(each % lcm(128 * tensor, multiple) == 0 for each in values[1:])
    assert values[-1] <= 64 * start


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 20), st.integers(2, 30), st.integers(51_000, 900_000))
def test_of_a_share_that_goes_up_and_down_the_first_edge_is_found(depth: float, period: int, most: int) -> None:
    """A saw of ``period`` values whose teeth are up to 20 values deep, on a line of one a value."""

    def amount(rows: int) -> float:
        at = (rows - 50304) // 128
        return at - depth * (at % period == 0)

    def read(other: Run, answer: Any, limits: Limits) -> Reading:
        return Reading(amount(other.model.vocab_size), (most - 50304) / 128, "exact")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaks_module, "LIMITS", (Limit("curve", "share", "", "", "", read, "", False),))
        found = tl.breaks(tl.load(ACROSS_NODES), along=["vocabulary"])
    beyond = next(rows for rows in range(50304, 10**7, 128) if amount(rows) > (most - 50304) / 128)
    assert [each.breaks for each in found.along[0].breaks] == [beyond]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", RUNS)
def test_values_on_the_way_keep_the_rules_of_the_run_file(name: str, axis: str) -> None:
    run = tl.load(RUNS[name])
    way = grow(run, axis, 8)
    assert way.at(0) == run or axis == "devices"
    last = len(way.values) - (2 if axis == "devices" else 1)  # of devices the last is the first that is too many
    for index in {0, 1, last // 2, last} & set(range(last + 1)):
        grown = way.at(index)
        assert list(run_problems(grown)) == []
        section, _, field = way.field.partition(".")
        assert getattr(getattr(grown, section), field) == way.values[index]


def test_width_keeps_heads_and_proportions() -> None:
    run = tl.load(MESH)
    way = grow(run, "width", 4)
    wide = way.at(3).model
    assert wide.head_size == run.model.head_size
    assert wide.kv_heads == run.model.kv_heads
    assert wide.feed_forward.d_ff / wide.d_model == pytest.approx(
        run.model.feed_forward.d_ff / run.model.d_model, rel=0.01
    )


def test_an_axis_that_is_none_is_a_sentence() -> None:
    with pytest.raises(InvalidInput) as caught:
        tl.breaks(tl.load(ALONE), along=["lenght", "batch"])
    assert str(caught.value).startswith("along = 'lenght': must be one of sequence, batch, width, depth, devices")


@pytest.fixture(scope="module")
def found() -> Breaks:
    return tl.breaks(tl.load(SHARDED), along=["sequence", "vocabulary"], unique_tokens=10**12)


@pytest.mark.parametrize(("holds", "after"), [(131_072, 131_073), (131_072, 196_608), (4096, 4224)])
@pytest.mark.long
def test_the_headline_has_the_last_that_works_and_the_first_that_does_not(
    found: Breaks, holds: int, after: int
) -> None:
    along = found.along[0]
    first = replace(along.breaks[0], holds=holds, breaks=after)
    verdict = page(replace(found, along=(replace(along, breaks=(first,)),), already=())).verdict
    assert f": recipe.seq_len = {holds:,} works, {after:,} does not ({after / 4096:.4g} times the plan)." in verdict


@pytest.mark.parametrize(("holds", "after"), [(131_072, 196_608), (4096, 6144)])
def test_what_was_looked_at_on_a_grid_is_between_two_values_and_no_exact_edge(
    found: Breaks, holds: int, after: int
) -> None:
    along = found.along[0]
    first = replace(along.breaks[0], holds=holds, breaks=after)
    answer = page(replace(found, along=(replace(along, breaks=(first,), grid=True),), already=()))
    assert f"between recipe.seq_len = {holds:,}, which works, and {after:,}, which does not" in answer.verdict
    printed = " ".join(text(answer, full=True).split())
    assert "first that fails" not in printed
    assert "each limit is between the two of its row" in printed


def test_the_text_fits_a_terminal(found: Breaks) -> None:
    answer = text(page(found), full=True)
    assert max(len(line) for line in answer.splitlines()) <= 80
    for along in found.along:
        for each in along.breaks:
            assert f"{each.breaks:,}" in answer
    assert len(repr(found)) < 400


def test_the_chart_has_a_point_for_each_break(found: Breaks) -> None:
    (chart,) = figures(found)
    points = [x or 0.0 for each in marks(chart, Line) for x in each.xs]
    low, high = (log10(each) for each in chart.x.ends or ())
    room = 0.09 * (high - low)  # on both sides, for half a label on a narrow page
    assert all(low + room < log10(each) < high - room for each in points)
    assert sorted(points) == sorted(each.factor for along in found.along for each in along.breaks)
    assert figures(replace(found, along=())) == []


def test_limits_name_source_and_remedy() -> None:
    for each in LIMITS:
        assert each.source
        assert each.remedy


def test_what_the_run_does_already_is_no_remedy() -> None:
    failures = next(each for each in LIMITS if each.name == "failures")
    for asynchronous in (False, True):
        for every in (100, None):
            recipe = with_fields(
                tl.load(ALONE).recipe, {"checkpoints.asynchronous": asynchronous, "checkpoints.every": every}
            )
            said = remedy(failures, replace(tl.load(ALONE), recipe=recipe))
            assert "faster storage" in said
            assert ("recipe.checkpoints.asynchronous=true" in said) is not asynchronous
            assert ("Daly's interval (recipe.checkpoints.every=none)" in said) is (every is not None)
    assert tl.load(ALONE, ["recipe.checkpoints.every=none"]).recipe.checkpoints.every is None


def test_what_waits_for_data_should_not() -> None:
    """A limit of nothing at all is said in words and not as a share of 0.0 %."""
    found = tl.breaks(tl.load(ALONE, {"cluster.loader_tokens_per_second": 1000}), along=["depth"])
    (waiting,) = [each for each in found.already if each.limit == "data throughput"]
    assert waiting.most == 0
    said = " ".join(text(page(found), full=True).split())
    assert " %, and should be none (assumed): time in which devices wait for data" in said
    assert "of 0.0 %" not in said


def test_a_bound_of_memory_is_no_assumption() -> None:
    """Where nothing around the tensors is known, the device holds at least as much as is said."""
    for device, basis in (("mi300x", "bound"), ("h100-sxm", "assumed")):
        run = tl.load(ALONE, {"cluster.device": device, "recipe.global_batch": 4096, "recipe.micro_batch": 4096})
        found = tl.breaks(run, along=["depth"])
        assert [each.basis for each in found.already if each.limit == "device memory"] == [basis]


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    words = ["breaks", "gpt2", "--set", "cluster.device=h100-sxm", "--along", "depth", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    (edge,) = [each for each in answer["along"][0]["breaks"] if each["limit"] == "device memory"]
    assert edge["field"] == "model.n_layers"
    assert edge["breaks"] == edge["holds"] + 1
    assert edge["set"] == [f"model.n_layers={edge['breaks']}"]
    assert "20 for each parameter" in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--exposed", "2"], "--exposed = '2': must be between 0 and 1; nearest that works: 2%"),
        (["--reach", "1"], "--reach = '1': must be between 2 and 1,000,000; nearest that works: 2"),
        (["--most", "many"], "--most = 'many': is not a count"),
        (["--plot", "out.gif"], "--plot = 'out.gif': the suffix says what is written"),
    ],
)
def test_nonsense_is_a_sentence(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    assert main(["breaks", "gpt2", "--set", "cluster.device=l4", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(sentence)


def test_all_numbers_that_are_wrong_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["breaks", "gpt2", "--reach", "1", "--exposed", "2", "--unique-tokens", "1.5"]) == 2
    answer = capsys.readouterr().err.splitlines()
    assert [each.split(" = ")[0] for each in answer] == ["--reach", "--exposed", "--unique-tokens"]


def test_longer_sequences_keep_the_tokens_of_a_step() -> None:
    run = tl.load(SHARDED)
    way = grow(run, "sequence", 64)
    tokens = run.recipe.tokens_per_step
    for index in (1, 1000, 4096, 12288):
        grown = way.at(index)
        assert tokens - grown.recipe.seq_len * 16 < grown.recipe.tokens_per_step <= tokens
    last = way.at(len(way.values) - 1)  # 262,144 tokens: not even a sequence for each of the 16 ranks
    assert last.recipe.global_batch == 16
    kept = grow(run, "sequence", 64, keep_tokens=False).at(4096)
    assert kept.recipe.global_batch == run.recipe.global_batch


@pytest.mark.agreement
def test_context_ranks_cure_a_sequence_that_does_not_fit() -> None:
    found = tl.breaks(tl.load(SHARDED), along=["sequence"])
    edge = next(each for each in found.along[0].breaks if each.limit == "device memory")
    assert edge.cure is not None
    assert edge.cure.devices == 16
    assert edge.cure.holds > 1.5 * edge.holds
    ranks = [each for each in edge.cure.changes if each.startswith("layout.context=")]
    assert ranks == ["layout.context=2"]
    T = {"recipe.seq_len": edge.cure.holds, "model.max_seq_len": edge.cure.holds, "recipe.global_batch": 8}
    cured = tl.load(tl.load(SHARDED, list(edge.cure.changes)), T)
    assert tl.predict(cured).fits
    assert "context ranks hold it up to" in text(page(found), full=True, width=200)


def test_one_device_is_cured_by_more_of_them() -> None:
    found = tl.breaks(tl.load(ALONE), along=["sequence"])
    edge = next(each for each in found.along[0].breaks if each.limit == "device memory")
    assert edge.cure is not None
    assert edge.cure.changes == ("layout.context=2", "cluster.count=2")


@pytest.mark.parametrize(
    ("preset", "longer"), [("llama-3-8b", "llama-3.1-8b"), ("llama-2-7b", "llama-3-8b"), ("gpt2", None)]
)
def test_a_short_context_is_answered_with_a_longer_model_of_the_family(preset: str, longer: str | None) -> None:
    assert longer_model(tl.model(preset), tl.model(preset).max_seq_len + 1) == longer


def test_a_sequence_too_long_for_a_model_is_answered_with_a_longer_model() -> None:
    recipe = {"seq_len": 32768, "global_batch": 8, "steps": 1}
    with pytest.raises(InvalidInput) as caught:
        tl.load({"model": {"preset": "llama-3-8b"}, "recipe": recipe})
    assert str(caught.value) == (
        "recipe.seq_len = 32768: is longer than model.max_seq_len = 8192 (llama-3.1-8b has more positions); "
        "nearest that works: 8192"
    )
    with pytest.raises(InvalidInput, match=r"is longer than model.max_seq_len = 1024; nearest that works: 1024"):
        tl.load({"model": {"preset": "gpt2"}, "recipe": recipe})


def test_positions_name_the_longer_model() -> None:
    run = tl.load({**MESH, "recipe": {**MESH["recipe"], "tokens": "10B"}})
    found = tl.breaks(run, along=["sequence"], reach=2, most=1)
    (edge,) = found.along[0].breaks
    assert edge.limit == "positions"
    assert edge.remedy.startswith("llama-3.1-8b, which has more positions (model.preset), or a larger")


@pytest.mark.agreement
def test_the_layout_follows_where_it_is_searched_for() -> None:
    """Where memory ends in the planned layout, the search finds one of context ranks that holds on."""
    asked = tl.load({**SHARDED, "layout": {"auto": True}}, search=False)
    (along,) = tl.breaks(asked, along=["sequence"], reach=16).along
    (planned,) = tl.breaks(tl.load(asked), along=["sequence"], reach=16).along
    assert along.carries.endswith("the layout that the search finds")
    assert along.reached == 16 * 4096 > max(each.breaks for each in planned.breaks if each.limit == "device memory")
    assert "device memory" not in [each.limit for each in along.breaks]
    assert any(each.startswith("layout.context=") for each in along.layout)
    assert tl.predict(tl.load(asked, [*along.layout, *_sequence_of(along.laid_out)])).fits
    assert planned.layout == ()
    assert (along.grid, planned.grid) == (True, False)


@pytest.mark.agreement
def test_a_layout_that_a_search_selected_is_printed_to_be_pasted_whole() -> None:
    given = ["cluster.device=h100-sxm", "cluster.count=8"]
    found = tl.breaks("llama-3.1-8b", given, along=["devices"], reach=4)
    (along,) = found.along
    assert f"--set layout.shard={found.run.layout.shard}" in text(page(found))
    if along.layout:
        laid_out = tl.load("llama-3.1-8b", [*given, *along.layout])
        assert not laid_out.origin.searched
        assert laid_out.cluster.count == along.laid_out


@pytest.mark.agreement
def test_no_layout_is_given_to_a_size_that_fits_nowhere() -> None:
    asked = tl.load("gpt2", ["cluster.device=a100-sxm-40gb", "cluster.count=8"], search=False)
    (along,) = tl.breaks(asked, along=["width"]).along
    (memory,) = (each for each in along.breaks if each.limit == "device memory")
    assert along.laid_out == memory.holds < memory.breaks <= along.reached
    heads, wide = along.laid_out // 64, 4 * along.laid_out
    sizes = (f"model.d_model={along.laid_out}", f"model.attention.n_heads={heads}", f"model.feed_forward.d_ff={wide}")
    pasted = ["cluster.device=a100-sxm-40gb", "cluster.count=8", *along.layout, *sizes]
    assert tl.predict(tl.load("gpt2", pasted)).fits


def _sequence_of(tokens: int) -> tuple[str, ...]:
    return (f"recipe.seq_len={tokens}", f"model.max_seq_len={max(tokens, 131072)}", "recipe.global_batch=16")


def test_layers_of_a_larger_run_go_over_its_stages_anew():
    run = tl.load({"model": {"preset": "llama-3-8b", "n_layers": 30}, "recipe": {"seq_len": 1024, "global_batch": 8,
                   "micro_batch": 1, "steps": 1}, "layout": {"pipeline": 4, "stage_layers": [7, 8, 8, 7]},
                   "cluster": {"device": "h100-sxm", "count": 4}})  # fmt: skip
    deeper = replace(run, model=replace(run.model, n_layers=62))
    assert _laid_out_as(run, deeper).layout.stage_layers == (15, 16, 16, 15)
    assert _laid_out_as(run, replace(run, model=replace(run.model, n_layers=64))).layout.stage_layers is None
    assert _laid_out_as(run, run) == run
