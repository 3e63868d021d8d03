"""Questions of a run made by hand: refused by the rules of a run file, and answered as the run of a file is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import trainledger as tl
from models import sizes
from trainledger.spec import runfile
from trainledger.spec.parts import from_fields, with_fields

pytestmark = pytest.mark.sweep

SPREAD = {
    "model": {"preset": "teach-10m"},
    "recipe": {"seq_len": 256, "global_batch": 16, "steps": 100, "precision": "bf16-sharded"},
    "layout": {"shard": 8},
    "cluster": {"device": "h100-sxm", "count": 8, "price_per_device_hour": 2.0},
}
QUESTIONS: dict[str, Callable[[Any], object]] = {
    "account": tl.account,
    "advise": lambda run: tl.advise(run, together=0),
    "breaks": lambda run: tl.breaks(run, along="sequence", most=1),
    "compare": lambda run: tl.compare(tl.load(SPREAD), run),
    "fit": lambda run: tl.fit(run, of="memory", changes=False),
    "inference": tl.inference,
    "plan": tl.plan,
    "predict": tl.predict,
}


def changed(fields: dict[str, Any]) -> tl.Run:
    """The run with fields put in by hand, unread and unchecked."""
    run = tl.load(SPREAD)
    for path, value in fields.items():
        section, _, name = path.partition(".")
        part = getattr(run, section)
        part = with_fields(part, {name: value}) if "." in name else replace(part, **{name: value})
        run = replace(run, **{section: part})
    return run


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(tl.InvalidInput) as caught:
        ask()
    return str(caught.value)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_refuses_a_batch_that_no_ranks_share(question: str) -> None:
    sentence = refusal(lambda: QUESTIONS[question](changed({"recipe.global_batch": 20})))
    assert sentence.startswith("recipe.global_batch = 20: must be a multiple of the 8 data ranks")
    assert sentence.endswith("nearest that works: 24" if "24" in sentence else "nearest that works: 16")


@pytest.mark.parametrize(
    "fields",
    [
        {"recipe.global_batch": 1},
        {"recipe.micro_batch": 3},
        {"recipe.seq_len": 4096},
        {"recipe.tokens": -5, "recipe.steps": None},
        {"recipe.precision": "bf17"},
        {"recipe.seed": "x"},
        {"layout.shard": 4},
        {"layout.shard": 16},
        {"layout.overlap": ("nothing",)},
        {"model.attention.n_heads": 7},
        {"model.attention.n_kv_heads": 5},
        {"model.d_model": 2.5},
        {"cluster.device": "h10"},
        {"cluster.network": "no-link"},
    ],
    ids=str,
)
def test_a_run_made_by_hand_is_refused_as_the_file_that_says_the_same(fields: dict[str, Any]) -> None:
    written = {name: "none" if value is None else value for name, value in fields.items()}
    assert refusal(lambda: tl.predict(changed(fields))) == refusal(lambda: tl.load(SPREAD, written))


def test_an_account_alone_takes_a_layout_whose_devices_nobody_counted() -> None:
    by_hand = changed({"layout.shard": 4})
    assert tl.account(by_hand) == tl.account(tl.load(SPREAD, {"layout.shard": 4, "cluster.count": 4}))
    assert "cluster.count = 8: the layout (shard 4) takes 4" in refusal(lambda: tl.predict(by_hand))


def test_text_in_a_field_is_read_as_in_a_run_file() -> None:
    by_hand = changed({"recipe.tokens": "1M", "recipe.steps": None})
    assert tl.predict(by_hand) == tl.predict(tl.load(SPREAD, {"recipe.tokens": 10**6, "recipe.steps": None}))


@pytest.mark.slow
def test_a_layout_that_is_to_be_found_is_searched_for_as_load_does() -> None:
    by_hand = replace(tl.load(SPREAD), layout=tl.Layout(auto=True))
    forecast = tl.predict(by_hand)
    assert forecast == tl.predict(tl.load({**SPREAD, "layout": "auto"}))
    alone = tl.predict(replace(by_hand, layout=tl.Layout()))
    assert forecast.step_seconds is not None
    assert alone.step_seconds is not None
    assert forecast.step_seconds < alone.step_seconds


@pytest.mark.agreement
def test_the_runs_that_a_question_tries_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    parse = runfile.parse
    monkeypatch.setattr(runfile, "parse", lambda *given, **named: parsed.append(1) or parse(*given, **named))
    run = tl.load(SPREAD)
    assert len(parsed) == 1
    tl.predict(run)
    assert len(parsed) == 2
    assert tl.layouts(run, limit_seconds=5).accounted > 2
    assert len(parsed) == 3


@pytest.mark.parametrize("question", [*QUESTIONS, "layouts", "machine_of", "device_of"])
@pytest.mark.parametrize("given", ["gtp2", None, 5, {"model": {}}], ids=str)
def test_what_is_no_run_is_a_sentence(question: str, given: object) -> None:
    sentence = refusal(lambda: QUESTIONS.get(question, getattr(tl, question))(given))
    assert (
        f"not {type(given).__name__}" in sentence or "nearest that works: gpt2" in sentence or "is missing" in sentence
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_takes_what_load_takes(question: str) -> None:
    path, changes = tl.load(SPREAD), {"recipe.global_batch": 32}
    if question == "compare":
        assert tl.compare(path, SPREAD, changes) == tl.compare(tl.load(path, changes), tl.load(SPREAD, changes))
        return
    ask: Callable[..., object] = getattr(tl, question)
    more: dict[str, Any] = {"advise": {"together": 0}, "breaks": {"along": "sequence"}, "fit": {"of": "memory"}}.get(
        question, {}
    )  # type: ignore[assignment]
    assert ask(SPREAD, changes, **more) == ask(tl.load(path, changes), **more)


def test_a_model_alone_is_a_run_of_one_step_as_its_name_is() -> None:
    by_name, by_hand = tl.plan("gpt2"), tl.plan(tl.model("gpt2"))
    assert by_hand.run == by_name.run
    assert by_hand.run.origin.assumed == by_name.run.origin.assumed


def test_a_ledger_is_no_run_and_a_run_is_no_model() -> None:
    run = tl.load(SPREAD)
    assert "a dict of sections or a Run, not int" in refusal(lambda: tl.predict(7))  # type: ignore[arg-type]
    assert "trainledger.on_device says" in refusal(lambda: tl.predict(tl.account(run)))  # type: ignore[arg-type]
    assert "a Run has its own as run.model" in refusal(lambda: tl.parameters(run))  # type: ignore[arg-type]
    assert "must be a Ledger" in refusal(lambda: tl.on_device(run, "l4"))  # type: ignore[arg-type]


def test_parameters_of_a_model_whose_fields_contradict_each_other() -> None:
    shape: dict[str, Any] = sizes(V=64, F=128, L=2, T=64, H=4)
    assert "model.attention.n_heads = 4: must divide d_model = 65" in refusal(
        lambda: tl.parameters(from_fields(tl.ModelSpec, {"d_model": 65, **shape}))
    )
    assert tl.parameters(from_fields(tl.ModelSpec, {"d_model": 64, **shape})).by_component["embedding"] == 64 * 64


def test_numbers_may_be_text_and_one_name_needs_no_list() -> None:
    run = tl.load(SPREAD)
    assert tl.breaks(run, along="sequence", exposed="20%", unique_tokens="15T", reach="64", most="3") == tl.breaks(
        run, along=["sequence"], unique_tokens=15 * 10**12
    )
    assert tl.inference(run, batch="16", context="0.25k").serving == tl.inference(run, batch=16, context=256).serving
    assert tl.fit(run, of="memory", changes=False) == tl.fit(run, of=["memory"], changes=False)
    assert tl.plan(run, mfu="40%").napkin == tl.plan(run, mfu=0.4).napkin


@pytest.mark.parametrize(
    ("question", "given", "sentence"),
    [
        ("breaks", {"along": "sequenc"}, "along = 'sequenc': must be one of sequence"),
        ("breaks", {"along": [3]}, "along = 3: must be one of sequence"),
        ("breaks", {"exposed": "200%"}, "exposed = '200%': must be between 0 and 1"),
        ("breaks", {"most": 0}, "most = 0: must be between 1 and 20; nearest that works: 1"),
        ("advise", {"goal": 3}, "goal = 3: must be one of time, memory"),
        ("advise", {"together": "three"}, "together = 'three': is not a count"),
        ("inference", {"batch": "x", "phase": "decod"}, "batch = 'x': is not a count"),
        ("inference", {"batch": "x", "phase": "decod"}, "phase = 'decod': must be one of prefill, decode; nearest"),
        ("layouts", {"devices": 0}, "cluster.count = 0: must be at least 1"),
        ("layouts", {"devices": -1}, "cluster.count = -1: must be at least 1"),
        ("layouts", {"keep": 0}, "keep = 0: must be between 1 and 1,000"),
        ("layouts", {"limit_seconds": "10 apples"}, "limit_seconds = '10 apples': "),
        ("layouts", {"fixed": {"tensr": 8}}, "fixed tensr = 8: is not searched"),
        ("layouts", {"fixed": {"tensor": "many"}}, "fixed tensor = 'many': is not a count"),
    ],
)
def test_a_wrong_argument_is_named_as_python_names_it(question: str, given: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(lambda: getattr(tl, question)(tl.load(SPREAD), **given))


@pytest.mark.agreement
def test_layouts_take_values_in_text_and_say_what_else_would_do() -> None:
    run = tl.load(SPREAD)
    in_text = tl.layouts(run, devices="8", fixed={"tensor": "2"}, keep="1", limit_seconds="5min")
    assert in_text.best == tl.layouts(run, fixed={"tensor": 2}, keep=1).best
    none = tl.layouts(run, fixed={"tensor": 7})
    assert none.best is None
    assert none.problem is not None
    assert str(none.problem).endswith("tensor = 7; nearest that works: layout.tensor=2")


def test_a_ledger_is_timed_on_a_device_by_its_name() -> None:
    from trainledger.forecast.predict.step import on_device

    ledger = tl.account(tl.load(SPREAD))
    found = tl.on_device(ledger, "h100-sxm")
    assert found == tl.on_device(ledger, tl.device("h100-sxm")) == on_device(ledger, tl.device("h100-sxm"))
    assert repr(found).startswith("OnDevice(h100-sxm, step ")
    assert "device = 'h10': is not in the catalog" in refusal(lambda: tl.on_device(ledger, "h10"))


def test_the_plan_is_a_function_beside_the_package_of_its_name() -> None:
    import trainledger.forecast.plan.napkin  # noqa: F401  # binds the package

    made = tl.plan(tl.load(SPREAD))
    assert len(made.ranks) >= 1
    assert made.forecast == tl.predict(tl.load(SPREAD))


def test_runs_and_forecasts_are_shown_in_a_line() -> None:
    run = tl.load(SPREAD, {"model.name": "small"})
    assert repr(run) == "Run(small: 16 x 256 tokens a step, bf16-sharded, adamw, shard 8, 8 x h100-sxm)"
    forecast = tl.predict(run)
    assert "notes" not in repr(forecast)


def test_a_forecast_without_a_machine_says_why_it_has_no_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    printed = repr(tl.predict(tl.load({"model": {"preset": "gpt2"}, "recipe": SPREAD["recipe"]})))
    assert printed.startswith("Forecast(peak_nbytes=")
    assert "no step time and no MFU: this machine was not measured yet" in printed
    assert "--" not in printed
