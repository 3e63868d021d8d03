"""The pytest fixture ``resource_budget``: what a step costs, held to amounts or to a lock, inside a test.

pytest imports this module in every project that trainledger is installed in, so it imports nothing of trainledger until
a test asks for the fixture, and torch only where a step is traced.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from trainledger.answers.budgets.compare import Amount, Difference
    from trainledger.ledger.ledger import Ledger


class OverBudget(AssertionError):  # noqa: N818
    """A step costs more than its budget; the text is a table and the lines that most of it arises at."""


@pytest.fixture
def resource_budget(request: pytest.FixtureRequest) -> ResourceBudget:
    """Hold a training step to a budget: ``resource_budget(model, batch, peak="1.2GB")``, or to its lock, by name."""
    return ResourceBudget(_project_of(request.path.parent) or request.config.rootpath)


class ResourceBudget:
    """What the fixture gives: to be called with a model and a batch, or with the name of a target."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(
        self,
        target: Any,
        batch: Any = None,
        *,
        parameters: Amount | None = None,
        flops: Amount | None = None,
        model_flops: Amount | None = None,
        kept: Amount | None = None,
        peak: Amount | None = None,
        collectives: Amount | None = None,
        payload: Amount | None = None,
        uncounted: Amount | None = 0,
        allow: Mapping[str, int | str] | None = None,
        **how: Any,
    ) -> Ledger | list[Difference]:
        """Raise `OverBudget` where a step costs more than these amounts (``"1.2GB"``, ``"3T"``, numbers).

        With a model and a batch the step is traced as `trainledger.trace` does, which takes the rest (``loss``,
        ``optimizer`` ...); a `Ledger` in place of a model is used as it is. The ledger is given back, for what else
        a test has to say of it. With the name of a target (``"*"`` for all of them) its figures are held to
        trainledger.lock in the test's project, as `trainledger check` does there (the nearest folder above the test
        with a lock or a ``[tool.trainledger]``, else pytest's root), ``allow`` coming before the tolerances of
        pyproject.toml. Operations without a rule are over the budget unless ``uncounted`` allows them.
        """
        __tracebackhide__ = True
        asked = {
            "parameters": parameters, "flops": flops, "model_flops": model_flops, "kept": kept, "peak": peak,
            "collectives": collectives, "payload": payload,
        }  # fmt: skip
        given = [name for name, amount in asked.items() if amount is not None]
        if isinstance(target, str):
            extra = [*given, *how, *(["batch"] if batch is not None else [])]
            if extra:
                raise _refused(extra[0], "is not allowed with the name of a target: its lock says what it may cost")
            return self._against_lock(target, allow)
        if not given:
            rule = f'say what the step may cost at most, such as peak="1.2GB" ({", ".join(asked)})'
            raise _refused("resource_budget", rule)
        if allow is not None:
            raise _refused("allow", "is for targets of a lock; the amounts here are the most already")
        return _within({**asked, "uncounted": uncounted}, target, batch, how)

    def _against_lock(self, name: str, allow: Mapping[str, int | str] | None) -> list[Difference]:
        __tracebackhide__ = True
        from trainledger.answers.budgets.check import check
        from trainledger.answers.budgets.compare import read_tolerances

        allowed = read_tolerances(allow or {}, "allow")
        with contextlib.chdir(self._root), _modules_of(self._root):
            differences = check(() if name == "*" else (name,), root=self._root, allowed=allowed)
        failed = [difference for difference in differences if difference.fails()]
        if failed:
            from trainledger.answers.pages.budget import checked
            from trainledger.report.terminal import text

            raise OverBudget(text(checked(failed)))
        return differences


def _project_of(folder: Path) -> Path | None:
    """The nearest folder from this one upwards that has a lock, or targets or tolerances in its pyproject.toml."""
    for parent in (folder, *folder.parents):
        if (parent / "trainledger.lock").is_file() or _has_settings(parent / "pyproject.toml"):
            return parent
    return None


def _has_settings(project: Path) -> bool:
    import tomllib

    try:
        tool = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError):  # there is none, or it cannot be read: then another's cannot stand in for it silently
        return project.is_file() and "tool.trainledger" in project.read_text(encoding="utf-8", errors="replace")
    return isinstance(tool, dict) and "trainledger" in tool


@contextlib.contextmanager
def _modules_of(root: Path) -> Iterator[None]:
    """Let a project's own modules come before those of the same name that another one's tests have imported."""
    own = {file.stem for file in root.iterdir() if file.suffix == ".py" or (file / "__init__.py").is_file()}
    path = sys.path[:]
    aside = {name: module for name, module in sys.modules.items() if _is_anothers(name, own, root)}
    for name in aside:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        again = {name.partition(".")[0] for name in aside}
        for name in [module for module in sys.modules if module.partition(".")[0] in again]:
            del sys.modules[name]
        sys.modules.update(aside)


def _is_anothers(name: str, own: set[str], root: Path) -> bool:
    top = name.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    return top in own and file is not None and not Path(file).resolve().is_relative_to(root.resolve())


def _within(asked: Mapping[str, Amount | None], model: Any, batch: Any, how: Mapping[str, Any]) -> Ledger:
    """The ledger of a step within its budget; raises `OverBudget`."""
    __tracebackhide__ = True
    from trainledger.answers.budgets.compare import limits_of, read_limits
    from trainledger.answers.budgets.summary import summarize
    from trainledger.ledger.ledger import Ledger

    limits = read_limits(asked)
    if isinstance(model, Ledger):
        ledger = model
    elif batch is None:
        raise _refused("batch", "is missing: give what the model is called with too, as to trainledger.trace")
    else:
        from trainledger.trace import trace

        ledger = trace(model, batch, **how)
    if ledger.partial:
        raise OverBudget(f"the step is traced only in part, and a part has no total: {ledger.partial}")
    summary = summarize(ledger, root=Path.cwd())
    figures = limits_of(summary, limits)
    if not all(figure.is_met for figure in figures):
        from trainledger.answers.pages.budget import over_budget
        from trainledger.report.terminal import text

        raise OverBudget(text(over_budget(figures, summary)))
    return ledger


def _refused(field: str, rule: str) -> Exception:
    from trainledger.spec.problem import InvalidInput, Problem

    return InvalidInput([Problem(field, None, rule)])
