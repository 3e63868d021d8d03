"""`meter_loop`: what it leaves in a directory, what it refuses, and what reads it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainledger as tl
from counting_compiler import CountingCompiler
from trainledger.answers.pages import reconciliation
from trainledger.answers.pages.record import read_run
from trainledger.answers.pages.runs import page
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.step import step_time
from trainledger.observe.meter import usage
from trainledger.report.terminal import text
from trainledger.spec.calibration import Calibration, KernelTime

pytestmark = pytest.mark.torch

_KERNELS = [("matmul", ""), ("attention", ""), ("attention", "backward"), ("copy", "")]
MACHINE = Calibration(
    title="a machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=2, cores=2,
    kernels=tuple(
        KernelTime(kind=kind, dtype="fp32", shape=(64, 64, 64), flops=2 * 64**3, nbytes=48, seconds=1e-5, phase=phase)
        for kind, phase in _KERNELS
    ),
    operation_seconds=1e-6, storage_bytes_per_second=1e8, memory_nbytes=8 * 10**9, update_seconds=1e-4,
)  # fmt: skip


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(meter, model, optimizer, steps):
    batches = [(torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))) for _ in range(steps)]
    for inputs_BT, labels_BT in meter.data(batches):
        loss = nn.functional.cross_entropy(model(inputs_BT).flatten(0, 1), labels_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.log(loss=loss, grad_norm=1.0)


def test_a_directory_that_runs_and_reconcile_read(tmp_path):
    model, optimizer = model_and_optimizer()
    with tl.meter_loop(model, optimizer, tmp_path / "run", model_flops_per_step=10**6) as meter:
        train(meter, model, optimizer, 6)
    record = read_run(tmp_path / "run")
    assert record.state["state"] == "finished"
    assert [each["step"] for each in record.steps] == [1, 2, 3, 4, 5, 6]
    assert [each["tokens"] for each in record.steps] == [32 * each for each in range(1, 7)]
    assert all(each["loss"] > 0 and each["grad_norm"] == 1.0 for each in record.steps)
    assert all(each["memory_nbytes"] > 0 for each in record.steps)
    assert record.measured.tokens_per_step == 32
    (row,) = page(tmp_path, [record]).data()["runs"]
    assert (row["state"], row["step"]) == ("finished", 6)
    assert not any("run.toml" in each for each in row["missing"])


def test_the_report_of_a_loop_says_what_to_pass_for_what_is_unknown(tmp_path):
    model, optimizer = model_and_optimizer()
    for name, options, unknown in (("plain", {}, True), ("deep", {"deep": 2, "forecast": Forecast()}, False)):
        with tl.meter_loop(model, optimizer, tmp_path / name, **options) as meter:
            train(meter, model, optimizer, 3)
        said = str(reconciliation.page(read_run(tmp_path / name)).sections)
        assert ("tl.meter_loop(..., deep=20)" in said) == unknown


def test_random_states_that_checkpointing_keeps_are_measured_as_traced(tmp_path):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed(*(nn.Linear(32, 32) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 32)
    with tl.meter_loop(model, optimizer, tmp_path / "run", deep=3):
        for _ in range(4):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    measured = read_run(tmp_path / "run").measured_ledger
    traced = tl.trace(model, x, loss="mean", optimizer=optimizer)
    assert measured.peak().by_category["activations"] == traced.peak().by_category["activations"]
    assert sum(each.name == "get_rng_state" for each in measured) == 6


def test_it_lets_go_of_model_and_optimizer(tmp_path):
    model, optimizer = model_and_optimizer()
    meter = tl.meter_loop(model, optimizer, tmp_path / "run")
    train(meter, model, optimizer, 2)
    meter.close()
    meter.close()  # twice does nothing
    train(meter, model, optimizer, 2)
    assert len(read_run(tmp_path / "run").steps) == 2


def test_a_recorded_step_gives_ledger_and_flops(tmp_path):
    model, optimizer = model_and_optimizer()
    with tl.meter_loop(model, optimizer, tmp_path / "run", deep=2) as meter:
        train(meter, model, optimizer, 10)
    record = read_run(tmp_path / "run")
    tokens_BT, labels_BT = (torch.zeros(2, 16, dtype=torch.long) for _ in range(2))

    def loss_of(logits_BTV, labels_BT):
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())

    traced = tl.trace(model, tokens_BT, loss=loss_of, label=labels_BT, optimizer=optimizer)
    assert record.measured_ledger.matmul_flops == traced.matmul_flops
    assert record.measured_ledger.kept_nbytes == traced.kept_nbytes
    of_the_step_before = 4  # its loss, which the loop holds until it has the next
    assert record.measured_ledger.peak().nbytes == traced.peak().nbytes + of_the_step_before
    assert record.measured.parameters == sum(each.numel() for each in model.parameters())
    spread = record.measured.step_seconds  # 1 and 2 are warm-up, 2 to 7 recorded
    assert spread.count + spread.discarded == 3
    assert record.measured.tokens_per_step == 32


class Container(torch.optim.Optimizer):
    """Optimizers as one, as torchtitan's `OptimizersContainer` is: states are those of the ones inside."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([each for one in optimizers for group in one.param_groups for each in group["params"]], {})

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none=True):
        for each in self.optimizers:
            each.zero_grad(set_to_none)


