"""Logs of other programs: what their lines say of speed, memory and loss, what is doubtful, and the forecast beside."""

import json
from pathlib import Path

import pytest

from trainledger.answers.plan import plan
from trainledger.cli import main, measure
from trainledger.observe import logs
from trainledger.observe.logs import read_log
from trainledger.spec.problem import InvalidInput

MEGATRON = (
    " [2026-01-02 03:04:05] iteration {step:8d}/   500 | consumed samples: {samples} | elapsed time per iteration "
    "(ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 100.0 | global batch size: 8 | lm loss: {loss:.6E} | "
    "number of nan iterations: 0 |"
)
TITAN = (
    "[rank0]:\x1b[0m[titan] 2026-01-02 03:{m:02d}:{second:06.3f} - root - INFO - \x1b[31mstep: {step:2}  "
    "\x1b[32mloss: {loss:8.5f}  memory: 40.00GiB(50.00%)  tps: 4,096  tflops: 200.00  mfu: 20.00%\x1b[39m"
)
NANO = "iter {step}: loss {loss:.4f}, time {ms:.2f}ms, mfu 12.30%"
LITGPT = "Epoch 1 | iter {step} step {half} | loss train: {loss:.3f}, val: n/a | iter time: {ms:.2f} ms"
MAXTEXT = "completed step: {step}, seconds: {s:.3f}, TFLOP/s/device: 50.0, Tokens/s/device: 1000.0, loss: {loss:.3f}"
NEMO = "iteration {step}/99 | global_step: {step} | reduced_train_loss: {loss:.3f} | train_step_timing in s: {s:.3f}"
NANOTRON = (
    "01/17/2026 13:47:27 [INFO|DP=0]: iteration: {step} / 100 | elapsed_time_per_iteration_ms: {s:.2g}K | "
    "tokens_per_sec: 16K | tokens_per_sec_per_gpu: 2K | lm_loss: {loss:.3g} | cuda_max_memory_reserved: 2G"
)
DEEPSPEED = (
    "[2026-01-02 03:{m:02d}:{second:06.3f}] [INFO] [timer.py:260:stop] epoch=0/micro_step={step}/global_step={step}, "
    "RunningAvgSamplesPerSec=8.1, CurrSamplesPerSec=8.2, MemAllocated=0.26GB, MaxMemAllocated=9.02GB"
)
TRAINER = "{{'loss': '{loss:.4g}', 'learning_rate': '1e-05', 'num_tokens': '{tokens:.4g}', 'epoch': '0.1'}}"
BAR = " 10%|x  | {step}/1000 [{minutes:02d}:{whole:02d}<09:00,  1.00s/it]"
JSON_LINES = '{{"current_steps": {step}, "loss": {loss:.3f}, "elapsed_time": "{h}:{m:02d}:{whole:02d}"}}'


