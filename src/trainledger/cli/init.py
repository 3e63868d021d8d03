"""Write a commented run file: what differs from the defaults, or with --all every field and its default."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from trainledger import catalog
from trainledger.cli.arguments import add_json, add_output, print_json
from trainledger.spec.plain import check_target, not_written
from trainledger.spec.problem import InvalidInput, Problem, printable
from trainledger.spec.template import commented

if TYPE_CHECKING:
    from pathlib import Path

LONGEST_SEQUENCE = 1024


def configure(parser: argparse.ArgumentParser) -> None:
    add_output(
        parser, "path", suffix=".toml", ours=_is_run_file, nargs="?", default="run.toml",
        help="where to write it (run.toml)",
    )  # fmt: skip
    parser.add_argument("--preset", default="teach-10m", help="a model of the catalog (teach-10m)")
    parser.add_argument("--all", action="store_true", help="every field, its default as a comment")
    parser.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    add_json(parser)


def _is_run_file(path: Path) -> bool:
    return path.suffix == ".toml" and path.name != "pyproject.toml"


def execute(args: argparse.Namespace) -> int:
    base = catalog.model(args.preset, "--preset")
    text = commented(starting_point(args.preset, base["max_seq_len"]), base, every=args.all)
    write(args.path, text, force=args.force)
    if args.json:
        print_json({"path": args.path, "preset": args.preset})
    else:
        print(printable(f"wrote {args.path}; next: trainledger plan {args.path}"))
    return 0


def starting_point(preset: str, max_seq_len: int) -> dict[str, dict[str, object]]:
    """The fields that a new run file sets; all others keep their defaults."""
    return {
        "model": {"preset": preset},
        "recipe": {
            "seq_len": min(max_seq_len, LONGEST_SEQUENCE),
            "global_batch": 16,
            "steps": 400,
            "learning_rate": 1e-3,
            "warmup_steps": 40,
            "eval_every": 100,
            "checkpoint_every": 100,
        },
        "data": {"tokenizer": "bpe"},
    }


def write(path: str, text: str, *, force: bool) -> None:
    """Write a new file whole or not at all; an existing one only by force. Raises InvalidInput."""
    if os.path.isdir(path):
        raise InvalidInput([Problem("path", path, "is a directory", os.path.join(path, "run.toml"))])
    check_target(path, "path")
    if os.path.lexists(path) and not force:
        raise InvalidInput([Problem("path", path, "exists already; --force overwrites it")])
    draft = f"{path}.{os.getpid()}.new"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
        if force:
            os.replace(draft, path)
        else:
            os.link(draft, path)  # unlike a rename, fails where the path came to exist meanwhile
    except OSError as error:
        raise not_written(error, path, "path") from None
    finally:
        if os.path.exists(draft):
            os.remove(draft)