def test_what_is_compiled_is_so_again_after_the_recorded_steps(tmp_path):
    compiler = CountingCompiler()
    model, optimizer = model_and_optimizer()
    loss_of = torch.compile(lambda *both: nn.functional.cross_entropy(*both), backend=compiler)
    calls = []
    with tl.meter_loop(model, optimizer, tmp_path / "run", deep=3) as meter:
        batches = [(torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))) for _ in range(12)]
        for inputs_BT, labels_BT in meter.data(batches):
            before = compiler.calls
            loss_of(model(inputs_BT).flatten(0, 1), labels_BT.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            calls.append(compiler.calls - before)
    assert calls == [1, 1, 0] + 9 * [1]  # the third is recorded


def test_optimizers_in_a_container_are_one_step(tmp_path):
    model, _ = model_and_optimizer()
    inside = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in model]
    optimizer = Container(inside)
    with tl.meter_loop(model, optimizer, tmp_path / "run", deep=3) as meter:
        train(meter, model, optimizer, 4)
    record = read_run(tmp_path / "run")
    assert len(record.steps) == 4
    states = sum(2 * 4 * each.numel() + 4 for each in model.parameters())
    assert sum(nbytes for name, nbytes in record.measured_ledger.resident if name == "optimizer state") == states


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_a_loss_in_pieces_is_of_one_micro_batch(tmp_path, grad_accum):
    model, optimizer = model_and_optimizer()
    with tl.meter_loop(model, optimizer, tmp_path / "run", deep=2):
        for _ in range(3):
            for _ in range(grad_accum):
                logits_BTV = model(torch.randint(0, 64, (2, 16)))
                pieces = [each.detach().requires_grad_() for each in logits_BTV.chunk(4, dim=1)]
                for each in pieces:
                    each.logsumexp(-1).sum().backward()
                logits_BTV.backward(torch.cat([each.grad for each in pieces], dim=1))
            optimizer.step()
            optimizer.zero_grad()
    ledger = read_run(tmp_path / "run").measured_ledger
    assert ledger.micro_batches == grad_accum
    assert ledger.kept_nbytes >= 4 * 2 * 16 * 32  # what the last layer keeps, of each micro-batch


def test_a_forecast_is_kept_and_compared(tmp_path):
    model, optimizer = model_and_optimizer()
    said = []
    forecast = Forecast(step_seconds=1e-7, step_seconds_by_phase={"forward": 1e-7})
    with tl.meter_loop(model, optimizer, tmp_path / "run", forecast=forecast, say=said.append) as meter:
        train(meter, model, optimizer, 30)
    assert any("times the forecast" in each for each in said)
    assert read_run(tmp_path / "run").reconciliation["step_seconds"].ratio > 100


