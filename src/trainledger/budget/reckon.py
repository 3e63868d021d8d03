"""The figures of a target as its code is now."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainledger.budget.footprint import Footprint, footprint, operation
from trainledger.budget.target import TRACE, Target
from trainledger.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem

if TYPE_CHECKING:
    from trainledger.ledger.ledger import Ledger

_TOLD = ("torch", "transformers")  # libraries whose versions may move a figure


@frozen
class Reckoned:
    """A target's figures, the versions that made them, and what must be said of them."""

    footprint: Footprint
    versions: str
    notes: tuple[str, ...] = ()


def reckon(name: str, target: Target, root: Path) -> Reckoned:
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
    found = footprint(ledger, root=root, by_line=not target.run)
    return Reckoned(found, versions(traced=ledger.writer == "trace"), (*ledger.notes, *_uncounted(ledger)))


def _uncounted(ledger: Ledger) -> list[str]:
    """A sentence for each operation without a rule, with the lines that it runs at."""
    told = []
    for name, count in ledger.uncounted:
        unknown = [each for each in ledger.entries if each.kind == "unknown" and each.name == name]
        lines = sorted({each.line for each in unknown if each.line})
        at = f" at {', '.join(lines)}" if lines else ""
        told.append(
            f"{count} x {operation(unknown[0]) if unknown else name}{at} has no rule: its FLOPs are not counted"
        )
    return told


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Memory in reference cycles stays live meanwhile: when Python's collector would free it, nobody knows."""
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
    from trainledger.api.load import load_file

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
        from trainledger.measure.step import rehearse

        return rehearse(run)
    from trainledger.api.cost import account
    from trainledger.api.machine import THIS_MACHINE, kernels_of

    # What was measured on the machine that checks must not decide which kernels are accounted for.
    if run.cluster.device != THIS_MACHINE:
        return account(run, backend=kernels_of(run))
    return account(run, backend="cpu" if run.cluster.backend in ("auto", "cpu") else "cuda")


def ledger_of_code(name: str, target: Target) -> Ledger:
    """The ledger of a step of somebody's module or of a Hugging Face configuration, on fake tensors."""
    try:
        return _traced(target)
    except InvalidInput as error:  # of a target the fields have the names of its table, not of flags
        problems = [
            replace(each, field=f"targets.{name}.{each.field[2:].replace('-', '_')}")
            if each.field.startswith("--")
            else each
            for each in error.problems
        ]
        raise InvalidInput(problems, error.where) from error


def _traced(target: Target) -> Ledger:
    from trainledger.trace.command import trace_named

    given = ("hf", "label", "loss", "step", "dtype", "autocast", "world_size")
    words: dict[str, Any] = {name: getattr(target, name) or None for name in given}
    ledger, _ = trace_named(
        target.module, input=target.input, kernels=target.kernels or "cpu", checkpointing=target.checkpointing,
        grad_accum=target.grad_accum, first_step=target.first_step, rank=target.rank, field="--module",
        **words,
    )  # fmt: skip
    return ledger


def versions(*, traced: bool) -> str:
    """The versions that a figure may depend on, without the builds that they have on a machine."""
    from importlib.metadata import PackageNotFoundError, version

    from trainledger import __version__

    told = [f"trainledger {__version__}"]
    for each in _TOLD if traced else ():
        if each in sys.modules:
            try:
                told.append(f"{each} {version(each).partition('+')[0]}")
            except PackageNotFoundError:
                continue
    return ", ".join(told)
