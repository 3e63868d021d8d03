"""Whether a run fits: the yes or no of the plan, and a nearest change after which it does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainledger as tl
from trainledger.answers.load import resolve
from trainledger.cli import main
from trainledger.forecast.plan.changes import RESULT, changes
from trainledger.spec.run_text import changed

CASES = {
    "fits": ("gpt2", "t4", 1, {}),
    "a smaller batch": ("gpt2", "t4", 1, {"recipe.global_batch": 16}),
    "changes together": ("qwen3-0.6b", "rtx-4090", 1, {}),
    "more devices": ("llama-3-8b", "h100-sxm", 1, {}),
    "adapters": ("llama-3-70b", "h100-sxm", 1, {}),
    "no layout": ("llama-3-70b", "h100-sxm", 8, {}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_the_nearest_change_of_what_does_not_fit_fits(case: str) -> None:
    name, device, count, overrides = CASES[case]
    answer = tl.fits(name, device, count, overrides)
    assert bool(answer) is (answer.verdict is True) is (case == "fits")
    if answer:
        plan = tl.plan(name, overrides, device=device, count=count).forecast
        assert (plan.fits, plan.device_nbytes, plan.usable_nbytes) == (True, answer.nbytes, answer.usable_nbytes)
        assert (answer.nearest, answer.chance) == ((), plan.chance_of_fitting)
        return
    assert answer.nbytes is not None
    assert answer.usable_nbytes is not None
    assert answer.nbytes > answer.usable_nbytes
    given = [f"{field}={value}" for field, value in overrides.items()]
    devices = [f"cluster.device={device}", f"cluster.count={count}"]
    assert tl.fits(name, overrides=[*devices, *given, *answer.nearest])


ONE_LIST: dict[str, tuple[str, str, dict[str, object]]] = {
    "a run": ("[model]\npreset = 'llama-3.2-1b'\n[recipe]\nseq_len = 8192\nglobal_batch = 32\nmicro_batch = 8\n"
              "steps = 9\nprecision = 'bf16-mixed'\n[cluster]\ndevice = 'a100-sxm-40gb'\n", "run.toml", {}),
    "alone": ("[model]\npreset = 'gpt2'\n[recipe]\nseq_len = 1024\nglobal_batch = 64\nsteps = 9\n"
              "precision = 'bf16-mixed'\n[cluster]\ndevice = 'l4'\n", "run.toml", {}),
    "sharded": ("[model]\npreset = 'qwen3-0.6b'\n[recipe]\nseq_len = 4096\nglobal_batch = 32\nmicro_batch = 4\n"
                "steps = 9\nprecision = 'bf16-sharded'\n[layout]\nshard = 2\n[cluster]\ndevice = 'l4'\ncount = 2\n",
                "run.toml", {}),
    "a trainer's": ("base_model: Qwen/Qwen3-0.6B\nsequence_len: 8192\nmicro_batch_size: 8\nbf16: true\n"
                    "gradient_checkpointing: false\nlearning_rate: 0.0002\n", "axolotl.yml",
                    {"cluster.device": "rtx-4090"}),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("case", ONE_LIST)
def test_verbs_recommend_one_change_the_quickest_that_fits_with_80_percent(case: str, tmp_path: Path) -> None:
    text, name, sets = ONE_LIST[case]
    (tmp_path / name).write_text(text)
    named = str(tmp_path / name)
    fits, advice, fit = tl.fits(named, overrides=sets), tl.advise(named, sets), tl.fit(named, sets, of=["memory"])
    assert advice.nearest is not None
    assert fit.nearest is not None
    assert fits.nearest == advice.nearest.sets == fit.nearest.sets
    assert fits.change == advice.nearest.change == fit.nearest.change
    edits = [None if words is None else words.edits for words in (fits.words, advice.words, fit.words)]
    assert edits[0] == edits[1] == edits[2]
    assert (edits[0] is None) is (name == "run.toml")
    run = resolve(named, sets)
    changed_run = resolve(run, fits.nearest)
    after = tl.predict(changed_run)
    assert after.chance_of_fitting is not None
    assert after.chance_of_fitting >= 0.8
    if name != "run.toml":
        return
    for change in changes(run, short=True):  # alone; several together may only be quicker
        try:
            other = changed(run, dict(change.fields))
        except tl.InvalidInput:
            continue
        single = tl.predict(other)
        if change.effect != RESULT and change.timed and single.fits and single.as_likely_as(0.8):
            assert (after.step_seconds or 0) <= (single.step_seconds or 0), change


def test_what_fits_by_the_count_alone_is_called_fitting_only_at_the_chance_that_is_asked_for() -> None:
    asked = ("llama-3-8b", "h100-sxm", 1, {"recipe.lora.rank": 8, "recipe.seq_len": 4096, "recipe.global_batch": 2})
    counted = tl.fits(*asked, chance=0)
    assert counted.chance is not None
    assert counted
    assert tl.fits(*asked, chance=0.9 * counted.chance)
    assert not (unlikely := tl.fits(*asked, chance=1.1 * counted.chance))
    says = r"(May|Likely does NOT) fit \(chance \d+ %\): below \d+ % \(--chance\), [\d.]+ GB of"
    assert re.search(says, " ".join(str(unlikely).split()))
    assert tl.fits(*asked[:3], {**asked[3], **dict(change.split("=") for change in unlikely.nearest)})


@pytest.mark.parametrize("tokens", [4096, 8192, 16384])
def test_all_verbs_have_one_verdict(tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["llama-3.1-8b", "--method", "qlora", "--device", "rtx-4090", "--set", f"recipe.seq_len={tokens}"]
    codes, says = dict[str, int](), set[str]()
    for verb in ("plan", "fits", "advise", "fit"):
        codes[verb] = main([verb, *asked, *(["--of", "memory"] if verb == "fit" else [])])
        said = re.search(r"(likely does NOT|does NOT|may)? ?fits?( \(chance \d+ %\))?(?=[:,.;])",
                         " ".join(capsys.readouterr().out.split()), re.IGNORECASE)  # fmt: skip
        assert said is not None
        says.add(said[0].strip().lower())
    assert len(says) == 1, says
    advice = tl.advise(asked[0], {"method": "qlora", "recipe.seq_len": tokens}, device="rtx-4090")
    fits = advice.forecast.likely_fits
    assert advice.goal == ("time" if fits else "memory")
    assert codes == {"plan": 0 if fits else 2, "fits": 0 if fits else 2, "advise": 0, "fit": 0}


def test_a_device_whose_memory_is_not_known_is_neither_yes_nor_no() -> None:
    answer = tl.fits("gpt2")
    assert answer.verdict is None
    assert not answer
    assert "not known" in str(answer)


def test_files_and_runs_are_answered_as_names_are_and_without_torch(tmp_path: Path) -> None:
    (tmp_path / "qlora.yml").write_text(
        "base_model: meta-llama/Meta-Llama-3-8B\nadapter: qlora\nload_in_4bit: true\nlora_r: 16\nlora_alpha: 32\n"
        "sequence_len: 2048\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\ngradient_checkpointing: true\n"
        "lora_target_linear: true\nbf16: true\nlearning_rate: 0.0002\n"
    )
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); import trainledger as tl\n"
        "ours = tl.fits('qlora.yml', 'rtx-4090'); theirs = tl.fits(ours.run)\n"
        "assert ours and (ours.nbytes, ours.chance) == (theirs.nbytes, theirs.chance), (ours, theirs)\n"
        "assert ours.run.recipe.lora.base_format == 'nf4'\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_no_run_is_refused_and_not_called_unfit() -> None:
    with pytest.raises(tl.InvalidInput, match=r"cluster.device = 'h100-sxn'.*h100-sxm"):
        tl.fits("llama-3-8b", "h100-sxn")
    with pytest.raises(tl.InvalidInput, match="nearest that works: llama-3-8b"):
        tl.fits("lama-3-8b", "h100-sxm")


def test_other_questions_take_a_device_and_a_count_as_fits_does():
    assert tl.fit("qwen3-0.6b", "rtx-4090").rows == tl.fit("qwen3-0.6b", device="rtx-4090").rows
    assert tl.plan("gpt2", tl.device("h100-sxm"), 8).run.cluster.count == 8
    plan = tl.plan("gpt2", "h100-sxm", 8, price="$2.5")
    assert plan.run.cluster.price_per_device_hour == 2.5
    causes = plan.records("time")
    assert sum(row["seconds"] for row in causes) == pytest.approx(plan.forecast.step_seconds, rel=1e-6)
    assert plan.records() == plan.records(next(iter(plan.document().tables)))
    with pytest.raises(tl.InvalidInput, match="nearest that works: rtx-4090"):
        tl.fit("gpt2", "rtx4900")