def traced_step(model, optimizer):
    tokens_BT, labels_BT = (torch.zeros(2, 16, dtype=torch.long) for _ in range(2))

    def loss_of(logits_BTV, labels_BT):
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())

    return tl.trace(model, tokens_BT, loss=loss_of, label=labels_BT, optimizer=optimizer)


@pytest.mark.parametrize("measured", [False, True])
def test_a_traced_step_of_the_loop_is_its_forecast(tmp_path, monkeypatch, measured):
    monkeypatch.setattr(usage, "find_calibration", lambda backend: MACHINE if measured else None)
    model, optimizer = model_and_optimizer()
    traced = traced_step(model, optimizer)
    with tl.meter_loop(model, optimizer, tmp_path / "run", forecast=traced, deep=2) as meter:
        train(meter, model, optimizer, 10)
    record = read_run(tmp_path / "run")
    rows = record.reconciliation
    assert rows["flops"].predicted == rows["flops"].measured == traced.matmul_flops
    assert rows["kept_nbytes"].predicted == rows["kept_nbytes"].measured == traced.kept_nbytes
    assert rows["peak_nbytes"].predicted == traced.peak().nbytes
    assert rows["peak_nbytes"].difference == 4  # the loss of the step before, which the loop holds
    assert rows["parameters"].predicted == rows["parameters"].measured
    assert (rows["step_seconds"].predicted is not None) == measured
    assert (rows["tokens_per_second"].predicted is not None) == measured
    assert ("trainledger measure machine" in " ".join(rows.notes)) != measured
    if measured:
        seconds = step_time(traced, MACHINE, tensors=len(list(model.parameters()))).seconds
        assert rows["step_seconds"].predicted == pytest.approx(seconds)
        assert rows["tokens_per_second"].predicted == pytest.approx(32 / seconds)
        assert {"forward", "backward", "optimizer"} <= {part.name for part in rows["step_seconds"].parts}
    assert record.predicted_ledger == traced


def test_a_trace_that_ended_early_is_no_forecast(tmp_path):
    model, optimizer = model_and_optimizer()
    partial = replace(traced_step(model, optimizer), partial="an operation has no fake")
    said = []
    with tl.meter_loop(model, optimizer, tmp_path / "run", forecast=partial, say=said.append) as meter:
        train(meter, model, optimizer, 3)
    assert "forecast = a trace that ended early" in said[0]
    assert read_run(tmp_path / "run").forecast is None
    assert len(read_run(tmp_path / "run").steps) == 3


@pytest.mark.parametrize("deep", [None, 3])
@pytest.mark.parametrize("forecast", [None, Forecast(notes=("no step time and no MFU: nobody knows",))])
def test_nothing_is_proposed_or_denied_that_a_run_has(tmp_path, deep, forecast):
    model, optimizer = model_and_optimizer()
    with tl.meter_loop(
        model, optimizer, tmp_path / "run", deep=deep, forecast=forecast, say=lambda said: None
    ) as meter:
        train(meter, model, optimizer, 9)
    shown = " ".join(text(reconciliation.page(read_run(tmp_path / "run", ledgers=False)), full=True).split())
    assert ("deep=" in shown) == (deep is None)
    assert ("forecast=" in shown) == (forecast is None)
    assert "o step time" not in shown.replace("No predicted step time", "")
    assert ("No predicted step time" in shown) == (forecast is not None)


def test_a_directory_with_another_run_is_left_as_it_is(tmp_path):
    model, optimizer = model_and_optimizer()
    said = []

    def start(steps, **options):
        with tl.meter_loop(model, optimizer, tmp_path / "run", say=said.append, **options) as meter:
            train(meter, model, optimizer, steps)
        return meter.run_dir.name, [each["step"] for each in read_run(meter.run_dir).steps]

    assert start(3) == ("run", [1, 2, 3])
    assert start(2, first_step=4) == ("run", [1, 2, 3, 4, 5])
    assert said == []
    assert start(2) == ("run-2", [1, 2])
    assert said.pop().endswith(f"5 steps (first_step=6 continues it): this run is in {tmp_path / 'run-2'}.")
    assert start(1, first_step=3) == ("run-2", [1, 2, 3])  # the last that was begun
    (tmp_path / "run-2" / "state.json").write_text(json.dumps({"state": "running", "step": 3}))
    assert start(2) == ("run-3", [1, 2])
    with tl.meter_loop(model, optimizer, tmp_path / "held"):
        assert tl.meter_loop(model, optimizer, tmp_path / "held", say=said.append).run_dir.name == "held-2"
    assert "is being written by another run" in said[-1]


