"""The verbs fit and optimal: 80 columns, JSON, sentences for nonsense, and a light start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trainledger.cli import LIGHT, main

TINY = ["--set", "model.d_model=256", "--set", "model.n_layers=4", "--set", "model.vocab_size=2048",
        "--set", "model.n_heads=4", "--set", "model.d_ff=1024",
        "--set", "recipe.seq_len=512"]  # fmt: skip
OPTIMAL = ["optimal", "--device", "h100-sxm", "--count", "32", "--days", "2w"]


def call(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def narrow(text):
    return max(map(len, text.splitlines())) <= 80


def test_optimal_says_the_worked_example_and_stays_in_80_columns(capsys):
    code, out, err = call(
        capsys, *OPTIMAL, "--family", "none", "--inference", "2T", "--unique", "50B", "--ratio", "200"
    )
    assert (code, err) == (0, "")
    assert "By 20 tokens per parameter: 12.6B parameters on 253B tokens" in out
    assert "With 2T tokens served" in out
    assert "With 50B tokens in all" in out
    assert "asked: 200" in out
    assert narrow(out)


def test_optimal_goes_on_to_what_fits_and_is_paid_for(capsys):
    code, out, _ = call(capsys, "optimal", "--device", "l4", "--count", "2", "--days", "3", "--family", "gpt2")
    assert code == 0
    assert "What fits, and what its predicted speed pays for" in out
    assert "So the budget pays for" in out
    assert "Memory allows" not in out
    assert narrow(out)


def test_optimal_in_json(capsys):
    words = ["optimal", "--device", "l4", "--count", "2", "--days", "3", "--family", "gpt2", "--json"]
    code, out, err = call(capsys, *words)
    told = json.loads(out)
    assert (code, err) == (0, "")
    paid = told["paid"]
    assert paid["held_nbytes"] <= paid["usable_nbytes"]
    # What is paid for is what the predicted speed does in the time, but for what belongs to a run beside its steps.
    seconds = 3 * 86400
    assert 0.9 * paid["tokens_per_second"] * seconds < paid["tokens"] <= paid["tokens_per_second"] * seconds
    peak = 2 * told["budget"]["peak_flops_per_second"]
    assert paid["mfu_6nd"] == pytest.approx(6 * paid["parameters"] * paid["tokens_per_second"] / peak)
    # The rule holds for what is paid for, as near as members of the family and the rest of the run let it.
    assert paid["tokens_per_parameter"] == pytest.approx(20, rel=0.15)
    assert paid["rounds"][0]["wanted"] == pytest.approx(told["parameters"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["optimal"], "budget: is said in exactly one way"),
        (["optimal", "--flops", "lots"], "flops = 'lots': is not a count"),
        (["optimal", "--days", "3", "--device", "l5", "--count", "2"], "device = 'l5': is not in the catalog"),
        (["optimal", "--flops", "1e22", "--params", "8B", "--ratio", "20"], "not allowed with argument"),
        (["fit", "gpt-2"], "is not in the catalog"),
        (["fit", "gpt2", "--device", "h100-sxm", "--of", "speed"], "of = 'speed': must be some of model, sequence"),
        (["fit", "gpt2", "--device", "h100-sxm", "--count", "many"], "--count = 'many': is not a count"),
        (["fit", "gpt2", "--device", "h100"], "is not in the catalog"),
    ],
)
def test_nonsense_is_a_sentence(capsys, words, sentence):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err
    code, out, _ = call(capsys, *words, "--json")
    assert code == 2
    assert json.loads(out)["error"]


def test_fit_of_a_model_in_80_columns(capsys):
    code, out, err = call(capsys, "fit", "gpt2", "--device", "rtx-3090", "--count", "2", "--of", "model", *TINY)
    assert (code, err) == (0, "")
    assert "gpt2 on 2 x rtx-3090: sequences of 512 tokens, micro-batch 1" in out
    assert "As it is, every rank holds" in out
    assert "too much: " in out
    assert "+ loss in chunks: --set recipe.activation_checkpointing=full --set" in out
    assert "Models are the family of gpt2: heads of 64" in out
    assert narrow(out)


def test_fit_of_a_run_file_as_it_is(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npreset = "gpt2"\n[recipe]\nseq_len = 256\nglobal_batch = 8\nmicro_batch = 2\nsteps = 1\n'
        '[layout]\nshard = 2\n[cluster]\ndevice = "l4"\ncount = 2\n'
    )
    code, out, err = call(capsys, "fit", str(path), "--as-is", "--of", "sequence", "--of", "memory", "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["recipe"] for row in told["rows"]] == ["as it is"]
    answers = told["rows"][0]["answers"]
    assert set(answers) == {"sequence", "memory"}
    assert answers["sequence"]["held"]["fits"] is True
    assert answers["sequence"]["beyond"]["fits"] is False
    assert answers["sequence"]["beyond_size"] == answers["sequence"]["size"] + 128
    assert "l4" in told["devices_that_hold_it"]


@pytest.mark.parametrize("verb", ["fit", "optimal"])
def test_a_light_start(verb):
    assert verb in LIGHT
    words = {
        "fit": ["fit", "gpt2", "--device", "l4", "--of", "memory"],
        "optimal": ["optimal", "--device", "l4", "--count", "2", "--days", "1", "--family", "gpt2"],
    }[verb]
    heavy = "{'torch', 'numpy', 'sympy', 'rich', 'plotly', 'transformers'}"
    verdict = f"assert main({words!r}) == 0; print(sorted({heavy} & set(sys.modules)))"
    code = f"import sys; from trainledger.cli import main; {verdict}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_figures_of_optimal(capsys, tmp_path):
    pytest.importorskip("plotly")
    where = tmp_path / "out.html"
    code, _, err = call(capsys, *OPTIMAL, "--family", "none", "--plot", str(where))
    assert code == 0
    assert str(where) in err
    page = where.read_text()
    assert "One budget: 1.92e+22 FLOP" in page
    assert "1.96 standard errors of the fit" in page


def test_fit_draws_what_it_says() -> None:
    from trainledger.loaded import load
    from trainledger.questions import fit
    from trainledger.report.fit import figures

    recipe = {"seq_len": 1024, "global_batch": 1, "micro_batch": 1, "steps": 1}
    found = fit(load({"model": {"preset": "gpt2"}, "recipe": recipe, "cluster": {"device": "rtx-4090"}}))
    drawn = figures(found)
    assert {"memory", "model", "sequence"} <= set(drawn)
    for at, row in enumerate(found.rows):
        held = row.answers["memory"].held
        assert held is not None
        assert sum(each["x"][at] for each in drawn["memory"]["data"]) == pytest.approx(held.nbytes / 1e9)
    assert drawn["model"]["data"][0]["x"] == [row.answers["model"].size for row in found.rows]
