"""Verbs that hold the cost of targets to a lock file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainledger.answers.budgets import check as regression
from trainledger.answers.budgets.compare import read_flags
from trainledger.answers.budgets.lockfile import LOCK, is_a_lock
from trainledger.answers.pages import budget
from trainledger.cli.arguments import DONE, FAILED, Outcome, count, flag, group, option, takes
from trainledger.cli.asking import while_waiting
from trainledger.cli.outputs import Output
from trainledger.report.document import Document
from trainledger.spec.problem import InvalidInput, Problem

_LOCK = {"default": LOCK, "metavar": "FILE", "help": f"the lock's file ({LOCK})"}
_OF_TARGET = group(
    "the target",
    option("--set SECTION.FIELD=VALUE", "of a run file: change one field; may be repeated", action="append"),
    option("--by HOW", "of a run file: closed form (the default), or trace of the engine's modules"),
    option(
        "--input SHAPE",
        'of a module: an argument of its call, such as "int64[8,2048]"; may be repeated',
        action="append",
    ),
    option("--label SHAPE", "of a module: what its loss compares the output with"),
    option("--step OPTIMIZER", "of a module: forward, backward, or an optimizer (adamw)"),
    option("--loss LOSS", "of a module: cross_entropy, mean, package.module:function ..."),
    option("--dtype DTYPE", "of a module: the format of its parameters"),
    option("--autocast DTYPE", "of a module: the format of autocast, such as bf16"),
    option("--kernels KERNELS", "of a module: cpu (the default), cuda, sm90, sm100"),
    option(
        "--checkpointing MODULES",
        "of a module: modules that backward recomputes; may be repeated",
        action="append",
    ),
    count("--grad-accum N", "of a module: micro-batches in a step (1)"),
    count("--world-size N", "of a module that is a program of many ranks: how many"),
    count("--rank N", "of a module that is a program of many ranks: which one (0)", least=0),
    flag("--first-step", "of a module: the step that makes the optimizer's state"),
)


@takes(
    option("target TARGET", "what to lock; absent, all", nargs="*"),
    _OF_TARGET,
    option("--lock", action=Output, suffix=".lock", ours=is_a_lock, **_LOCK),
)
def lock(args: Namespace) -> Document:
    """Write what each target costs into trainledger.lock, which `trainledger check` compares the code with.

    TARGET is one of [tool.trainledger.targets] in pyproject.toml, a run file, package.module:build, or a config.json of
    Hugging Face; without one, all of pyproject.toml and all that the lock has already (or run.toml).
    """
    given, targets = _OF_TARGET.given(args), vars(args).get("target") or []
    if given and len(targets) != 1:
        rule = "says what one target is; name one run file or module with it"
        raise InvalidInput([Problem(f"--{next(iter(given)).replace('_', '-')}", None, rule)])
    made = regression.lock(targets, root=Path.cwd(), file=args.lock, fields=given, say=while_waiting())
    return budget.written(made)


@takes(
    option("target TARGET", "what to check; absent, all", nargs="*"),
    option(
        "--allow QUANTITY=TOLERANCE",
        "how much more is no failure, such as peak=1%% or kept=64MB; overrides pyproject.toml's",
        action="append",
        default=[],
    ),
    flag("--tight", "also fail where something is less than locked"),
    option("--lock", **_LOCK),
)
def check(args: Namespace) -> Outcome:
    """Fail where a target of trainledger.lock costs more than it did, in parameters, FLOPs, kept or peak bytes, or
    collectives.

    TARGET names some of them; absent, all. Exit code 1 where one is more than its lock by more than its tolerance (or
    is another target now), 2 where the lock does not fit the project.
    """
    targets = vars(args).get("target") or []
    allowed = read_flags(args.allow)
    found = regression.check(targets, root=Path.cwd(), file=args.lock, allowed=allowed, say=while_waiting())
    code = FAILED if any(each.fails(tight=args.tight) for each in found) else DONE
    return Outcome(budget.checked(found, tight=args.tight), code)
