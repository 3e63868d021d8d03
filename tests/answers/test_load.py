"""A run by whatever names it: one default recipe in Python and on the command line, and a record of it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.budgets.target import Target, ledger_of_run
from trainledger.answers.load import names_model, resolve
from trainledger.answers.machine import kernels_of
from trainledger.cli import main
from trainledger.spec.calibration import Calibration, KernelTime, write_calibration
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.sweep

CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
DEVICE = {"cluster.device": "h100-sxm"}


def refusal(*given: Any) -> str:
    with pytest.raises(tl.InvalidInput) as caught:
        tl.load(*given)
    return str(caught.value)


def as_words(overrides: dict[str, Any]) -> list[str]:
    return [word for name, value in overrides.items() for word in ("--set", f"{name}={value}")]


@pytest.mark.parametrize("named", ["gpt2", "gemma-2-2b", "config.json"])
@pytest.mark.parametrize(
    "overrides",
    [
        DEVICE, {**DEVICE, "recipe.global_batch": 4},
        pytest.param({"layout": "auto", "cluster.count": 4, **DEVICE}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_a_name_is_the_run_that_the_command_line_makes_of_it(
    named: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    with pytest.warns(UserWarning, match="has no recipe; assuming recipe.seq_len"):
        run = tl.load(named, overrides)
    code = main(["plan", named, *as_words(overrides), "--json"])
    forecast = json.loads(capsys.readouterr().out)["forecast"]
    ours = tl.predict(run)
    assert code == (0 if ours.fits else 2)
    assert (ours.step_seconds, ours.peak_nbytes, ours.mfu) == (
        forecast["step_seconds"],
        forecast["peak_nbytes"],
        forecast["mfu"],
    )


def test_the_warning_says_what_nobody_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="gpt2") as caught:
        tl.load("gpt2", {"recipe.seq_len": 128})
    assert str(caught[0].message) == (
        "gpt2 has no recipe; assuming recipe.global_batch=1, recipe.precision=bf16-mixed, recipe.steps=1"
    )
    assert caught[0].filename == __file__
    said = ["recipe.seq_len=128", "recipe.global_batch=2", "recipe.precision=fp32", "recipe.tokens=1M"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = tl.load("gpt2", (each for each in said))
    assert run == tl.load({"model": {"preset": "gpt2"}}, said)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    with pytest.warns(UserWarning, match="config.json has no recipe"):
        assert tl.load(path).model.d_model == 64


def test_a_file_comes_before_a_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").write_text('[model]\npreset = "teach-1m"\n[recipe]\nseq_len = 64\nglobal_batch = 4\nsteps = 3\n')
    assert tl.load("gpt2").recipe.steps == 3


def test_a_file_that_is_not_there_is_one_with_a_like_name_or_none(tmp_path: Path) -> None:
    (tmp_path / "run_b.toml").write_text('[model]\npreset = "gpt2"\n')
    assert "nearest" not in refusal(str(tmp_path / "nope.toml"))
    assert refusal(str(tmp_path / "run_a.toml")).endswith(f"nearest that works: {tmp_path / 'run_b.toml'}")


def test_a_name_that_is_none_is_a_sentence_without_flags() -> None:
    assert refusal("lama-3-8b") == "model.preset = 'lama-3-8b': is not in the catalog; nearest that works: llama-3-8b"
    assert "config.json: is not a file of" in refusal("nothing/config.json")
    assert refusal(5).endswith("a dict of sections or a Run, not int")


def test_a_verb_of_run_files_takes_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "gpt2"]) == 2
    assert "run file = 'gpt2': cannot be read" in capsys.readouterr().err


def test_a_run_is_loaded_again_with_changes() -> None:
    run = tl.load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 128, "global_batch": 4, "steps": 10}})
    assert tl.load(run) == run
    longer = tl.load(run, {"recipe.seq_len": 256})
    assert longer == tl.load(run, "recipe.seq_len=256") == tl.load(run, ["recipe.seq_len=256"])
    assert longer.recipe.seq_len == 256
    assert "recipe.seq_len = 0: must be at least 1" in refusal(run, {"recipe.seq_len": 0})


@pytest.mark.parametrize("overrides", [5, [5], {5: 1}], ids=str)
def test_overrides_that_are_none_are_sentences(overrides: Any) -> None:
    run = tl.load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 128, "global_batch": 4, "steps": 10}})
    assert "overrid" in refusal(run, overrides)
    assert "overrid" in refusal("gpt2", overrides)


@pytest.mark.parametrize(
    ("measured", "capability", "asked", "kernels"),
    [
        ("cuda", 9.0, "auto", "sm90"), ("cuda", 10.0, "cuda", "sm100"), ("cuda", 8.9, "auto", "cuda"),
        ("cuda", None, "cuda", "other"), ("cpu", None, "auto", "cpu"), ("cpu", None, "cuda", "cuda"),
        ("cuda", 9.0, "cpu", "cpu"), ("cuda", 9.0, "mps", "cuda"), ("mps", None, "auto", "other"),
        ("cuda", 7.5, "auto", "sm70"),
    ],
)  # fmt: skip
def test_kernels_are_those_of_what_was_measured_if_that_is_asked_for(
    measured: str, capability: float | None, asked: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.toml"
    one = KernelTime(kind="matmul", dtype="fp32", shape=(8, 8, 8), flops=1024, nbytes=768, seconds=1e-6)
    machine = Calibration(
        title="a machine", backend=measured, date="2026-01-02", torch_version="2.13.0", threads=2, kernels=(one,),
        compute_capability=capability,
    )  # fmt: skip
    write_calibration(machine, path)
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(path))
    run = tl.load("gpt2", {"cluster.backend": asked, "recipe.seq_len": 1000})
    assert kernels_of(run) == kernels
    # A lock is the same wherever it is checked.
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "gpt2"\n[recipe]\nseq_len = 1000\nglobal_batch = 1\nsteps = 1\n'
        f'precision = "bf16-mixed"\n[cluster]\nbackend = "{asked}"\n'
    )
    locked = ledger_of_run("run", Target(run="run.toml"), tmp_path)
    names = {each.name for each in locked if each.kind == "attention" and each.phase == "forward"}
    suffix = "_for_cpu" if asked in ("auto", "cpu") else ""
    assert names == {f"_scaled_dot_product_flash_attention{suffix}"}


@pytest.mark.parametrize("named", ["gemma-2-2b", "gpt-oss-20b"])
@pytest.mark.parametrize("layout", [[], ["layout=auto", "cluster.count=8"]])
def test_capped_scores_and_sinks_have_a_kernel_in_every_precision(named: str, layout: list[str]) -> None:
    for precision, attention in (("bf16-mixed", "flash"), ("fp32", "math"), ("tf32", "math")):
        run = resolve(named, ["cluster.device=h100-sxm", f"recipe.precision={precision}", *layout], search=False)
        assert run.recipe.attention == attention
    run = resolve(
        named, ["cluster.device=h100-sxm", "recipe.precision=fp32", "recipe.attention=flash", *layout], search=False
    )
    assert run.recipe.attention == "flash"  # which a plan refuses, as it was given


def test_a_model_without_its_section_is_answered_with_the_preset() -> None:
    recipe = {"seq_len": 64, "global_batch": 1, "steps": 1}
    with pytest.raises(InvalidInput) as caught:
        tl.load({"model": "gpt2", "recipe": recipe})
    (problem,) = caught.value.problems
    assert problem.rule.endswith("of which preset names a model of the catalog")
    assert problem.nearest == '[model] preset = "gpt2"'
    assert tl.load({"model": {"preset": "gpt2"}, "recipe": recipe}).model.name == "gpt2"


def test_a_run_with_selective_checkpointing_is_read_again() -> None:
    run = tl.load(
        {
            "model": {"preset": "gpt2"},
            "recipe": {"seq_len": 128, "global_batch": 2, "steps": 1, "activation_checkpointing": "selective"},
        }
    )
    assert tl.load(run) == run


def test_a_model_alone_is_told_from_a_run(tmp_path: Path) -> None:
    config, run, file = (tmp_path / name for name in ("config.json", "run.toml", "run.yml"))
    config.write_text(json.dumps(CONFIG))
    run.write_text("")
    file.write_text("base_model: gpt2\nsequence_len: 512\n")
    models = ("gpt2", "meta-llama/Llama-3.1-8B", str(config), config, tl.model("gpt2"))
    assert all(names_model(source) for source in models)
    runs = (str(run), file, "swift sft --model gpt2", "pretrain.sh", "mine.py", {"model": {"preset": "gpt2"}})
    assert not any(names_model(source) for source in runs)


def test_rl_of_a_config_is_of_a_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | {"max_position_embeddings": 4096}))
    answer = tl.rl(str(config), DEVICE, prompts=2, group=2)
    assert (answer.run.recipe.global_batch, answer.run.recipe.seq_len) == (4, 1536)
    assert main(["rl", "gpt2", "--device", "h100-sxm", "--prompt", "128", "--completion", "128"]) == 0
    assert "--method" not in capsys.readouterr().err
