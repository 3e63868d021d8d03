"""The verb that says what a run will cost: its arguments, its times, and its width."""

import json

import pytest

from trainledger.api import load, plan
from trainledger.cli import main
from trainledger.report.plan import text
from trainledger.spec.problem import InvalidInput

L4 = ["--set", "cluster.device=l4"]


def call(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def time_rows(out):
    table = out.partition("Time on ")[2].partition("\n\n")[0]
    return dict(line.split("  ", 1) for line in table.splitlines()[3:])


@pytest.mark.parametrize(
    ("mfu", "sentence"),
    [
        ("0", "mfu = '0': must be between 1e-06 and 1; nearest that works: 1e-06"),
        ("-1", "mfu = '-1': must be between 1e-06 and 1; nearest that works: 1e-06"),
        ("200", "mfu = '200': is a share of the peak, above 0 and at most 1; nearest that works: 1"),
        ("45", "mfu = '45': is a share of the peak, above 0 and at most 1; nearest that works: 0.45"),
        ("0,5", "mfu = '0,5': is not a number; write it like 0.5, \"3e-4\" or \"50%\"; a comma only parts thousands, "
         "as in 4,096; nearest that works: 0.5"),
        *((each, f"mfu = '{each}': is not a number; write it like 0.5, \"3e-4\" or \"50%\"")
          for each in ("abc", "nan", "inf", "1e300", "")),
    ],
)  # fmt: skip
def test_an_mfu_that_is_no_share_is_a_sentence(capsys, mfu, sentence):
    assert call(capsys, "plan", "gpt2", *L4, f"--mfu={mfu}") == (2, "", sentence + "\n")


def test_an_mfu_in_percent_and_from_python(capsys):
    half, percent = (call(capsys, "plan", "gpt2", *L4, "--mfu", each)[1] for each in ("0.5", "50%"))
    assert half == percent
    run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 8, "global_batch": 1, "steps": 1}})
    with pytest.raises(InvalidInput, match="mfu = 0"):
        plan(run, mfu=0)


def test_a_model_beside_a_directory_of_its_name(capsys, tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "plan", "gpt2")[0] == 0
    assert call(capsys, "plan", "GPT2")[0] == 0
    code, _, err = call(capsys, "plan", "./gpt2")
    assert code == 2
    assert "Is a directory" in err


def test_a_model_alone_is_one_step_without_evaluation(capsys):
    code, out, _ = call(capsys, "plan", "gpt2", *L4)
    assert code == 0
    assert list(time_rows(out)) == ["step", "tokens/s", "MFU"]
    assert "A step: 1 sequence of 1,024 tokens" in out
    assert "One step, without evaluation and checkpoints;" in out
    told = json.loads(call(capsys, "plan", "gpt2", *L4, "--json")[1])["forecast"]
    assert (told["total_seconds"], told["device_hours"], told["seconds_by_phase"]) == (None, None, {})


@pytest.mark.parametrize(("steps", "named"), [(1, "1 step"), (2000, "2,000 steps")])
def test_the_rows_of_a_whole_run_sum_to_it(capsys, steps, named):
    words = ["plan", "gpt2", *L4, "--set", f"recipe.steps={steps}"]
    rows = time_rows(call(capsys, *words)[1])
    assert list(rows) == ["step", "tokens/s", "MFU", named, "evaluation", "in all", "device-hours"]
    told = json.loads(call(capsys, *words, "--json")[1])["forecast"]
    of_steps = steps * told["step_seconds"]
    assert told["total_seconds"] == pytest.approx(of_steps + told["seconds_by_phase"]["evaluation"])
    if steps == 1:
        assert rows[named].strip() == rows["step"].strip()


def test_every_line_fits_80_columns(capsys):
    long = "m" * 70
    words = ["--set", f"model.name={long}", "--set", "recipe.global_batch=1e9", "--set", "recipe.micro_batch=1e8"]
    words += ["--set", "recipe.tokens=1e18", "--set", "cluster.count=1e7", "--set", "cluster.price_per_device_hour=1e9"]
    code, out, err = call(capsys, "plan", "llama-3.1-405b", "--set", "cluster.device=h100-sxm", "--mfu=1e-6", *words)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert long in out


def test_nothing_is_infinite_at_the_bounds(capsys):
    words = ["--set", "recipe.tokens=1e18", "--set", "cluster.count=1e7", "--set", "cluster.price_per_device_hour=1e9"]
    code, out, _ = call(capsys, "plan", "gpt2", *L4, "--mfu=1e-6", *words, "--json")
    assert code == 0
    assert json.loads(out)["forecast"]["money"] > 0


def test_a_plan_has_no_minus_zero(capsys):
    run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 8, "global_batch": 1, "steps": 1}})
    assert "-0.0 %" not in text(plan(run))


def test_model_flops_by_another_convention(capsys):
    words = ["plan", "llama-3-8b", "--set", "cluster.device=h100-sxm", "--json"]
    assert main(words) == 0
    dense = json.loads(capsys.readouterr().out)
    assert main([*words, "--convention", "causal"]) == 0
    causal = json.loads(capsys.readouterr().out)
    assert causal["convention"] == "causal"
    assert causal["forecast"]["model_flops"] < dense["forecast"]["model_flops"]
    flops, mfu = (causal["forecast"][name] / dense["forecast"][name] for name in ("model_flops", "mfu"))
    assert abs(flops - mfu) < 1e-9
    assert main([*words[:-1], "--convention", "kasual"]) == 2
    assert "must be one of 6nd, 6nd+attention, dense, causal, kernels" in capsys.readouterr().err


def test_the_device_is_asked_for_what_stands_around_the_tensors(capsys):
    words = ["plan", "llama-3.2-1b", "--set", "cluster.device=h100-sxm", "--set", "recipe.seq_len=2048"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Around the tensors" in said
    assert "CUDA context 314.6 MB" in said
    assert "Fits in the 85.02 GB that the device gives." in " ".join(said.split())
    assert main([*words, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["device_memory"]
    assert held["fits"] is True
    assert held["nbytes"] == sum(each["nbytes"] for each in held["lines"])
    assert all(each["source"] for each in held["lines"])
