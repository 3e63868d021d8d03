"""The verbs fit and optimal: 80 columns, JSON, sentences for nonsense, and a light start."""

import json
import re
import subprocess
import sys

import pytest

from drawn import marks
from trainledger.answers.pages.plain_data import SECTIONS
from trainledger.cli import main
from trainledger.forecast.plan.fit import QUESTIONS
from trainledger.report.chart import GREY, Band, Bars, Line

pytestmark = pytest.mark.sweep

TINY = ["--set", "model.d_model=256", "--set", "model.n_layers=4", "--set", "model.vocab_size=2048",
        "--set", "model.attention.n_heads=4", "--set", "model.feed_forward.d_ff=1024",
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
        capsys, *OPTIMAL, "--family", "none", "--inference", "2T", "--unique", "50B", "--ratio", "200", "--full"
    )
    assert (code, err) == (0, "")
    assert out.startswith("As asked: 3.99B parameters on 799B tokens.")
    assert re.search(r"^20 tokens/parameter +12.6B +253B ", out, re.MULTILINE)
    assert "With 2T tokens served" in out
    assert "With 50B tokens in all" in out
    assert "asked: 200" in out
    assert narrow(out)


def test_optimal_goes_on_to_what_fits_and_is_paid_for(capsys):
    code, out, _ = call(
        capsys, "optimal", "--device", "l4", "--count", "2", "--days", "3", "--family", "gpt2", "--full"
    )
    assert code == 0
    assert "What fits, and what its predicted speed affords" in out
    assert "So the budget affords" in out
    assert "Memory allows" not in out
    assert narrow(out)


def test_optimal_in_json(capsys):
    words = ["optimal", "--device", "l4", "--count", "2", "--days", "3", "--family", "gpt2", "--json"]
    code, out, err = call(capsys, *words)
    answer = json.loads(out)
    assert (code, err) == (0, "")
    paid = answer["affordable"]
    assert paid["memory_nbytes"] <= paid["usable_nbytes"]
    # What is paid for is what the predicted speed does in the time, but for what belongs to a run beside its steps.
    seconds = 3 * 86400
    assert 0.9 * paid["tokens_per_second"] * seconds < paid["tokens"] <= paid["tokens_per_second"] * seconds
    peak = 2 * answer["budget"]["peak_flops_per_second"]
    assert paid["mfu_6nd"] == pytest.approx(6 * paid["parameters"] * paid["tokens_per_second"] / peak)
    # The rule holds for what is paid for, as near as members of the family and the rest of the run let it.
    assert paid["tokens_per_parameter"] == pytest.approx(20, rel=0.15)
    assert paid["iterations"][0]["wanted"] == pytest.approx(answer["parameters"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["optimal"], "budget: is given in exactly one way"),
        (["optimal", "--flops", "lots"], "flops = 'lots': is not a count"),
        (["optimal", "--days", "3", "--device", "l5", "--count", "2"], "device = 'l5': is not in the catalog"),
        (["optimal", "--flops", "1e22", "--params", "8B", "--ratio", "20"], "give one of them"),
        (["fit", "gpt-2"], "is not in the catalog"),
        (["fit", "gpt2", "--device", "h100-sxm", "--of", "speed"], "--of = 'speed': must be one of model, sequence"),
        (["fit", "gpt2", "--device", "h100-sxm", "--count", "many"], "cluster.count = 'many': is not a count"),
        (["fit", "gpt2", "--device", "h10"], "is not in the catalog"),
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
    code, out, err = call(
        capsys, "fit", "gpt2", "--device", "rtx-3090", "--count", "2", "--of", "model", *TINY, "--full", "--chance", "0"
    )
    assert code == 0
    assert "\nA step: 4 sequences of 512 tokens, in 2 micro-batches of 1\nbf16-sharded, adamw (fused), " in out
    assert "\n2 x rtx-3090\nLayout: shard 2\n" in out
    # What was given is not assumed.
    assert "seq_len" not in err
    assert err.startswith("Assuming ")
    assert narrow(err)
    assert "Without changes under FSDP 2, assumed (plan searches for a layout), every rank needs" in " ".join(
        out.split()
    )
    assert "too much: " in out
    assert "+ loss chunked: --set recipe.activation_checkpointing=full --set" in out
    assert "Models are scaled from gpt2: heads of 64" in out
    assert narrow(out)


@pytest.mark.parametrize("more", [["--set", "layout=auto"], ["--set", "layout.tensor=2"], []])
def test_fit_and_plan_hold_the_same_of_the_same_run(capsys, more):
    """What `fit` takes where nothing is said is pasted into `plan`; a layout that is searched for needs nothing."""
    words = ["llama-3.2-1b", "--device", "a100-sxm-80gb", *more]
    words += ["--count", "2" if more[1:] == ["layout.tensor=2"] else "16"]
    _, out, err = call(capsys, "fit", *words, "--of", "memory", "--as-is", "--json")
    answer = json.loads(out)
    _, shown, _ = call(capsys, "fit", *words, "--of", "memory", "--as-is", "--full")
    assert err.startswith("Assuming ")
    if "layout=auto" not in more:
        words += [word for each in answer["run"]["assumed"] for word in ("--set", each)]
    code, out, _ = call(capsys, "plan", *words, "--json")
    planned = json.loads(out)
    assert code == 0
    assert answer["memory"]["nbytes"] == planned["forecast"]["device_nbytes"]
    assert [answer["run"][name] for name in SECTIONS] == [planned["run"][name] for name in SECTIONS]
    assert answer["rows"][0]["answers"]["memory"]["size"] == answer["memory"]["nbytes"]
    _, text, _ = call(capsys, "plan", *words, "--full")
    run = shown.partition(" parameters, ")[2].partition("\nLayout: ")[0]
    assert run.startswith("16 layers")
    assert run in text
    assert narrow(shown)


def test_one_number_is_written_one_way(capsys):
    words = ["llama-3-70b", "--device", "a100-sxm-80gb", "--count", "512", "--of", "memory", "--as-is"]
    _, out, _ = call(capsys, "fit", *words)
    (held,) = re.findall(r"every rank needs (\d{3}\.\d GB)", " ".join(out.split()))
    assert re.search(rf"^unchanged +{held}$", out, re.MULTILINE)


def test_the_batch_of_a_rank_is_said(capsys):
    words = ["llama-3-8b", "--device", "a100-sxm-80gb", "--count", "8", "--of", "micro-batch", "--as-is"]
    _, out, _ = call(capsys, "fit", *words, "--chance", "0", "--full", "--set", "recipe.activation_checkpointing=full")
    printed = " ".join(out.split())
    size = int(re.findall(r"Largest micro-batch: (\d+) seq", printed)[0])
    assert size > 2
    assert f"(2 in a step, as before, make it {16 * size} sequences; the unchanged step has 16 sequences, " in printed
    assert "2 on each of 8 data ranks; the largest micro-batch that divides these is 2)" in printed


def test_fit_of_a_run_file_as_it_is(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npreset = "gpt2"\n[recipe]\nseq_len = 256\nglobal_batch = 8\nmicro_batch = 2\nsteps = 1\n'
        '[layout]\nshard = 2\n[cluster]\ndevice = "l4"\ncount = 2\n'
    )
    code, out, err = call(
        capsys, "fit", str(path), "--as-is", "--of", "sequence", "--of", "memory", "--json", "--chance", "0"
    )
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["recipe"] for row in answer["rows"]] == ["unchanged"]
    answers = answer["rows"][0]["answers"]
    assert set(answers) == {"sequence", "memory"}
    assert answers["sequence"]["memory"]["fits"] is True
    assert answers["sequence"]["beyond"]["fits"] is False
    assert answers["sequence"]["beyond_size"] == answers["sequence"]["size"] + 128
    assert "l4" in answer["devices_that_hold_it"]


