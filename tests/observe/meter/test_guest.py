"""A meter is a guest in a loop: the same bits with it and without it, and whatever fails in it ends nothing."""

import gc
import json
import os
from contextlib import ExitStack

import pytest
import torch
from odd_loops import COMPILED, KINDS, STEPS, Unmetered

import trainledger as tl
from thinned import thinned
from trainledger.trace.recorder.storages import Storages

pytestmark = pytest.mark.torch


def bits(kind, begin):
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    return [each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in kind(begin)]


def metered(kind, folder, **options):
    """What a loop gives that is metered, what the meter said, and the steps that it wrote."""
    said, meters = [], []

    def begin(model, optimizer):
        meters.append(tl.meter_loop(model, optimizer, folder / "run", say=said.append, **options))
        return meters[-1]

    try:
        found = bits(kind, begin)
    finally:
        for meter in meters:
            meter.close()
    file = folder / "run" / "metrics.jsonl"
    lines = [json.loads(each) for each in file.read_text().splitlines()] if file.exists() else []
    gc.collect()
    return found, said, [each for each in lines if "loss" in each]


SILENT = {  # those of which not each step is written, or something is said
    "deletes_the_run", "fills_the_disk", "fills_the_disk_later", "logs_odd_values", "metered_twice",
}  # fmt: skip


@pytest.mark.parametrize(("name", "deep"), thinned([(name, deep) for name in KINDS for deep in (3, None)], every=3))
def test_a_metered_loop_has_the_bits_of_one_without(name, deep, tmp_path):
    expected = bits(KINDS[name], lambda model, optimizer: Unmetered())
    found, said, steps = metered(KINDS[name], tmp_path, **({} if deep is None else {"deep": deep}))
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if name not in SILENT:
        skipped = name == "half_precision"  # a scaler leaves out an update
        assert [each["step"] for each in steps] == list(range(1, STEPS + 1 - skipped))
        assert not any("Metering is off" in each for each in said), said


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.long
def test_a_metered_compiled_loop_has_its_bits_but_in_the_recorded_step(name, tmp_path):
    if "fails" not in name:
        in_a_compiled_loop(name, tmp_path)
        return
    child = os.fork()  # a backend that fails leaves a process in which allocations are others (torch 2.13)
    if child == 0:
        with ExitStack() as stack:
            stack.callback(os._exit, 1)
            torch.set_num_threads(1)  # a fork has no threads of OpenMP, and waits for them
            in_a_compiled_loop(name, tmp_path)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def in_a_compiled_loop(name, tmp_path):
    expected = bits(COMPILED[name], lambda model, optimizer: Unmetered())
    found, said, steps = metered(COMPILED[name], tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    unheard = all("forward" not in each["phase_seconds"] for each in steps)
    assert [each.startswith("No forward of the metered model was heard") for each in said] == [True] * unheard
    assert "later" not in name or all({"forward", "backward"} <= each["phase_seconds"].keys() for each in steps[2:])
    deep, said, steps = metered(COMPILED[name], tmp_path / "deep", deep=3)
    same = torch.allclose if any("may differ" in each for each in said) else torch.equal
    assert all(same(one, other) for one, other in zip(deep, expected, strict=True))
    assert sum("of a compiled loop was recorded" in each or "is not recorded: " in each for each in said) == 1
    assert not any("Metering is off" in each for each in said), said
    assert len(steps) == STEPS


def test_what_cannot_be_logged_is_said_once_by_name(tmp_path):
    _, said, steps = metered(KINDS["logs_odd_values"], tmp_path)
    assert sorted(said) == sorted(set(said))
    assert "meter.log(value0=...) is left out: must be a single number, not list." in said
    own = "meter.log(step=...) is left out: each line has a field of this name already; another name works: my_step."
    assert own in said
    assert {f"value{at}" for at in range(9)}.isdisjoint(steps[0])
    assert [steps[0][f"value{at}"] for at in range(9, 14)] == [0.5, 1.0, 1.0, None, None]
    assert (steps[3]["step"], "self" in steps[3]) == (4, True)


@pytest.mark.parametrize("name", ["deletes_the_run", "fills_the_disk", "fills_the_disk_later"])
@pytest.mark.long
def test_a_meter_that_cannot_write_says_so_once(name, tmp_path):
    _, said, _ = metered(KINDS[name], tmp_path)
    (sentence,) = [each for each in said if "this run is in" not in each]
    assert sentence.startswith("Metering is off, and the loop goes on without it: ")


def test_a_partial_record_is_warned_of_and_the_step_goes_on(monkeypatch):
    """An operator whose record fails: of an own kind of memory, say."""
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(Storages, "born", lambda *args: 1 / 0)
    with pytest.warns(RuntimeWarning, match="the ledger is partial: .*ZeroDivisionError"), tl.meter(model) as meter:
        model(torch.ones(1, 2)).sum().backward()
    assert meter.ledger.partial
    assert model.weight.grad is not None
