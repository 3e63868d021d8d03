"""A run from Megatron-LM's arguments: a file that has them, or a launch line itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainledger.answers.source import Overrides, as_texts, by_field, parsed
from trainledger.spec import runfile
from trainledger.spec.convert.megatron import (
    SUFFIXES,
    Arguments,
    MegatronRun,
    from_arguments,
    read_arguments,
    read_file,
)
from trainledger.spec.run import Origin, Run
from trainledger.spec.units import NotAQuantity, parse_count


def has_arguments(named: str) -> bool:
    """Whether a file that may have Megatron-LM's arguments is named, or a text is a launch line.

    >>> has_arguments("pretrain.sh"), has_arguments("gpt2"), has_arguments("torchrun pretrain_gpt.py --num-layers 2")
    (True, False, True)
    """
    return named.endswith(SUFFIXES) or " --num-layers" in f" {named}" or " --hidden-size" in f" {named}"


def arguments_of(named: str) -> Arguments:
    """The arguments in a file or a launch line; raises `InvalidInput`."""
    return read_file(Path(named)) if named.endswith(SUFFIXES) else read_arguments(named)


def read_megatron(
    named: str, devices: int | None = None, vocab_size: str | None = None, arguments: Arguments | None = None
) -> MegatronRun:
    """The sections and remarks of a file or a launch line, on so many devices; raises `InvalidInput`.

    ``vocab_size`` is that of a tokenizer whose file is not opened; ``arguments`` are others in place of the file's.
    """
    of_file = named.endswith(SUFFIXES)
    arguments = arguments or arguments_of(named)
    if vocab_size is not None:
        arguments = replace(arguments, given={**arguments.given, "vocab-size": vocab_size})
    return from_arguments(arguments, devices=devices, where=named if of_file else "")


def run_of_arguments(named: str, overrides: Overrides, arguments: Arguments | None = None) -> Run:
    """The run of a file or a launch line after overrides; its notes say what was assumed and what not understood.

    How many devices there are is ``cluster.count`` of the overrides, else as the text says. Raises `InvalidInput`.
    """
    given = by_field(overrides)
    count, size = given_count(given.get("cluster.count")), given_count(given.get("model.vocab_size"))
    megatron_run = read_megatron(named, count, None if size is None else str(size), arguments)
    run = parsed(megatron_run.table, overrides)
    source = named if named.endswith(SUFFIXES) else "the launch line"
    origin = Origin(
        source=source,
        explicit=runfile.written(megatron_run.table, overrides),
        notes=megatron_run.remarks,
        trainer=(named, as_texts(overrides)),
    )
    return replace(run, origin=origin)


def given_count(given: Any) -> int | None:
    """The devices that an override says, at least one; None where it says none, or nothing that can be read."""
    try:
        return None if given is None else max(1, parse_count(str(given)))
    except NotAQuantity:
        return None  # which reading the run refuses
