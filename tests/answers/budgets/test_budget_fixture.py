"""The pytest fixture: what it takes, what it tells, and that it costs nothing where it is not used."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainledger.cli.pytest_plugin import OverBudget, ResourceBudget, _modules_of, _project_of
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.spec.problem import InvalidInput

torch.set_num_threads(1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


X = torch.zeros(100, 64)
FORWARD = 2 * 100 * 64 * 128


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def test_the_fixture_is_there(resource_budget: Any) -> None:
    """By the entry point of the installed package."""
    assert isinstance(resource_budget, ResourceBudget)
    ledger = resource_budget(model(), X, loss=total, parameters=64 * 128 * 2 + 128 + 64, model_flops=5 * FORWARD)
    assert isinstance(ledger, Ledger)
    assert ledger.model_flops == 5 * FORWARD  # forward twice, backward four times less that to the input
    assert resource_budget(ledger, kept=ledger.kept_nbytes, peak=ledger.peak().nbytes) is ledger


def test_a_byte_more_is_over(resource_budget: Any) -> None:
    ledger = resource_budget(model(), X, loss=total, peak="1GB")
    with pytest.raises(OverBudget) as over:
        resource_budget(ledger, kept=ledger.kept_nbytes - 1, peak="1GB")
    sentence = str(over.value)
    assert sentence.startswith("the step is over its budget in kept for backward\n")
    assert "51,203    51,204      1 B" in sentence  # equal as they are shown, so shown in full
    assert "kept 51.2 kB at module 1 (aten::relu)" in sentence
    assert "test_budget_fixture.py" in sentence
    assert isinstance(over.value, AssertionError)
    with pytest.raises(OverBudget, match="over its budget in FLOPs done, peak memory"):
        resource_budget(ledger, flops=1, peak="1kB", kept="1GB")


def test_what_is_not_counted_is_over(resource_budget: Any) -> None:
    entries = (Entry("op", "block", "forward", "unknown"),)
    ledger = Ledger(entries, uncounted=(("my_lib::op", 3),))
    with pytest.raises(OverBudget, match="Without a rule: 3 x my_lib::op"):
        resource_budget(ledger, flops=0)
    assert resource_budget(ledger, flops=0, uncounted=3) is ledger
    assert resource_budget(ledger, flops=0, uncounted=None) is ledger


def test_collectives(resource_budget: Any) -> None:
    entries = (Entry("all_reduce", "block", "forward", "collective", payload=8, group="tensor", loop=(("layers", 3),)),)
    ledger = Ledger(entries)
    resource_budget(ledger, collectives=3, payload=24)
    with pytest.raises(OverBudget, match="over its budget in collectives, payload of collectives"):
        resource_budget(ledger, collectives=2, payload="23B")


def test_a_part_has_no_total(resource_budget: Any) -> None:
    with pytest.raises(OverBudget, match="traced only in part"):
        resource_budget(Ledger((), partial="forward ended at model.py:3"), peak="1GB")


def test_wrong_uses_are_sentences(resource_budget: Any) -> None:
    for call, sentence in (
        (lambda: resource_budget(model(), X, loss=total), "say what the step may cost at most"),
        (lambda: resource_budget(model(), X, peak="much"), "peak = 'much': is not a number of bytes"),
        (lambda: resource_budget(model(), X, peak=-1), "peak = -1: must be a whole number"),
        (lambda: resource_budget(model(), X, peak="1GB", allow={"peak": "1%"}), "allow: is for targets of a lock"),
        (lambda: resource_budget(model(), peak="1GB"), "batch: is missing: give what the model is called with"),
        (lambda: resource_budget("model", peak="1GB"), "peak: is not allowed with the name of a target"),
        (lambda: resource_budget("model", X), "batch: is not allowed with the name"),
        (lambda: resource_budget("model", loss=total), "loss: is not allowed with the name"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            call()


def test_against_the_lock_of_the_root(tmp_path: Path) -> None:
    """From wherever the tests were started, and with tolerances of the test's own."""
    from trainledger.answers.budgets.check import lock

    run = "[model]\npreset = 'gpt2'\n[recipe]\nseq_len = 64\nglobal_batch = 4\nmicro_batch = 2\nsteps = 1\n"
    (tmp_path / "run.toml").write_text(run)
    lock(["run.toml"], root=tmp_path)
    budget = ResourceBudget(tmp_path)
    assert [each.name for each in budget("run.toml")] == [each.name for each in budget("*")] == ["run.toml"]
    (tmp_path / "run.toml").write_text(run.replace("micro_batch = 2", "micro_batch = 4"))
    with pytest.raises(OverBudget, match=r"kept +102\.1 MB +204\.2 MB"):
        budget("run.toml")
    assert budget("run.toml", allow={"kept": "120%", "peak": "120%", "flops": "1%"})
    with pytest.raises(InvalidInput, match=r"is not in trainledger.lock; nearest that works: run.toml"):
        budget("run")


def test_each_folder_of_a_repository_has_its_own_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run from above both, with modules of the same name in each, as `trainledger check` in each folder."""
    from trainledger.answers.budgets.check import lock

    code = "import torch\nModel = lambda: torch.nn.Linear({0}, {0})\n"
    tested = "import model\ndef test_it(resource_budget):\n    assert len(resource_budget('*')) == 1\n"
    for width in (8, 16):
        folder = tmp_path / f"of_{width}"
        (folder / "tests").mkdir(parents=True)
        (folder / "model.py").write_text(code.format(width))
        target = f'module = "model:Model"\ninput = "float32[2,{width}]"\nloss = "mean"\n'
        (folder / "pyproject.toml").write_text(f"[tool.trainledger.targets.model]\n{target}")
        found = f"import sys\nsys.path.append({str(folder)!r})\n"
        (folder / "tests" / f"test_{width}.py").write_text(found + tested)
        with contextlib.chdir(folder), _modules_of(folder):
            lock(root=folder)
            sys.modules.pop("model", None)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    try:
        assert pytest.main(["-q", "-p", "no:cacheprovider", str(tmp_path)]) == 0
    finally:
        sys.modules.pop("model", None)
    assert "2 passed" in capsys.readouterr().out


def test_the_nearest_project_is_that_of_the_test(tmp_path: Path) -> None:
    deep = tmp_path / "part" / "tests" / "deep"
    deep.mkdir(parents=True)
    (tmp_path / "trainledger.lock").write_text("")
    assert _project_of(deep) == tmp_path
    (tmp_path / "part" / "pyproject.toml").write_text("[tool.other]\n")
    assert _project_of(deep) == tmp_path
    (tmp_path / "part" / "pyproject.toml").write_text('[tool.trainledger.allow]\npeak = "1%"\n')
    assert _project_of(deep) == tmp_path / "part"
    (tmp_path / "part" / "pyproject.toml").write_text("[tool.trainledger.allow\n")  # torn: `check` says so
    assert _project_of(deep) == tmp_path / "part"


def test_the_plugin_is_light() -> None:
    """pytest imports it in every project: neither torch nor numpy nor anything of trainledger's rooms comes with it."""
    code = (
        "import sys, trainledger.cli.pytest_plugin\n"
        "print([each for each in ('torch', 'numpy', 'tomllib', 'trainledger.answers.budgets', 'trainledger.spec') "
        "if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
