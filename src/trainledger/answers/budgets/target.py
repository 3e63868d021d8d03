"""A target: a run file, or a module or model of the user's own, all that its figures depend on, and these figures."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from trainledger.answers.budgets.compare import Tolerance, read_tolerances
from trainledger.answers.budgets.summary import Summary, operation, summarize
from trainledger.answers.load import load_file
from trainledger.answers.question import count, text
from trainledger.spec.device import KERNELS
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import NO_FIELD, from_plain
from trainledger.spec.problem import InvalidInput, Problem, nearest_text

if TYPE_CHECKING:
    from trainledger.ledger.ledger import Ledger
    from trainledger.spec.run import Run

_VERSIONED = ("torch", "transformers")  # libraries whose versions may move a figure
CLOSED_FORM, TRACE = "closed form", "trace"
PROJECT = "pyproject.toml"
_OF_RUN = ("set", "by")
_OF_ONE_DEVICE = ("dtype", "autocast", "checkpointing", "grad_accum")  # a program of many ranks does these itself
_KINDS = ("run", "module", "hf")
_LISTS = ("set", "input", "checkpointing")


class OfStep(TypedDict, total=False):
    """Your own code: what a step of a module is called with, its loss and its optimizer."""

    input: Annotated[
        Sequence[str],
        text(
            "an input of the model, such as int64[8,2048] or labels=int64[8,2048]; may be repeated",
            several=True,
            metavar="SHAPE",
        ),
    ]
    loss: Annotated[
        str,
        text(
            "a part of what the model returns (.loss, .1), package.module:function of it, mean, sum, or a loss of "
            "torch.nn.functional (the output itself or its .loss)"
        ),
    ]
    label: Annotated[str, text("what the loss compares the output with, such as int64[8,2048]", metavar="SHAPE")]
    step: Annotated[str, text("forward, backward, or an optimizer such as adamw-fused (adamw)")]
    autocast: Annotated[str, text("run forward under autocast, such as bf16", metavar="DTYPE")]
    dtype: Annotated[str, text("the format of what is built without one (fp32, or the configuration's)")]
    kernels: Annotated[str, text("whose: cpu, cuda, sm90, sm100 (cpu; the --device's)")]
    grad_accum: Annotated[int, count("micro-batches in a step (1)")]
    checkpointing: Annotated[
        Sequence[str],
        text("recompute modules in backward, such as layers.*; may be repeated", several=True, metavar="PATHS"),
    ]
    world_size: Annotated[
        int, count("the code is a program for torchrun: the step of one rank of N, with its collectives")
    ]
    rank: Annotated[int, count("which rank of the world (0)", least=0, metavar="R")]
    first_step: Annotated[bool, text("the step that creates the optimizer's state", default=False)]


@frozen(kw_only=True)
class Target:
    """One thing whose cost is locked.

    A ``run`` file, with fields changed by ``set`` as with ``--set``, accounted for ``by`` closed form or trace (of the
    engine's own step); a ``module`` (``package.module:build``); or ``hf``, a config.json of Hugging Face. The step of
    the latter two has an ``input`` (``int64[8,2048]``), a ``label`` and a ``loss``, an optimizer (``step``), and the
    rest, all as `trainledger trace` takes them. With a ``world_size`` the module is a program of so many ranks, such as
    a script's ``main`` for torchrun, of which one ``rank`` is traced (`trainledger.trace.distributed.trace_rank`).
    """

    run: str = ""
    set: tuple[str, ...] = ()
    by: str = ""
    module: str = ""
    hf: str = ""
    input: tuple[str, ...] = ()
    label: str = ""
    step: str = ""
    loss: str = ""
    dtype: str = ""
    autocast: str = ""
    kernels: str = ""
    checkpointing: tuple[str, ...] = ()
    grad_accum: int = 1
    first_step: bool = False
    world_size: int = 0
    rank: int = 0

    def problems(self) -> Iterator[Problem]:
        """What its fields say against each other."""
        kinds = [name for name in ("run", "module", "hf") if getattr(self, name)]
        if len(kinds) != 1:
            rule = 'must be one of run = "run.toml", module = "package.module:build" and hf = "config.json"'
            yield Problem(" and ".join(kinds) or "run, module or hf", None, rule)
            return
        theirs, kind = (tuple(OfStep.__annotations__), "module or hf") if self.run else (_OF_RUN, "run")
        yield from self._given(theirs, f"is for a target with {kind}")
        if self.world_size and self.module:
            yield from self._given(_OF_ONE_DEVICE, "is decided by a program of many ranks itself")
        elif not self.run:
            yield from self._given(("world_size", "rank"), "is for a module that is a program of many ranks")
        if not 0 <= self.rank < max(1, self.world_size):
            yield Problem("rank", self.rank, f"must be from 0 to {max(0, self.world_size - 1)}, below world_size", 0)
        for name, known in (("by", (CLOSED_FORM, TRACE)), ("kernels", KERNELS)):
            value = getattr(self, name)
            if value and value not in known:
                rule = f"must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
                yield Problem(name, value, rule, nearest_text(value, known))
        for name, least in (("grad_accum", 1), ("world_size", 0)):
            if getattr(self, name) < least:
                yield Problem(name, getattr(self, name), f"must be at least {least}", least)

    def _given(self, names: Iterable[str], rule: str) -> Iterator[Problem]:
        fields = Target.__dataclass_fields__
        return (
            Problem(name, getattr(self, name), rule) for name in names if getattr(self, name) != fields[name].default
        )

    def described(self) -> dict[str, Any]:
        """The fields that are not at their defaults, in order."""
        fields = Target.__dataclass_fields__
        return {name: value for name, value in vars(self).items() if value != fields[name].default}

    def is_own_name(self, name: str) -> bool:
        """Whether a name alone says what the target is, as one that was given on the command line."""
        return name in (self.run, self.module, self.hf)


Targets = dict[str, tuple[Target, dict[str, Tolerance]]]


def targets_of_project(root: Path) -> Targets:
    """The targets of ``[tool.trainledger.targets.NAME]`` in a pyproject.toml, each with its tolerances; {} without one.

    Raises `InvalidInput` with every problem of the file's part.
    """
    path = root / PROJECT
    if not path.is_file():
        return {}
    from trainledger.spec.runfile import read_table

    tool = read_table(path).get("tool", {})
    if not isinstance(tool, Mapping):
        raise InvalidInput([Problem("tool", tool, "must be a table")], os.fspath(path))
    table = tool.get("trainledger", {})
    problems: list[Problem] = []
    found: Targets = {}
    if not isinstance(table, Mapping):
        raise InvalidInput([Problem("tool.trainledger", table, "must be a table")], os.fspath(path))
    for name in table.keys() - {"targets", "allow"}:
        nearest = nearest_text(name, ("targets", "allow"))
        problems.append(
            Problem(f"tool.trainledger.{name}", table[name], "is unknown; there are targets and allow", nearest)
        )
    everywhere = _allowed(table.get("allow", {}), "tool.trainledger.allow", problems)
    targets = table.get("targets", {})
    if not isinstance(targets, Mapping):
        problems.append(Problem("tool.trainledger.targets", targets, "must be a table of targets"))
        targets = {}
    for name, fields in targets.items():
        at = f"tool.trainledger.targets.{name}"
        if not isinstance(fields, Mapping):
            problems.append(Problem(at, fields, 'must be a table such as { run = "run.toml" }'))
            continue
        own = _allowed(fields.get("allow", {}), f"{at}.allow", problems)
        try:
            target = read_target({key: value for key, value in fields.items() if key != "allow"}, at)
        except InvalidInput as error:
            problems.extend(error.problems)
            continue
        found[name] = (target, {**everywhere, **own})
    if problems:
        raise InvalidInput(problems, os.fspath(path))
    return found


def read_target(fields: Mapping[str, Any], at: str) -> Target:
    """A target from plain data; raises `InvalidInput` with fields named below ``at``."""
    data = dict(fields)
    for name in _LISTS:
        if isinstance(data.get(name), str):
            data[name] = [data[name]]
    known = Target.__dataclass_fields__
    try:
        return from_plain(Target, data)
    except InvalidInput as error:
        raise InvalidInput([_placed(problem, at, known) for problem in error.problems]) from None


def _placed(problem: Problem, at: str, known: Mapping[str, Any]) -> Problem:
    rule = problem.rule
    if problem.rule == NO_FIELD and problem.nearest is None:  # written as on the command line: trace = "net:build"
        rule += f"; a target is a {', a '.join(_KINDS)}, with {', '.join(name for name in known if name not in _KINDS)}"
    return Problem(f"{at}.{problem.field}", problem.value, rule, problem.nearest)


def named(name: str, fields: Mapping[str, Any]) -> Target:
    """A target that is named on the command line by its run file, module or config.json; raises `InvalidInput`."""
    kind = "hf" if name.endswith(".json") else "run" if name.endswith(".toml") else "module"
    return read_target({kind: name, **fields}, name)


def _allowed(data: object, field: str, problems: list[Problem]) -> dict[str, Tolerance]:
    try:
        return read_tolerances(data, field)
    except InvalidInput as error:
        problems.extend(error.problems)
        return {}


@frozen
class Evaluation:
    """A target's figures, the versions that made them, notes that qualify them, and the ``outlook`` (`outlook`)."""

    summary: Summary
    versions: str
    notes: tuple[str, ...] = ()
    outlook: str = ""


def evaluate(name: str, target: Target, root: Path) -> Evaluation:
    """The figures of a target; raises `InvalidInput` where they cannot be had whole.

    Modules are imported from the working directory, which is ``root``. What they print goes to standard error.
    """
    with _nothing_collected(), redirect_stdout(sys.stderr):
        try:
            ledger = ledger_of_run(name, target, root) if target.run else ledger_of_code(name, target)
        except SystemExit as error:
            rule = f"ended the process (exit code {error.code}) instead of building a model"
            raise InvalidInput([Problem(f"targets.{name}", None, rule)]) from error
    if ledger.partial:
        rule = f"is traced only in part, and a part has no total: {ledger.partial}"
        raise InvalidInput([Problem(f"targets.{name}", None, rule)])
    summary = summarize(ledger, root=root, by_line=not target.run)
    ahead = outlook(load_file(root / target.run, target.set, search=False)) if target.run else ""
    return Evaluation(summary, versions(traced=ledger.writer == "trace"), (*ledger.notes, *_uncounted(ledger)), ahead)


def outlook(run: Run) -> str:
    """Whether a run fits its devices, and the predicted step; empty where nothing of these is known of them."""
    from trainledger.answers.machine import THIS_MACHINE
    from trainledger.answers.pages.interval import fits
    from trainledger.answers.plan import planned
    from trainledger.spec.units import format_seconds

    if run.cluster.device == THIS_MACHINE:
        return ""
    forecast = planned(run).forecast
    where = f"{run.cluster.count:,} x {run.cluster.device}"
    said = [] if forecast.fits is None else [f"{fits(forecast.fits, forecast.chance_of_fitting)} on {where}"]
    if forecast.step_seconds is not None:
        said.append(f"a step takes {format_seconds(forecast.step_seconds)} (predicted)")
    return ", ".join(said)


def _uncounted(ledger: Ledger) -> list[str]:
    """A sentence for each operation without a rule, with the lines that it runs at."""
    notes = []
    for name, calls in ledger.uncounted:
        unknown = [entry for entry in ledger.entries if entry.kind == "unknown" and entry.name == name]
        lines = sorted({entry.line for entry in unknown if entry.line})
        at = f" at {', '.join(lines)}" if lines else ""
        notes.append(
            f"{calls} x {operation(unknown[0]) if unknown else name}{at} has no rule: its FLOPs are not counted"
        )
    return notes


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Memory in reference cycles stays live meanwhile: when Python's collector would free it cannot be predicted."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def ledger_of_run(name: str, target: Target, root: Path) -> Ledger:
    """The ledger of a run file's step: in closed form, or traced from the engine's modules."""
    path = root / target.run
    run = load_file(path, target.set, search=False)
    if run.layout.auto:
        rule = (
            "is a search, which may find another layout tomorrow; write down the layout that it finds (`trainledger "
            f"plan {target.run}` prints it)"
        )
        raise InvalidInput([Problem("layout.auto", True, rule)], str(path))
    if target.by == TRACE:
        if not run.layout.alone:
            rule = f"the engine's modules are traced on one device; leave [layout] out, or lock {name} in closed form"
            raise InvalidInput([Problem("layout", None, rule)], str(path))
        from trainledger.observe.measure.step import rehearse

        return rehearse(run)
    from trainledger.answers.cost import account
    from trainledger.answers.machine import THIS_MACHINE, kernels_of

    # What was measured on the machine that checks must not decide which kernels are accounted for.
    if run.cluster.device != THIS_MACHINE:
        return account(run, backend=kernels_of(run))
    return account(run, backend="cpu" if run.cluster.backend in ("auto", "cpu") else "cuda")


def ledger_of_code(name: str, target: Target) -> Ledger:
    """The ledger of a step of a user's module or of a Hugging Face configuration, on fake tensors."""
    try:
        return _traced(target)
    except InvalidInput as error:  # of a target the fields have the names of its table, not of flags
        problems = [
            replace(problem, field=f"targets.{name}.{problem.field[2:].replace('-', '_')}")
            if problem.field.startswith("--")
            else problem
            for problem in error.problems
        ]
        raise InvalidInput(problems, error.where) from error


def _traced(target: Target) -> Ledger:
    from trainledger.trace.command import trace_named
    from trainledger.trace.recorder.source_lines import remembering_makers

    given = ("hf", "label", "loss", "step", "dtype", "autocast", "world_size")
    words: dict[str, Any] = {name: getattr(target, name) or None for name in given}
    words |= {name: getattr(target, name) for name in ("input", "checkpointing", "grad_accum", "first_step", "rank")}
    with remembering_makers():
        ledger, _ = trace_named(target.module, kernels=target.kernels or "cpu", field="--module", **words)
    return ledger


def versions(*, traced: bool) -> str:
    """The versions that a figure may depend on, without the builds that they have on a machine."""
    from importlib.metadata import PackageNotFoundError, version

    from trainledger import __version__

    found = [f"trainledger {__version__}"]
    for each in _VERSIONED if traced else ():
        if each in sys.modules:
            try:
                found.append(f"{each} {version(each).partition('+')[0]}")
            except PackageNotFoundError:
                continue
    return ", ".join(found)
