"""Runs of Megatron-LM read from its arguments: a launch line, a script, a YAML map, or the log of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainledger.spec.convert.megatron.arguments import (
    LARGEST,
    SUFFIXES,
    Arguments,
    Reading,
    from_values,
    read_arguments,
)
from trainledger.spec.convert.megatron.flags import PROGRAMS, REFUSED
from trainledger.spec.convert.megatron.layout import layout_of, ranks_of
from trainledger.spec.convert.megatron.model import model_of
from trainledger.spec.convert.megatron.recipe import recipe_of
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.spec.units import ceil_div

__all__ = ["SUFFIXES", "Arguments", "MegatronRun", "from_arguments", "from_values", "read_arguments", "read_file"]

_NAMED = 12  # arguments that a sentence names


@frozen
class MegatronRun:
    """What arguments become: the sections of a run file, what Megatron-LM's defaults supplied, and sentences.

    ``not_understood`` are arguments that have no place in a run file and may change it; ``notes`` say what was assumed.
    """

    table: dict[str, dict[str, Any]]
    supplied: dict[str, Any]
    not_understood: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """All of it in sentences."""
        said = list(self.notes)
        if self.not_understood:
            said.append(f"not understood: {_listed([f'--{name}' for name in self.not_understood])}")
        if self.supplied:
            given = [f"--{name} {value}" for name, value in self.supplied.items()]
            said.append(f"defaults of Megatron-LM: {_listed(given)}")
        return tuple(said)


def _listed(words: list[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def read_file(path: Path) -> Arguments:
    """The arguments in a file; nothing in it is run. Raises `InvalidInput` for one that cannot be read or has none."""
    where = str(path)
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise InvalidInput([Problem("", None, f"cannot be read: {error.strerror}")], where) from None
    if len(content) > LARGEST and b"arguments ----" not in content:
        raise InvalidInput([Problem("", None, f"is larger than {LARGEST:,} bytes, and no log of Megatron-LM")], where)
    return read_arguments(content.decode("utf-8", errors="replace"), where)


def from_arguments(arguments: Arguments, *, devices: int | None = None, where: str = "") -> MegatronRun:
    """A run on so many devices, where None on as many as the text says; raises `InvalidInput` with every problem.

    Arguments that are not given have Megatron-LM's defaults of 2026 (commit d98e8a64).

    >>> text = ("--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 4 "
    ...         "--max-position-embeddings 1024 --bf16 --tensor-model-parallel-size 2")
    >>> run = from_arguments(read_arguments(text), devices=8)
    >>> run.table["layout"]["replicate"], run.table["recipe"]["global_batch"], run.supplied["hidden-dropout"]
    (4, 16, 0.1)
    """
    read = Reading(arguments)
    program = arguments.program.lower()
    for word, kind in PROGRAMS.items():
        if word in program:
            read.problems.append(Problem("", None, f"{arguments.program} trains {kind}, which is not accounted for"))
            break
    for name, rule in REFUSED.items():
        if name in arguments.given:
            read.problems.append(Problem(f"--{name}", _text(arguments.given[name]), rule))
    tensor, pipeline, context = ranks_of(read)
    replica = tensor * pipeline * context
    count = devices or arguments.devices
    if count is None:
        rule = "is not said by the arguments: how many devices the run has"
        read.problems.append(Problem("cluster.count", None, rule, f"--count {8 * ceil_div(replica, 8)}"))
    elif count % replica:
        sizes = f"tensor {tensor} x pipeline {pipeline} x context {context}"
        rule = f"must be a multiple of the {replica} devices of a replica ({sizes})"
        read.problems.append(Problem("cluster.count", count, rule, max(1, round(count / replica)) * replica))
    ranks = max(1, (count or replica) // replica)
    model = model_of(read, tensor)
    table = {
        "model": model,
        "recipe": recipe_of(read, ranks),
        "layout": layout_of(read, ranks, model["n_layers"]),
        "cluster": {"count": count or replica},
    }
    if read.problems:
        raise InvalidInput(read.problems, where)
    return MegatronRun(table, read.supplied, read.strangers(), tuple(read.notes))


def _text(value: object) -> str:
    return shown(" ".join(value) if isinstance(value, tuple) else value)
