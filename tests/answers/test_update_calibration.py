"""A calibration learns from run directories: planted factors are found, others left out with a sentence, and undone."""

import json
from dataclasses import replace

import pytest

from trainledger.answers.pages.record import read_run
from trainledger.answers.refit import PastRun, undo_update
from trainledger.answers.refit import update_calibration as updated
from trainledger.cli import main
from trainledger.forecast.predict.predict import predict
from trainledger.forecast.predict.step import step_time
from trainledger.ledger.ledger import Ledger, write_ledger
from trainledger.ledger.measured import Measured, Spread
from trainledger.ledger.step import account
from trainledger.spec.block import Dense, MultiHead
from trainledger.spec.calibration import (
    Calibration,
    KernelTime,
    calibration_path,
    fit_kind,
    read_calibration,
    write_calibration,
)
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.plain import write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.runfile import to_toml

PLANTED = {
    "forward matmul": 1.3, "backward matmul": 1.2, "forward elementwise": 0.4, "backward elementwise": 0.5,
    "optimizer update": 2.0, "forward attention": 1.1, "backward attention": 0.9,
}  # fmt: skip


def runs_in(folder):
    return sorted(folder.iterdir())


def update_calibration(run_dirs, *, calibration):
    records = [read_run(each) for each in run_dirs]
    past = [PastRun(path=each.path, measured=each.measured, ledger=each.measured_ledger) for each in records]
    return updated(past, calibration=calibration)


SIZES = {"run-0": (32, 2), "run-1": (64, 2), "run-2": (48, 3), "run-3": (64, 4)}  # d_model, layers


def kernel(kind, phase="", seconds=1e-5):
    return KernelTime(
        kind=kind, dtype="fp32", shape=(64, 64, 64), flops=2 * 64**3, nbytes=3 * 4 * 64**2, seconds=seconds,
        phase=phase,
    )  # fmt: skip


MACHINE = Calibration(
    title="a machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=2, operation_seconds=1e-6,
    kernels=(kernel("matmul"), kernel("attention"), kernel("attention", "backward"), kernel("copy", seconds=1e-6)),
)  # fmt: skip


def run_of(width, layers, **more):
    model = ModelSpec(
        vocab_size=128, d_model=width, n_layers=layers, max_seq_len=32, attention=MultiHead(n_heads=2),
        feed_forward=Dense(d_ff=4 * width),
    )  # fmt: skip
    return Run(model=model, recipe=Recipe(seq_len=32, global_batch=4, micro_batch=4, steps=10), **more)


def keep(folder, run, factors=PLANTED, slower=1.0, **measured):
    """A run directory whose metered step took what is predicted times the factors, the recorder twice as long."""
    folder.mkdir(parents=True)
    ledger = account(run, backend="cpu")
    phases, entries = {}, []
    for each in step_time(ledger, MACHINE).entries:
        factor = slower * factors.get(fit_kind(each.entry.phase, each.entry.kind), 1.0)
        seconds = float(each.seconds) * factor
        phases[each.entry.phase] = phases.get(each.entry.phase, 0.0) + seconds
        entries.append(replace(each.entry, seconds=2 * seconds / each.entry.times))
    whole = sum(phases.values())
    fields = {
        "step_seconds": Spread(median=whole, low=whole, high=whole, count=9), "step_seconds_by_phase": phases,
        "device": "a machine", "torch_version": "2.13.0", "threads": 2,
    }  # fmt: skip
    (folder / "run.toml").write_text(to_toml(run))
    write_ledger(Ledger(tuple(entries), tokens=128, writer="measure"), folder / "measured-ledger.json.gz")
    write_json(Measured(**{**fields, **measured}), folder / "measured.json")
    return folder


@pytest.fixture
def path(tmp_path):
    write_calibration(MACHINE, tmp_path / "machine.toml")
    return tmp_path / "machine.toml"


@pytest.fixture
def runs(tmp_path):
    for name, sizes in SIZES.items():
        keep(tmp_path / "runs" / name, run_of(*sizes))
    return tmp_path / "runs"


def test_planted_factors_are_found_and_forecasts_follow_them(path, runs):
    before = path.read_bytes()
    found = update_calibration(runs_in(runs), calibration=path)
    for kind, factor in PLANTED.items():
        assert found.fit.factors[kind] == pytest.approx(factor, rel=1e-6)
    assert found.fit.error_after < 0.005 < found.fit.error_before
    assert found.written == str(path)
    learned = read_calibration(path)
    assert learned.kernels == MACHINE.kernels  # what was measured stays
    assert learned.peak_flops_per_second == MACHINE.peak_flops_per_second
    for each in found.rows:
        seen = predict(run_of(*SIZES[each.name.split("/")[-1]]), learned, backend="cpu")
        assert seen.step_seconds == pytest.approx(each.measured, rel=0.005)
        assert any("fitted to 4 runs on " in note for note in seen.notes)
    assert undo_update(path) == (path, 0)
    assert path.read_bytes() == before


def test_a_second_fit_starts_from_what_was_measured_and_undo_goes_one_back(path, runs):
    first = update_calibration(runs_in(runs), calibration=path)
    once = path.read_bytes()
    second = update_calibration(runs_in(runs), calibration=path)
    assert second.fit.factors == pytest.approx(first.fit.factors)
    assert second.fit.error_before == pytest.approx(first.fit.error_before)
    assert undo_update(path) == (path, 1)
    assert path.read_bytes() == once


