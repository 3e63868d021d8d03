"""The verb that says what a run will cost: its arguments, its times, and its width."""

import json
from fractions import Fraction

import pytest

from trainledger.answers.load import load
from trainledger.answers.plan import plan
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.sweep

L4 = ["--set", "cluster.device=l4"]


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    """This machine as one that was not measured, whatever the reader's cache holds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)


def call(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def costs(out):
    """What is said of each cost: its lines joined, by name."""
    found, name = {}, ""
    shown = next(part for part in out.split("\n\n") if part.startswith(("step ", "time ")))
    for line in shown.splitlines():
        name = line[:12].strip() or name
        found[name] = f"{found.get(name, '')} {line[12:]}".strip()
    return found


def pasted(out):
    """The layout that a search offers to a run file."""
    return out.partition("To paste into a run file\n")[2].partition("activation_checkpointing")[0]


def spread(tmp_path, model, device, count, batch=1):
    """A run file with several devices and no layout."""
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\npreset = "{model}"\n[recipe]\nseq_len = 1024\nglobal_batch = {batch}\nsteps = 1\n'
        f'[cluster]\ndevice = "{device}"\ncount = {count}\n'
    )
    return str(path)


def bars(out):
    """The lines of the waterfall, as (cause, share)."""
    shown = out.rpartition("Where the time of")[2].partition("\n\n")[0].splitlines()[1:]
    return [(line[:26].strip(), float(line[36:].split()[0])) for line in shown]


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
          for each in ("abc", "nan", "inf", "")),
        ("1e300", "mfu = '1e300': is a share of the peak, above 0 and at most 1; nearest that works: 1"),
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
    code, out, _ = call(capsys, "plan", "gpt2", *L4, "--full")
    assert code == 0
    assert list(costs(out)) == ["step", "speed", "memory", "bottleneck"]
    assert "A step: 1 sequence of 1,024 tokens" in out
    assert "One step, without evaluation and checkpoints;" in out
    assert "Where the time of a step goes" in out
    forecast = json.loads(call(capsys, "plan", "gpt2", *L4, "--json")[1])["forecast"]
    assert (forecast["total_seconds"], forecast["device_hours"], forecast["seconds_by_phase"]) == (None, None, {})
    assert sum(each["seconds"] for each in forecast["waterfall"]) == pytest.approx(forecast["step_seconds"])


def test_the_bars_of_a_step_sum_to_the_step_that_is_said(capsys, tmp_path):
    words = ["plan", spread(tmp_path, "gpt2", "l4", 8)]
    code, out, err = call(capsys, *words)
    assert " on one device alone" in costs(out)["step"]
    assert code == 2
    said = " ".join(err.split())
    assert said.startswith(
        "layout: is missing, so 8 devices cannot share this run: 1 sequence a step cannot be divided"
    )
    assert said.endswith("nearest that works: layout=auto")
    forecast = json.loads(call(capsys, *words, "--json")[1])["forecast"]
    assert sum(each["nanoseconds"] for each in forecast["waterfall"]) == round(
        Fraction(forecast["step_seconds"]) * 10**9
    )


def test_what_does_not_fit_is_said_with_what_helps(capsys, tmp_path):
    said = costs(call(capsys, "plan", spread(tmp_path, "llama-3-70b", "h100-sxm", 64))[1])
    assert said["memory"].startswith("does NOT fit: ")
    assert said["bottleneck"].startswith("device memory: one device that does all of it alone needs ")
    assert said["bottleneck"].endswith("a [layout] spreads it (--set layout=auto looks for one)")


def test_figures_of_a_plan_are_written(capsys, tmp_path):
    path = tmp_path / "plan.html"
    assert call(capsys, "plan", "gpt2", *L4, "--plot", str(path))[0] == 0
    page = path.read_text()
    assert "Where the time of a step goes" in page
    assert "Memory over one step" in page
    code, out, err = call(capsys, "plan", "gpt2", *L4, "--plot", str(tmp_path / "plan.gif"))
    assert (code, out) == (2, "")
    assert "must be one of .html, .png, .svg" in err


@pytest.mark.parametrize(("steps", "named"), [(1, "1 step"), (2000, "2,000 steps")])
def test_the_rows_of_a_whole_run_sum_to_it(capsys, steps, named):
    words = ["plan", "gpt2", *L4, "--set", f"recipe.steps={steps}"]
    out = call(capsys, *words)[1]
    assert list(costs(out)) == ["time", "speed", "devices", "energy", "memory", "bottleneck"]
    assert f" for {named} of " in costs(out)["time"]
    forecast = json.loads(call(capsys, *words, "--json")[1])["forecast"]
    of_steps = steps * forecast["step_seconds"]
    more = forecast["seconds_by_phase"]["evaluation"] + forecast["seconds_by_phase"]["checkpoint"]
    assert forecast["total_seconds"] == pytest.approx(of_steps + more, rel=1e-4)
    assert sum(forecast["seconds_by_phase"].values()) == pytest.approx(forecast["total_seconds"])
    assert sum(each["nanoseconds"] for each in forecast["waterfall"]) == round(
        Fraction(forecast["total_seconds"]) * 10**9
    )
    *causes, whole = bars(out)
    assert whole == ("in all", 100.0)
    assert sum(share for _, share in causes) == pytest.approx(100, abs=0.05 * len(causes))


def test_a_plan_says_money_energy_and_interruptions_of_a_large_run(capsys):
    words = ["plan", "llama-3-8b", "--set", "cluster.device=h100-sxm", "--set", "cluster.count=1024"]
    words += ["--set", "recipe.tokens=1T", "--set", "recipe.global_batch=1024", "--set", "recipe.micro_batch=1"]
    words += ["--set", "layout.shard=1024", "--set", "cluster.price_per_device_hour=2.5"]
    words += ["--set", "cluster.power_usage_effectiveness=1.2", "--set", "cluster.grid_kg_co2_per_kwh=0.4"]
    words += ["--set", "recipe.precision=bf16-mixed"]
    code, out, err = call(capsys, *words, "--full")
    assert code == 2
    assert "values memory: does NOT fit: a device needs 97.22 GB and has 85.02 GB usable; " in " ".join(err.split())
    said = costs(out)
    forecast = json.loads(call(capsys, *words, "--json")[1])["forecast"]
    money, between = 2.5 * forecast["device_hours"], forecast["intervals"]["money"]
    assert said["money"].startswith(f"{money:,.0f} (80 %: ")
    assert said["money"].endswith(" device-hours at 2.5")
    assert between["low"] < money < between["high"]
    energy = forecast["device_hours"] * 0.7 * 1.2
    assert said["energy"] == f"{energy:,.0f} kWh at the rated power, PUE 1.2; {0.4 * energy:,.0f} kg of CO2"
    assert said["bottleneck"].startswith(forecast["bottleneck"]["name"])
    assert forecast["interruptions"] == pytest.approx(forecast["device_hours"] / 50677, rel=0.01)
    assert {"checkpoints", "failures"} <= {name for name, _ in bars(out)}
    assert "an interruption every 50,677 device-hours [Llama 3 (arXiv 2407.21783)]" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 80
    own = call(capsys, *words, "--set", "cluster.mtbf_device_hours=1e12", "--json")[1]
    assert json.loads(own)["forecast"]["interruptions"] < 1e-5


def test_every_line_fits_80_columns(capsys):
    long = "m" * 70
    words = ["--set", f"model.name={long}", "--set", "recipe.global_batch=1e9", "--set", "recipe.micro_batch=1"]
    words += ["--set", "recipe.tokens=1e18", "--set", "cluster.count=1e7", "--set", "cluster.price_per_device_hour=1e9"]
    words += ["--set", "layout.replicate=1e7"]
    code, out, _ = call(capsys, "plan", "llama-3.1-405b", "--set", "cluster.device=h100-sxm", "--mfu=1e-6", *words)
    assert code == 2, "the model does not fit on a device"
    assert max(len(line) for line in out.splitlines()) <= 80
    assert long in out


def test_nothing_is_infinite_at_the_bounds(capsys, tmp_path):
    words = ["--set", "recipe.steps=", "--set", "recipe.tokens=1e18", "--set", "cluster.price_per_device_hour=1e9"]
    file = spread(tmp_path, "gpt2", "l4", 10**7, batch=10**7)
    code, out, _ = call(capsys, "plan", file, "--set", "recipe.micro_batch=1", "--mfu=1e-6", *words, "--json")
    assert code == 2, "a whole sequence on each device does not fit"
    assert json.loads(out)["forecast"]["money"] > 0


def test_a_plan_has_no_minus_zero(capsys):
    run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 8, "global_batch": 1, "steps": 1}})
    assert "-0.0 %" not in str(plan(run))


def test_model_flops_by_another_convention(capsys):
    words = ["plan", "llama-3.2-1b", "--set", "cluster.device=h200", "--set", "recipe.seq_len=4096", "--json"]
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
    assert main([*words, "--full"]) == 0
    said = capsys.readouterr().out
    assert "Outside the tensors" in said
    assert "CUDA context 314.6 MB" in said
    assert "GB in all of 85.02 GB of usable memory: fits (chance over 99 %)." in " ".join(said.split())
    assert main([*words, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["device_memory"]
    assert held["fits"] is True
    assert held["nbytes"] == sum(each["nbytes"] for each in held["lines"])
    assert all(each["source"] for each in held["lines"])


def test_an_option_of_the_other_phase_is_refused(capsys):
    for words, sentence in (
        (["--phase", "decode", "--mfu=-1"], "--mfu = '-1': is for training; a served model has no MFU: leave it out"),
        (
            ["--batch", "3"],
            "--batch = '3': is for a served model; give --phase too; nearest that works: --phase decode",
        ),
    ):
        assert call(capsys, "plan", "gpt2", *L4, *words) == (2, "", sentence + "\n")


def test_device_and_count_are_short_for_their_fields(capsys):
    short = call(capsys, "plan", "gpt2", "--device", "l4", "--count", "2", "--set", "recipe.micro_batch=1")
    assert short == call(capsys, "plan", "gpt2", *L4, "--set", "cluster.count=2", "--set", "recipe.micro_batch=1")
    assert short[0] == 0
    for verb in (["rules"], ["explain", "parameters"], ["compare", "--set-b", "recipe.global_batch=2"]):
        code, out, _ = call(capsys, *verb, "gpt2", "--device", "l4", "--json")
        assert code == 0
        assert out == call(capsys, *verb, "gpt2", *L4, "--json")[1]


def test_a_model_on_several_devices_gets_the_batch_and_the_layout_of_the_search(capsys):
    words = ["gpt2", "--device", "l4", "--count", "4", "--full"]
    code, out, err = call(capsys, "plan", *words)
    assert code == 0
    assert (code, out, err) == call(capsys, "plan", *words, "--set", "layout=auto")
    assert "A step: 256 sequences of 1,024 tokens" in out
    assert "recipe.global_batch=256 (262.1K tokens in a step)" in " ".join(err.split())
    assert pasted(call(capsys, "layouts", *words, "--keep", "1")[1]) in out
    said = call(capsys, "plan", "gpt2", *L4, "--set", "cluster.count=4", "--set", "layout=auto",
                "--set", "recipe.global_batch=8", "--full")  # fmt: skip
    assert "A step: 8 sequences of 1,024 tokens" in said[1]
    assert "recipe.global_batch" not in said[2]


@pytest.mark.slow
def test_a_search_says_where_it_takes_shorter_sequences_than_a_plan(capsys):
    words = ["plan", "llama-3.2-1b", "--device", "a100-sxm-80gb", "--set", "recipe.global_batch=64", "--full"]
    assert "A step: 64 sequences of 131,072 tokens" in call(capsys, *words)[1]
    words += ["--count", "8"]
    code, out, err = call(capsys, *words)
    assert code == 0
    assert "A step: 64 sequences of 8,192 tokens" in out
    assert err.startswith("Assuming recipe.seq_len=8192 (of 131,072 that the model takes),")
    assert "seq_len" not in call(capsys, *words, "--set", "recipe.seq_len=4096")[2]


def test_one_device_gets_what_the_search_finds_too(capsys):
    code, out, err = call(capsys, "plan", "gpt2", *L4, "--set", "layout=auto", "--full")
    assert code == 0
    assert "A step: 256 sequences of 1,024 tokens" in out
    assert "recipe.global_batch=256 (262.1K" in err
    found = pasted(call(capsys, "layouts", "gpt2", *L4, "--keep", "1", "--full")[1])
    assert "micro_batch = " in found
    assert found in out


def test_programs_get_the_layout_that_was_found(capsys):
    words = ["gpt2", *L4, "--set", "cluster.count=4", "--set", "recipe.global_batch=64"]
    said = json.loads(call(capsys, "plan", *words, "--set", "layout=auto", "--json")[1])["run"]
    best = json.loads(call(capsys, "layouts", *words, "--keep", "1", "--json")[1])["ranked"][0]
    assert said["layout"]["shard"] * said["layout"]["replicate"] == 4
    assert {name: value for name, value in said["layout"].items() if value is not None} == best["layout"]
    assert said["recipe"]["micro_batch"] == best["micro_batch"]
    assert said["recipe"]["activation_checkpointing"]["kind"] == best["activation_checkpointing"]
    assert (said["cluster"]["device"], said["cluster"]["count"]) == ("l4", 4)


def test_a_bar_that_takes_away_is_explained(capsys):
    tuned = ["--set", "recipe.lora.rank=8", "--set", "recipe.seq_len=256"]
    out = " ".join(call(capsys, "plan", "llama-3-8b", *L4, *tuned, "--full")[1].split())
    assert "6 N D counts gradients of frozen weights as matmuls too, which is more than attention adds" in out
    assert "as matmuls too" not in call(capsys, "plan", "llama-3-8b", *L4, "--full")[1]


def test_layers_of_many_stages_are_reported_in_few_words(capsys):
    layers = [0, *[1] * 46, 0]
    words = ["plan", "gpt2-xl", *L4, "--set", "cluster.count=8", "--set", "layout.pipeline=8", "--set",
             "layout.virtual_stages=6", "--set", "layout.schedule=interleaved", "--set", "model.n_layers=46",
             "--set", f"layout.stage_layers={layers}", "--set", "recipe.global_batch=8", "--set",
             "recipe.micro_batch=1"]  # fmt: skip
    code, out, _ = call(capsys, *words, "--full")
    assert code == 0
    assert "stage_layers 0, 46 x 1, 0" in " ".join(out.split())


def test_a_served_model_that_no_batch_fits_gets_the_tensor_ranks_that_hold_it(capsys):
    code, _, err = call(capsys, "plan", "llama-3-70b", "--phase", "decode", "--device", "h100-sxm")
    assert code == 2
    assert "nor does any other batch; nearest that works: --count 2 --set layout.tensor=2" in err
    words = ["--count", "2", "--set", "layout.tensor=2"]
    assert call(capsys, "plan", "llama-3-70b", "--phase", "decode", "--device", "h100-sxm", *words)[0] == 0


def test_devices_that_a_served_model_leaves_idle_are_named(capsys):
    served = ["plan", "gpt2", "--phase", "decode", "--device", "l4", "--count", "4", "--full"]
    assert "Of the 4 devices one is accounted for, with the whole model on it" in call(capsys, *served)[1]
    assert "one is accounted for" not in call(capsys, *served, "--set", "layout.tensor=4")[1]


def test_a_served_model_on_an_unmeasured_machine_has_no_empty_columns(capsys):
    out = call(capsys, "plan", "gpt2", "--phase", "decode", "--full")[1]
    assert next(line for line in out.splitlines() if line.startswith("batch")).split() == [
        "batch",
        "KV",
        "cache",
        "memory",
    ]


def test_adapters_get_a_layout_over_several_devices(capsys):
    tuned = ["--set", "recipe.lora.rank=8", "--set", "recipe.seq_len=512", "--set", "recipe.global_batch=8"]
    code, out, _ = call(capsys, "plan", "llama-3.2-1b", "--device", "rtx-4090", "--count", "2", *tuned, "--json")
    layout = json.loads(out)["run"]["layout"]
    assert (code, layout["replicate"] * layout["shard"]) == (0, 2)


@pytest.mark.parametrize(
    ("named", "near"),
    [
        ("vit:ViT", "trainledger trace vit:ViT --device h100-sxm"),
        ("models/vit.py:ViT", "trainledger trace models.vit:ViT --device h100-sxm"),
        ("vit.py", "trainledger trace vit:build --device h100-sxm"),
        ("/else/vit.py", "trainledger trace package.module:build --device h100-sxm"),
    ],
)
def test_code_is_refused_with_the_verb_that_takes_it(capsys, named, near):
    code, out, err = call(capsys, "plan", named)
    assert (code, out) == (2, "")
    assert f"RUN = '{named}': is code, but a run file or a model is expected" in err
    assert f"nearest that works: {near}" in err


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("python finetune.py --model Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B --set recipe.seq_len=2048"),
        ("foo bar/Qwen2.5-7B", "bar/Qwen2.5-7B --set"),
        ("torchrun --nproc_per_node 8 my_train.py --lr 1", "llama-3-8b --set recipe.seq_len=2048"),
    ],
)
def test_a_launch_line_of_an_unknown_program_is_no_model_and_no_file(capsys, line, near):
    code, out, err = call(capsys, "plan", line)
    assert (code, out) == (2, "")
    assert "is a launch line of an unknown program; those of the trainers in docs/planning.md are read" in err
    assert f"nearest that works: {near}" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("fits", "gpt2", "h100-sxm", "4"), "nearest that works: --device h100-sxm --count 4"),
        (("plan", "gpt2", "--set", "recipe.epochs=1"), "[recipe]; nearest that works: recipe.steps or recipe.tokens"),
        (("plan", "gpt2", "--set", "recipe.samples=1"), "[recipe]; nearest that works: recipe.steps or recipe.tokens"),
        (("plan", "gpt2", "--set", "recipe.colour=1"), "unknown field of [recipe], which has seq_len, "),
        (("compare", "gpt2", "--over", "recipe.seq_len"), "nearest that works: --over recipe.seq_len=512,1024"),
    ],
)
def test_what_is_near_enough_is_proposed(capsys, words, sentence):
    code, _, err = call(capsys, *words)
    assert code == 2
    assert sentence in err


def test_a_script_without_a_function_to_build_is_annotated(capsys, tmp_path):
    script = tmp_path / "grpo.py"
    script.write_text("import torch\ntorch.zeros(3)\n")
    assert f"nearest that works: trainledger annotate --fake {script}" in call(capsys, "plan", str(script))[2]
    script.write_text("class Net:\n    def __init__(self, width): ...\ndef make_net(width=8):\n    return None\n")
    assert "nearest that works: trainledger trace package.module:make_net" in call(capsys, "plan", str(script))[2]
    assert ":make_net, or trainledger annotate" in call(capsys, "trace", str(script))[2]


def test_without_a_step_time_the_short_answer_says_why(capsys) -> None:
    assert main(["plan", "gpt2", "--device", "t4", "--set", "recipe.precision=bf16"]) == 0
    assert "no step time: NVIDIA T4 has no peak for bf16 on record" in " ".join(capsys.readouterr().out.split())
