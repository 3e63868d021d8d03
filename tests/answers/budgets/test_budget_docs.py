"""docs/budgets.md does what it says: its files are written, its commands run, what they print is compared."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from trainledger.cli import main

pytestmark = pytest.mark.process

HOUSE = Path(__file__).parents[3]
TEXT = (HOUSE / "docs" / "budgets.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)


def files(language: str) -> dict[str, str]:
    """The blocks of a language that begin with the name of a file, by that name."""
    named = [(body.partition("\n"), body) for kind, body in BLOCKS if kind == language]
    return {first.removeprefix("# ").strip(): rest for (first, _, rest), _ in named if first.startswith("# ")}


def consoles() -> list[list[tuple[str, str]]]:
    """What is typed and printed: of each block the commands, each with its output."""
    bodies = [body for kind, body in BLOCKS if kind == "console"]
    return [re.findall(r"\$ (.*)\n((?:(?!\$ ).*\n)*)", body) for body in bodies]


def run(command: str, project: Path) -> tuple[int, str]:
    """A command in a process of its own, which does not find the project's modules by itself; exit code, output."""
    words = shlex.split(command)
    assert words[0] == "trainledger"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *words], cwd=project, env=env, capture_output=True, text=True
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def run_here(command: str, project: Path) -> tuple[int, str]:
    """The same in this process, which has torch already: with the project's modules as they are now."""
    words = shlex.split(command)
    call = {"trainledger": main, "pytest": lambda rest: pytest.main(["-q", "-p", "no:cacheprovider", *rest])}[words[0]]
    printed = io.StringIO()
    path, modules = sys.path[:], set(sys.modules)
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
            patch.delenv("PYTEST_ADDOPTS", raising=False)
            patch.setenv("COLUMNS", "80")
            patch.chdir(project)
            code = int(call(words[1:]))
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(project):
                del sys.modules[name]
    return code, printed.getvalue()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of the page, locked, before anybody changes it."""
    folder = tmp_path_factory.mktemp("project")
    for name, content in {**files("python"), "pyproject.toml": files("toml")["pyproject.toml"]}.items():
        (folder / name).write_text(content)
    assert run_here("trainledger init run.toml", folder)[0] == 0
    (lock, _), (check, _) = consoles()[0]
    assert (lock, check) == ("trainledger lock", "trainledger check")
    code, printed = run_here(lock, folder)
    assert code == 0, printed
    return folder


def edit(project: Path) -> None:
    """Make the change that the page shows."""
    diff = files("diff")["model.py"]
    (old,), (new,) = re.findall(r"^-(.*)$", diff, re.MULTILINE), re.findall(r"^\+(.*)$", diff, re.MULTILINE)
    source = (project / "model.py").read_text()
    assert source.count(old) == 1
    (project / "model.py").write_text(source.replace(old, new))


def workflow_steps() -> list[str]:
    """What the action of the workflow runs, with the inputs that it is given there."""
    yaml: Any = pytest.importorskip("yaml")
    workflow = yaml.safe_load(files("yaml")[".github/workflows/budgets.yml"])
    action = yaml.safe_load((HOUSE / "action.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    given = [step["with"] for step in steps if "/trainledger@" in step.get("uses", "")]
    assert all(inputs.keys() <= action["inputs"].keys() for inputs in given)
    assert any("trainledger check $TARGETS $OPTIONS" in step["run"] for step in action["runs"]["steps"])
    return [f"trainledger check {inputs['options']}" for inputs in given]


def test_as_the_page_tells_it(project: Path) -> None:
    (_, (check, unchanged)), ((changed_check, changed),), *_ = consoles()
    lock = (project / "trainledger.lock").read_text()
    for line in files("toml")["trainledger.lock"].splitlines():
        assert line in lock.splitlines(), line
    (step,) = workflow_steps()
    assert step == f"{check} --tight"
    assert run_here(step, project) == (0, unchanged)
    code, printed = run_here("pytest test_budget.py", project)
    assert code == 0, printed
    assert "2 passed" in printed

    edit(project)
    assert run(changed_check, project) == (1, changed)


def test_targets_by_name(project: Path) -> None:
    for command, says in consoles()[2]:
        code, printed = run_here(command, project)
        assert code == 0, printed
        assert says in ("", printed)


def test_the_hooks_run(project: Path) -> None:
    yaml: Any = pytest.importorskip("yaml")
    hooks = {each["id"]: each for each in yaml.safe_load((HOUSE / ".pre-commit-hooks.yaml").read_text())}
    config = yaml.safe_load(files("yaml")[".pre-commit-config.yaml"])
    used = [hook["id"] for repo in config["repos"] for hook in repo["hooks"]]
    assert used == ["trainledger-check"]
    assert set(hooks) == {"trainledger-check", "trainledger-check-runs"}
    for each in hooks.values():
        assert each["entry"] == "trainledger check"
        assert each["pass_filenames"] is False
        assert all(re.search(each["files"], name) for name in ("run.toml", "trainledger.lock"))
    assert re.search(hooks["trainledger-check"]["files"], "src/model.py")
    assert run_here(f"{hooks['trainledger-check-runs']['entry']} run", project)[0] == 0
