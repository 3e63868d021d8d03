"""Targets as a pyproject.toml has them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from trainledger.answers.budgets.compare import Tolerance
from trainledger.answers.budgets.target import Target, named, targets_of_project
from trainledger.spec.problem import InvalidInput


def read(tmp_path: Path, text: str) -> dict[str, tuple[Target, dict[str, Tolerance]]]:
    (tmp_path / "pyproject.toml").write_text(text)
    return targets_of_project(tmp_path)


def test_targets_and_their_tolerances(tmp_path: Path) -> None:
    assert targets_of_project(tmp_path) == {}
    assert read(tmp_path, "[project]\nname = 'x'") == {}
    found = read(tmp_path, """
        [tool.trainledger.allow]
        peak = "1%"
        flops = 10
        [tool.trainledger.targets.small]
        module = "package.module:build"
        input = "int64[8,2048]"
        allow = { flops = 0 }
        [tool.trainledger.targets."the run"]
        run = "run.toml"
        set = ["recipe.micro_batch=2"]
        by = "trace"
    """)  # fmt: skip
    assert found["small"][0] == Target(module="package.module:build", input=("int64[8,2048]",))
    assert found["small"][1] == {"peak": Tolerance(share=Fraction(1, 100)), "flops": Tolerance()}
    assert found["the run"][0] == Target(run="run.toml", set=("recipe.micro_batch=2",), by="trace")
    assert found["the run"][1]["flops"] == Tolerance(amount=10)


@pytest.mark.parametrize("text", ["tool = 3\n", "[tool]\ntrainledger = 3\n", "[[tool]]\n"])
def test_settings_that_are_no_table(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must be a table"):
        read(tmp_path, text)


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        read(tmp_path, """
            [tool.trainledger]
            target = 1
            allow = { pek = "1%" }
            [tool.trainledger.targets]
            a = { modul = "x:y" }
            b = { module = "x:y", run = "run.toml" }
            c = { run = "run.toml", input = "int64[8]" }
            d = { module = "x:y", by = "trace", kernels = "gpu" }
            e = 3
            f = { run = "run.toml", by = "traced" }
            g = { run = 1 }
            h = {}
            i = { module = "x:y", grad_accum = 0 }
            j = { module = "x:y", world_size = 4, rank = 4, autocast = "bf16" }
            k = { hf = "config.json", world_size = 4 }
            l = { trace = "x:y" }
        """)  # fmt: skip
    printed = str(error.value)
    at = "tool.trainledger.targets"
    for sentence in (
        "tool.trainledger.target = 1: is unknown; there are targets and allow; nearest that works: targets",
        "tool.trainledger.allow.pek",
        f"{at}.a.modul = 'x:y': is not a known field; nearest that works: module",
        f"{at}.l.trace = 'x:y': is not a known field; a target is a run, a module, a hf, with set, by, input, label",
        f"{at}.b.run and module: must be one of run",
        f"{at}.c.input = ('int64[8]',): is for a target with module or hf",
        f"{at}.d.by = 'trace': is for a target with run",
        f"{at}.d.kernels = 'gpu': must be 'cpu', 'cuda', 'sm70', 'sm90', 'sm100' or 'other'",
        f"{at}.e = 3: must be a table",
        f"{at}.f.by = 'traced': must be 'closed form' or 'trace'; nearest that works: trace",
        f"{at}.g.run = 1: must be a text",
        f"{at}.h.run, module or hf: must be one of run",
        f"{at}.i.grad_accum = 0: must be at least 1",
        f"{at}.j.autocast = 'bf16': is decided by a program of many ranks itself",
        f"{at}.j.rank = 4: must be from 0 to 3",
        f"{at}.k.world_size = 4: is for a module that is a program of many ranks",
    ):
        assert sentence in printed
    assert printed.startswith(str(tmp_path / "pyproject.toml"))


@pytest.mark.parametrize("text", ["[tool]\ntrainledger = 1", "[tool.trainledger]\ntargets = 1"])
def test_what_is_no_table(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must be a table"):
        read(tmp_path, text)


def test_names_of_the_command_line() -> None:
    assert named("runs/small.toml", {}) == Target(run="runs/small.toml")
    assert named("a.b:c", {"input": ["int64[8]"]}) == Target(module="a.b:c", input=("int64[8]",))
    assert named("hf/config.json", {}) == Target(hf="hf/config.json")
    assert named("a:b", {}).is_own_name("a:b")
    assert not named("a:b", {}).is_own_name("small")
