"""Write what each target costs into trainledger.lock, for `trainledger check` to hold the code to.

TARGET is one of [tool.trainledger.targets] in pyproject.toml, a run file, package.module:build, or a config.json of
Hugging Face; without one, all of pyproject.toml and all that the lock has already (or run.toml).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainledger.cli.arguments import add_count, add_json, while_waiting
from trainledger.cli.outputs import Output
from trainledger.regression.check import lock
from trainledger.regression.lockfile import LOCK, is_a_lock
from trainledger.report.budget import written
from trainledger.report.show import show
from trainledger.spec.problem import InvalidInput, Problem

_FIELDS = {
    "set": ("SECTION.FIELD=VALUE", "of a run file: change one field; may be repeated"),
    "by": ("HOW", "of a run file: closed form (the default), or trace of the engine's modules"),
    "input": ("SHAPE", 'of a module: what it is called with, such as "int64[8,2048]"; may be repeated'),
    "label": ("SHAPE", "of a module: what its loss sets the output against"),
    "step": ("OPTIMIZER", "of a module: forward, backward, or an optimizer (adamw)"),
    "loss": ("LOSS", "of a module: cross_entropy, mean, package.module:function ..."),
    "dtype": ("DTYPE", "of a module: the format of its parameters"),
    "autocast": ("DTYPE", "of a module: the format of autocast, such as bf16"),
    "kernels": ("KERNELS", "of a module: cpu (the default), cuda, sm90, sm100"),
    "checkpointing": ("MODULES", "of a module: what is run again in backward; may be repeated"),
}
_NUMBERS = {
    "grad_accum": (1, "of a module: micro-batches in a step (1)"),
    "world_size": (1, "of a module that is a program of many ranks: how many"),
    "rank": (0, "of a module that is a program of many ranks: which one (0)"),
}
_REPEATED = ("set", "input", "checkpointing")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="*", metavar="TARGET", help="what to lock; absent, all")
    for name, (metavar, help) in _FIELDS.items():
        action = "append" if name in _REPEATED else "store"
        parser.add_argument(f"--{name}", action=action, metavar=metavar, help=help)
    for name, (least, help) in _NUMBERS.items():
        add_count(parser, f"--{name.replace('_', '-')}", least=least, metavar="N", help=help)
    parser.add_argument(
        "--first-step", action="store_true", default=None, help="of a module: the step that makes the optimizer's state"
    )

    add_lock(parser, action=Output, suffix=".lock", ours=is_a_lock)
    add_json(parser)


def add_lock(parser: argparse.ArgumentParser, **how: Any) -> None:
    """``--lock``: another file than trainledger.lock of the working directory."""
    parser.add_argument("--lock", default=LOCK, metavar="FILE", help=f"the lock's file ({LOCK})", **how)


def execute(args: argparse.Namespace) -> int:
    asked = {name: getattr(args, name) for name in (*_FIELDS, *_NUMBERS, "first_step")}
    fields: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if fields and len(args.target) != 1:
        rule = "says what one target is; name one run file or module with it"
        raise InvalidInput([Problem(f"--{next(iter(fields)).replace('_', '-')}", None, rule)])
    made = lock(args.target, root=Path.cwd(), file=args.lock, fields=fields, say=while_waiting())
    show(written(made), as_json=args.json)
    return 0