def written(folder: Path, template: str, steps, *, header="", seconds=lambda step: 0.5, loss=lambda step: 3.0) -> str:
    """A log with a line for each step."""
    lines, clock, before = [header], 0.0, None
    for step in steps:
        took = seconds(step)
        clock += took * (step - before if before is not None and step > before else 1)
        before = step
        times = {"s": took, "ms": 1000 * took, "second": clock % 60, "whole": int(clock % 60)}
        minutes = int(clock // 60)
        clocks = {"minutes": minutes, "m": minutes % 60, "h": minutes // 60}
        counts = {"step": step, "half": step // 2, "samples": 8 * step, "tokens": 4096 * step}
        lines.append(template.format(loss=loss(step), **times, **clocks, **counts))
    path = folder / "train.log"
    path.write_text("\n".join([*lines, "saving checkpoint", ""]), encoding="utf-8")
    return str(path)


PROGRAMS = {
    "Megatron-LM": (MEGATRON, range(1, 41), "  seq_length ....... 1024\nusing world size: 4,"),
    "torchtitan": (TITAN, range(10, 410, 10),
                   "global batch size 16, sequence length 1024\nPeak FLOPS used for computing MFU: 1.0e+15"),
    "nanoGPT": (NANO, range(0, 400, 10), "tokens per iteration will be: 491,520"),
    "MaxText": (MAXTEXT, range(40), ""),
    "litgpt": (LITGPT, range(1, 81), "Memory used: 14.49 GB"),
    "NeMo": (NEMO, range(40), ""),
    "nanotron": (NANOTRON, range(1, 41), ""),
    "DeepSpeed": (DEEPSPEED, range(10, 410, 10), ""),
    "a Trainer of transformers": (f"{BAR}\r\n{TRAINER}", range(50, 1050, 50), ""),
}  # fmt: skip
FIGURES = {
    "Megatron-LM": {"tokens_per_step": 8192, "tokens_per_second": 16384, "rate": 4096, "tflops": 100},
    "torchtitan": {"tokens_per_second": 32768, "devices": 8, "mfu": 0.2, "peak": 1e15, "reserved": 40 * 2**30},
    "nanoGPT": {"tokens_per_second": 983040, "mfu": 0.123, "peak": 312e12},
    "MaxText": {"rate": 1000, "tflops": 50},
    "litgpt": {"allocated": 14.49e9},
    "NeMo": {},
    "nanotron": {"rate": 2000, "tokens_per_second": 16000, "devices": 8, "reserved": 2e9},
    "DeepSpeed": {"allocated": 9.02 * 2**30},
    "a Trainer of transformers": {"tokens_per_step": 4096, "tokens_per_second": 8192},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_recognized_by_its_lines(program, tmp_path):
    template, steps, header = PROGRAMS[program]
    log = read_log(written(tmp_path, template, steps, header=header))
    assert log.program == program
    assert log.step_seconds.median == pytest.approx(1.0 if program == "litgpt" else 0.5, rel=0.03)  # two micro-batches
    assert {name: log.figures.get(name) for name in FIGURES[program]} == pytest.approx(FIGURES[program], rel=0.03)
    assert len(log.steps) == len(steps)


def test_lines_of_json_and_clocks_of_whole_seconds(tmp_path):
    log = read_log(written(tmp_path, JSON_LINES, range(2, 400, 2), seconds=lambda step: 3.3))
    assert log.step_seconds.median == pytest.approx(3.3, rel=0.05)
    assert any("whole seconds" in doubt for doubt in log.doubts)


def test_evaluation_is_left_out_and_a_change_of_the_speed_is_found(tmp_path):
    def seconds(step):
        return (20 if step == 1 else 9 if step % 50 == 0 else 1.3 if step > 130 else 1) * (1 + step % 7 / 500)

    log = read_log(written(tmp_path, MEGATRON, range(1, 301), seconds=seconds))
    assert log.disturbed == (1, 50, 100, 150, 200, 250, 300)
    assert [(speed.first, speed.last) for speed in log.speeds] == [(2, 130), (131, 299)]
    assert log.speeds[1].seconds / log.speeds[0].seconds == pytest.approx(1.3, rel=0.01)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_noise_is_no_change_of_the_speed(noise, tmp_path):
    def seconds(step):
        return 1 + noise * ((step * 7919) % 101 / 50 - 1)

    assert not read_log(written(tmp_path, MEGATRON, range(1, 301), seconds=seconds)).speeds


def test_losses_that_are_no_numbers_or_jump(tmp_path):
    def loss(step):
        return float("nan") if step > 90 else 9.0 if step == 60 else 3 - step / 100 + step % 3 / 50

    log = read_log(written(tmp_path, NANO, range(1, 101), loss=loss))
    assert log.not_finite[0] == 91
    assert [jump["step"] for jump in log.jumps] == [60]


def test_restarts_other_ranks_and_a_line_that_is_being_written(tmp_path):
    path = Path(written(tmp_path, MAXTEXT, [*range(20), *range(10, 40)]))
    lines = path.read_text().splitlines()
    both = [f"[rank{rank}]: {line}" for line in lines if line.startswith("completed") for rank in (0, 1)]
    path.write_text("\n".join([*both, both[-1][:40]]))
    log = read_log(str(path))
    assert len(log.steps) == 50
    assert any(doubt.startswith("restarts (steps go back): 1") for doubt in log.doubts)
    assert any("other ranks" in doubt and doubt.endswith(": 50") for doubt in log.doubts)
    assert any("has no end" in doubt for doubt in log.doubts)


def test_of_very_many_lines_some_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MOST_LINES", 40)
    log = read_log(written(tmp_path, MEGATRON, range(1, 1001), seconds=lambda step: 2 if step > 500 else 1))
    assert len(log.steps) <= 41
    assert log.speeds[1].first == pytest.approx(500, abs=40)


STATE = {
    "global_step": 40,
    "total_flos": 4e15,
    "num_input_tokens_seen": 40960,
    "log_history": [
        *({"step": step, "loss": 2.0} for step in range(10, 50, 10)),
        {"step": 40, "eval_loss": 1.9, "eval_runtime": 20.0},
        {"step": 40, "train_runtime": 100.0, "train_loss": 2.0},
    ],
}
SUMMARY = {"throughput(tps)": 4096, "mfu(%)": 41.5, "memory/max_reserved(GiB)": 2, "time_metrics/end_to_end(s)": 2}
LINES = STATE["log_history"][:4]
CLOCKED = {**STATE, "log_history": [{**each, "train_runtime": each["step"] / 2} for each in LINES]}
CONFIG = "seq_len:\n  value: 1024\nglobal_batch_size:\n  desc: null\n  value: 16\n"
BOTH = {"summary": SUMMARY, "config": {"world_size": {"value": 4}}}


@pytest.mark.parametrize(
    ("given", "config", "seconds", "figures", "doubt"),
    [
        (
            STATE,
            "",
            2.0,
            {"tokens_per_step": 1024, "tokens_per_second": 512, "flops_per_step": 1e14},
            "20 s of evaluation",
        ),
        ({**STATE, "log_history": LINES}, "", None, {"tokens_per_step": 1024}, "when steps ended"),
        (CLOCKED, "", 0.5, {}, "fewer than five"),
        (SUMMARY, CONFIG, 2.0, {"tokens_per_step": 16384, "rate": 4096, "devices": 2}, "last values"),
        (BOTH, "", 2.0, {"tokens_per_second": 16384, "mfu": 0.415}, "last values"),
    ],
)
def test_states_and_summaries(given, config, seconds, figures, doubt, tmp_path):
    (tmp_path / "config.yaml").write_text(config)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(given))
    log = read_log(str(path))
    assert (log.step_seconds and log.step_seconds.median) == seconds
    assert {name: log.figures[name] for name in figures} == pytest.approx(figures)
    assert any(doubt in each for each in log.doubts)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "has no step of Megatron-LM"),
        (b"epoch 1 done\n" * 3, "has no step of Megatron-LM"),
        ("iter 1: loss 2.0".encode("utf-16"), "must be text in UTF-8"),
        (b'{"hidden_size": 4}', "is JSON, but no trainer_state.json"),
        (b'{"log_history": 3, "summary": [1]}', "is JSON, but no trainer_state.json"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_log_is_refused_in_a_sentence(content, rule, tmp_path):
    path = tmp_path / "some.log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=rule):
        read_log(str(path))


FIELDS = {
    "recipe.seq_len": 1024,
    "recipe.global_batch": 480,
    "recipe.micro_batch": 12,
    "cluster.device": "a100-sxm-40gb",
}


def test_the_forecast_stands_beside_a_log_and_its_mfu_is_explained(tmp_path, monkeypatch, capsys):
    planned = plan("gpt2", FIELDS)
    monkeypatch.setattr(measure, "plan_of", lambda run, overrides: planned)
    header = "tokens per iteration will be: 491,520"
    path = Path(written(tmp_path, NANO, range(200), header=header, seconds=lambda step: 3.2))
    path.write_text(path.read_text().replace("mfu 12.30%", "mfu 42.10%"))

    def asked():
        assert main(["reconcile", "--log", str(path), "--run", "gpt2", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found, {row["quantity"]: row for row in found["quantities"]}

    found, rows = asked()
    step = rows["step_seconds"]
    assert step["measured"] == pytest.approx(3.2)
    assert step["within"]["low"] < step["predicted"] < step["within"]["high"]
    assert rows["our_mfu"]["measured"] == pytest.approx(0.42, rel=0.02)
    assert "6nd+attention" in found["claims"][0]
    path.write_text(path.read_text().replace("491,520", "245,760"))
    found, rows = asked()
    assert rows["step_seconds"]["predicted"] is None
    assert rows["our_mfu"]["measured"] == pytest.approx(0.21, rel=0.02)
    assert "by no convention" in found["claims"][0]
    assert any("their times do not compare" in doubt for doubt in found["doubts"])


def test_the_page_fits_a_screen(tmp_path, capsys):
    def loss(step):
        return float("nan") if step > 180 else 9.0 if step == 60 else 3 - step / 100

    path = written(tmp_path, NANO, range(0, 400, 2), loss=loss, seconds=lambda step: 2 if step > 200 else 1)
    assert main(["reconcile", "--log", path]) == 0
    page = capsys.readouterr().out
    assert "1 jump: at 60 from" in page
    assert "--trace" not in page
    assert "When the speed changed" in page
    assert len(page.splitlines()) <= 35
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trace", "trace.json"), "--log = 'train.log': cannot be combined with --trace"),
        (("runs/x",), "cannot be combined with RUN_DIR"),
        (("--update",), "is no run of this engine"),
        (("--set", "recipe.steps=2"), "changes a field of the run; name it with --run"),
        ((), "--log = 'train.log': cannot be read: No such file or directory"),
    ],
)
def test_what_does_not_go_with_a_log(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reconcile", "--log", "train.log", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["losses", "alone", "bar", "json"])
def test_a_trainer_that_prints_no_times_but_its_run_has_the_mean_step(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [str({"loss": 3 - at / 10, "learning_rate": 1e-5, "epoch": at / 10}) for at in range(9)]
    if kind != "losses":
        lines = ["100%|##########| 390/390 [1:06:40<00:00, 10.26s/it]"] if kind == "bar" else []
    end = {"train_runtime": 4000.0, "train_samples_per_second": 3.1, "train_steps_per_second": 0.098, "epoch": 1.0}
    file = tmp_path / "train.log"
    file.write_text("\n".join([*lines, json.dumps(end) if kind == "json" else str(end)]) + "\n")
    log = read_log(str(file))
    assert log.step_seconds is not None
    assert log.step_seconds.median == pytest.approx(4000 / (390 if kind == "bar" else 392))
    assert any("checkpoints are in it" in doubt or "the mean of the run" in doubt for doubt in log.doubts)
    file.write_text(str({"train_runtime": 4000.0}) + "\n")
    with pytest.raises(InvalidInput, match="has no step of"):
        read_log(str(file))
    file.write_text("\n".join([*lines, json.dumps(end) if kind == "json" else str(end)]) + "\n")
    words = ["reconcile", "--log", str(file), "--run", "gpt2", "--device", "h100-sxm", "--count", "8", "--json"]
    assert main(words) == 0
    assert "10.2" in capsys.readouterr().out
