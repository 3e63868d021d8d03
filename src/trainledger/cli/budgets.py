"""Verbs that hold the cost of targets to a lock file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Unpack

from trainledger.answers.budgets import check as regression
from trainledger.answers.budgets.compare import read_flags
from trainledger.answers.budgets.lockfile import LOCK, is_a_lock
from trainledger.answers.budgets.target import OfStep
from trainledger.answers.pages import budget
from trainledger.answers.question import output, question, text, word
from trainledger.cli.arguments import DONE, FAILED, Outcome
from trainledger.cli.asking import while_waiting
from trainledger.report.document import Document
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem


class OfTarget(OfStep, total=False):
    """The target: fields of a run file, or the step of a module."""

    set: Annotated[
        Sequence[str], text("change one field; may be repeated", several=True, metavar="SECTION.FIELD=VALUE")
    ]
    by: Annotated[str, text("closed form (the default), or trace of the engine's modules", metavar="HOW")]


@question(plots=False)
def lock(
    target: Annotated[Sequence[str], word("what to lock; absent, all", several=True, metavar="TARGET")] = (),
    *,
    lock: Annotated[str, output("the lock's file", ".lock", ours=is_a_lock)] = LOCK,
    **of_target: Unpack[OfTarget],
) -> Document:
    """Write what each target costs into trainledger.lock, which `trainledger check` compares the code with.

    TARGET is one of [tool.trainledger.targets] in pyproject.toml, a run file, package.module:build, or a config.json of
    Hugging Face; without one, all of pyproject.toml and all that the lock has already (or run.toml).
    """
    if of_target and len(target) != 1:
        rule = "says what one target is; name one run file or module with it"
        raise InvalidInput([Problem(f"--{next(iter(of_target)).replace('_', '-')}", None, rule)])
    fields = dict(of_target)
    return budget.written(regression.lock(target, root=Path.cwd(), file=lock, fields=fields, say=while_waiting()))


@question(plots=False)
def check(
    target: Annotated[Sequence[str], word("what to check; absent, all", several=True, metavar="TARGET")] = (),
    *,
    allow: Annotated[
        Sequence[str],
        text(
            "how much more is no failure, such as peak=1% or kept=64MB; overrides pyproject.toml's",
            several=True,
            metavar="QUANTITY=TOLERANCE",
        ),
    ] = (),
    tight: Annotated[bool, text("also fail where something is less than locked")] = False,
    lock: Annotated[str, text("the lock's file")] = LOCK,
    comment: Annotated[str | None, output("also write it as a comment on a pull request (out.md)", ".md")] = None,
) -> Outcome:
    """Fail where a target of trainledger.lock costs more than it did, in parameters, FLOPs, kept or peak bytes, or
    collectives.

    TARGET names some of them; absent, all. Exit code 1 where one is more than its lock by more than its tolerance (or
    is another target now), 2 where the lock does not fit the project.
    """
    targets = regression.check(target, root=Path.cwd(), file=lock, allowed=read_flags(list(allow)), say=while_waiting())
    if comment is not None:
        replace_file(comment, budget.comment(targets, tight=tight).encode())
    code = FAILED if any(compared.fails(tight=tight) for compared in targets) else DONE
    return Outcome(budget.checked(targets, tight=tight), code)