def test_one_run_that_was_ten_times_slower_moves_no_factor(path, runs, tmp_path):
    keep(runs / "astray", run_of(32, 3), slower=10.0)
    found = update_calibration(runs_in(runs), calibration=path)
    for kind, factor in PLANTED.items():
        assert found.fit.factors[kind] == pytest.approx(factor, rel=1e-6)


def test_runs_that_say_nothing_of_this_machine_are_passed_over_with_their_reason(path, runs):
    spread = Spread(median=1.0, low=1.0, high=1.0, count=2)
    keep(runs / "x-other", run_of(32, 2), device="another machine")
    keep(runs / "x-torch", run_of(32, 2), torch_version="2.11.0")
    keep(runs / "x-threads", run_of(32, 2), threads=1)
    keep(runs / "x-short", run_of(32, 2), step_seconds=spread)
    keep(runs / "x-busy", run_of(32, 2), notes=("other processes kept the machine busy: all",))
    layout = keep(runs / "x-ranks", run_of(32, 2))
    two = run_of(32, 2)
    (layout / "run.toml").write_text(
        to_toml(replace(two, layout=Layout(replicate=2), cluster=replace(two.cluster, count=2),
                        recipe=replace(two.recipe, micro_batch=2)))
    )  # fmt: skip
    (runs / "x-torn").mkdir()
    (runs / "x-torn" / "run.toml").write_text("[model\n")
    found = update_calibration(runs_in(runs), calibration=path)
    why = {name.split("/")[-1]: reason for name, reason in found.passed_over}
    assert why.pop("x-torn").startswith("is not TOML")
    assert why == {
        "x-busy": "was disturbed by other processes, or a processor below its full speed",
        "x-other": "ran on another machine, not on a machine",
        "x-ranks": "ran on several ranks, whose times overlap",
        "x-short": "has 2 steady steps, fewer than 5",
        "x-threads": "ran with 1 threads, not 2",
        "x-torch": "ran with torch 2.11.0, not 2.13.0",
    }
    assert len(found.rows) == 4


def test_too_few_runs_are_refused_and_named(path, runs, tmp_path):
    before = path.read_bytes()
    keep(runs / "other", run_of(32, 2), device="another machine")
    chosen = [runs / "run-0", runs / "run-1", runs / "other"]
    with pytest.raises(InvalidInput) as caught:
        update_calibration(chosen, calibration=path)
    assert "runs = 2: are too few" in str(caught.value)
    assert "which takes 3 of this machine and this torch (passed over: other ran on another machine" in str(
        caught.value
    )
    assert path.read_bytes() == before


def test_a_fit_that_helps_no_other_run_is_not_kept(path, tmp_path):
    before = path.read_bytes()
    for at, slower in enumerate([0.5, 1.0, 1.0, 2.0]):
        keep(tmp_path / "runs" / str(at), run_of(32, 2 + at), factors={}, slower=slower)
    found = update_calibration(runs_in(tmp_path / "runs"), calibration=path)
    assert found.written == ""
    assert path.read_bytes() == before


def test_steps_without_times_of_operations_are_fitted_as_a_whole(path, tmp_path):
    for at, sizes in enumerate([(32, 2), (64, 2), (48, 3)]):
        folder = keep(tmp_path / "runs" / str(at), run_of(*sizes), factors={}, slower=1.7)
        (folder / "measured-ledger.json.gz").unlink()
    found = update_calibration(runs_in(tmp_path / "runs"), calibration=path)
    assert found.fit.factors == {"step": pytest.approx(1.7)}
    learned = predict(run_of(64, 3), read_calibration(path), backend="cpu")
    alone = predict(run_of(64, 3), MACHINE, backend="cpu")
    assert learned.step_seconds == pytest.approx(1.7 * alone.step_seconds)


def test_of_several_calibrations_that_of_the_runs_is_fitted_and_undone(path, runs, tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpu, cpu = calibration_path("cuda"), calibration_path("cpu")
    write_calibration(replace(MACHINE, title="a GPU", backend="cuda"), gpu)
    write_calibration(MACHINE, cpu)
    assert update_calibration(runs_in(runs), calibration=None).written == str(cpu)
    assert read_calibration(gpu).fits == ()
    assert undo_update() == (cpu, 0)


def test_the_verb_fits_shows_and_takes_back(path, runs, monkeypatch, capsys):
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(path))
    before = path.read_bytes()
    assert main(["reconcile", "--update", "--runs", str(runs)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Median error of the step time over 4 runs, each left out of its fit:" in printed
    assert "forward elementwise 0.400 4 0.400 0.400" in printed
    assert main(["reconcile", "--update", *map(str, runs_in(runs)), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4
    assert main(["reconcile", "--undo"]) == 0
    assert "fits left: 1" in capsys.readouterr().out
    assert main(["reconcile", "--undo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] == 0
    assert path.read_bytes() == before
    assert main(["reconcile", "--undo"]) == 2
    assert "has no fit to undo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--undo", "--update"], "takes no other arguments"),
        (["--runs", "nothing", "--update"], "is not a directory"),
        (["--runs", "somewhere"], "goes with --update"),
        (["--update", "nothing"], "is not the directory of a run"),
        (["--update", "--trace", "x.json"], "is no run of this engine"),
        (["one", "two"], "is a second run directory"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reconcile", *words]) == 2
    assert said in capsys.readouterr().err