@pytest.mark.process
@pytest.mark.parametrize("verb", ["fit", "optimal"])
def test_a_light_start(verb):
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
    where = tmp_path / "out.html"
    code, _, err = call(capsys, *OPTIMAL, "--family", "none", "--plot", str(where))
    assert code == 0
    assert str(where) in err
    page = where.read_text()
    assert "each with the tokens of 1.92e+22 FLOP" in page
    assert "1.96 standard errors of the fit" in page


def test_the_figures_of_optimal_have_what_was_asked() -> None:
    from trainledger.answers.budget import optimal
    from trainledger.answers.pages.optimal import about
    from trainledger.answers.pages.optimal_figures import figures

    plain = optimal(flops="6e23", family=None)
    asked = optimal(flops="6e23", family=None, params="8B", inference="2T", unique="100B")
    assert asked.asked is not None
    assert asked.served is not None
    assert asked.repeated is not None
    iso, frontier, plane = figures(asked)
    before = [len(each.marks) for each in figures(plain)]
    assert [len(each.marks) for each in (iso, frontier, plane)] == [each + 3 for each in before]
    points = (asked.asked, asked.served, asked.repeated)
    assert [each.xs[0] for each in marks(iso, Line)[-3:]] == [each.parameters for each in points]
    assert [each.xs[0] for each in marks(frontier, Line)[-3:]] == [6 * each.parameters * each.tokens for each in points]
    for chart in (iso, frontier):
        losses = [each.ys[0] for each in marks(chart, Line)[-3:]]
        assert losses[0] == asked.asked.loss
        # The one to serve reaches the loss of the optimum of training alone.
        best = asked.loss_law.parameters(6e23).value
        assert losses[1] == pytest.approx(asked.loss_law.loss(best, 1e23 / best), rel=1e-6)
        assert losses[2] == asked.repeated.loss
    said = " ".join(about(asked))
    assert "requested: 8B parameters on 12.5T tokens, loss 2.024." in said
    assert "cheapest with 2T tokens served: 51.2B parameters on 2.06T tokens" in said


def test_fit_draws_what_it_says() -> None:
    from trainledger.answers.fit import about, figures, fit
    from trainledger.answers.load import load
    from trainledger.answers.pages.memory import COLOUR_OF

    recipe = {"seq_len": 1024, "global_batch": 1, "micro_batch": 1, "steps": 1}
    found = fit(load({"model": {"preset": "gpt2"}, "recipe": recipe, "cluster": {"device": "rtx-4090"}}))
    memory, model, sequence, *_ = figures(found)
    assert (model.title, sequence.title) == (QUESTIONS["model"], QUESTIONS["sequence"])
    needed = [held.nbytes / 1e9 for row in found.rows if (held := row.answers["memory"].memory)]
    assert marks(memory, Bars)[-1].ends == pytest.approx(needed)
    assert marks(model, Bars)[0].ends == [row.answers["model"].size for row in found.rows]
    assert [each.start for each in marks(memory, Band)] == [(found.memory.usable_nbytes or 0) / 1e9]
    for each in marks(memory, Bars):  # a category has the colour that it has wherever memory is drawn
        assert each.colour == COLOUR_OF.get(each.name, GREY)
    assert "gpt2: 124,439,808 parameters" in about(found)[0]


def test_devices_said_by_set_are_those_said_by_count(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for said in (["--count", "8"], ["--set", "cluster.count=8"]):
        assert main(["fit", "gpt2", "--device", "h100-sxm", *said, "--of", "micro-batch", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["run"]["layout"]["shard"] == 8