def test_a_killed_loop_is_continued_where_its_steps_are(tmp_path):
    model, optimizer = model_and_optimizer()
    said = []

    def start(steps, killed=False, **options):
        with tl.meter_loop(model, optimizer, tmp_path / "mine", say=said.append, **options) as meter:
            train(meter, model, optimizer, steps)
        if killed:  # state.json is that of the start
            at_start = {"state": "running", "step": options.get("first_step", 1) - 1, "loop": "metered"}
            (meter.run_dir / "state.json").write_text(json.dumps(at_start))
        return meter.run_dir.name, [each["step"] for each in read_run(meter.run_dir).steps]

    assert start(0, killed=True)[0] == "mine"
    assert start(11, killed=True)[0] == "mine"  # no step was in it
    assert said == []
    assert start(3, killed=True)[0] == "mine-2"
    assert "of 11 steps (first_step=12 continues it)" in said.pop()
    assert start(1)[0] == "mine-3"
    assert start(2, first_step=12, killed=True) == ("mine", list(range(1, 14)))
    assert start(1, first_step=15) == ("mine", [*range(1, 14), 15])  # its last line was not written any more
    assert start(1, first_step=4) == ("mine-2", [1, 2, 3, 4])  # of two that have them the last that was begun
    assert start(1, first_step=100)[0] == "mine-4"
    assert "which first_step=100 does not continue" in said[-1]


def test_an_error_in_the_loop_ends_the_run_as_failed(tmp_path):
    model, optimizer = model_and_optimizer()

    def broken():
        with tl.meter_loop(model, optimizer, tmp_path / "run") as meter:
            train(meter, model, optimizer, 1)
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        broken()
    assert read_run(tmp_path / "run").state["state"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((None, None), "model: must be a torch module, not NoneType"),
        ((nn.Linear(1, 1), 3), "optimizer: must be an optimizer of torch or several, not int"),
    ],
)
def test_what_is_refused(arguments, sentence):
    with pytest.raises(tl.InvalidInput, match=sentence):
        tl.meter_loop(*arguments)


def test_numbers_that_are_refused(tmp_path):
    model, optimizer = model_and_optimizer()
    with pytest.raises(tl.InvalidInput, match="deep = 0: must be a whole number, at least 1"):
        tl.meter_loop(model, optimizer, tmp_path / "run", deep=0)
    assert not (tmp_path / "run").exists()


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("metered", "called", "times"),
    [
        (lambda model: model, lambda model: model, 0),
        (compiled, lambda model: model, 0),
        (lambda model: model, compiled, 1),
        (lambda model: model, lambda model: model.forward, 1),
    ],
)
def test_a_model_that_the_loop_does_not_call_is_said_once(tmp_path, metered, called, times):
    torch.compiler.reset()
    model, optimizer = model_and_optimizer()
    known, said = metered(model), []
    with tl.meter_loop(known, optimizer, tmp_path / "run", say=said.append) as meter:
        train(meter, called(known), optimizer, 5)
    assert sum(each.startswith("No forward of the metered model was heard") for each in said) == times
    phases = {name for each in read_run(tmp_path / "run").steps for name in each["phase_seconds"]}
    assert ("forward" in phases) == (times == 0)


def test_a_loop_that_tells_its_phases_itself_needs_no_hooks(tmp_path):
    model, optimizer = model_and_optimizer()
    said = []
    with tl.meter_loop(model, optimizer, tmp_path / "run", say=said.append, hear_model=False) as meter:
        train(meter, model, optimizer, 5)
    assert not [each for each in said if "heard" in each]
