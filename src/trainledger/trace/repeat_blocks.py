"""A step whose identical blocks are traced once and multiplied, or the sentence why that cannot be.

A model with fewer blocks is traced, so that a probe of its whole length must show what the code around them does with
the others (`block_probe`).
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trainledger.ledger.ledger import Ledger
from trainledger.trace.block_probe import NotAlikeError, Probe
from trainledger.trace.extrapolate import MICRO_BATCHES, Counts, counted, proved, with_rounds
from trainledger.trace.fakes.tensors import restored
from trainledger.trace.stacks import Found, Stack, shortened, stacks_of

BLOCKS = ("auto", "once", "all")
LEAST = 8  # identical rounds from which on tracing a few and multiplying is quicker
LEAST_ASKED = 4  # where it was asked for


def traced_once(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    run: Callable[[int], Ledger],
    probed: Callable[[], Any],
    *,
    rounds: int = 1,
    least: int = LEAST,
) -> Ledger | str:
    """The ledger of a step of ``rounds`` micro-batches from steps of the same model with fewer blocks.

    ``run`` traces a step of so many micro-batches of the model as it is, and ``probed`` runs
    one forward of it, and its backward.
    Stacks with at least so many identical rounds are shortened. The model and the optimizers are as before afterwards.
    Gives the sentence why all must be traced where the ledger does not follow, "" where there is nothing to multiply.
    """
    found = stacks_of(model, optimizers, least)
    several = rounds >= LEAST
    if not found.stacks and not several:
        return ""
    traced = MICRO_BATCHES if several else rounds
    name = " and ".join(stack.path or "the blocks" for stack in found.stacks) or "micro-batches"
    try:
        with warnings.catch_warnings(), _without_random_numbers():
            warnings.simplefilter("ignore")
            if found.stacks:
                ledger = _Shortened(model, optimizers, found, lambda: run(traced), probed).ledger()
            else:
                with restored(model, ()):
                    ledger = run(traced)
            notes = [_note(stack) for stack in found.stacks]
            if several:
                multiplied = None if ledger.partial or ledger.notes else with_rounds(ledger, rounds)
                if multiplied is None:
                    raise NotAlikeError(f"the {rounds} micro-batches are not alike")
                ledger = replace(multiplied, micro_batches=rounds)
                notes.append(
                    f"{rounds} micro-batches are alike: {MICRO_BATCHES} were traced and one of them multiplied"
                )
    except NotAlikeError as error:
        return f"{name} traced one by one: {error}"
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{name} traced one by one: with fewer, {type(error).__name__}: {first[:200]}"
    return replace(counted(ledger), notes=(*ledger.notes, *notes))


class _Shortened:
    """The ledger of a model's step from steps with fewer blocks."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        found: Found,
        run: Callable[[], Ledger],
        probed: Callable[[], Any],
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._stacks = found.stacks
        self._run, self._probed = run, probed
        self._whole = tuple(stack.count for stack in found.stacks)
        self._probe = Probe(model, found)
        self._known: dict[tuple[str, Counts], Ledger] = {}

    def ledger(self) -> Ledger:
        """The ledger of the whole model's step. Raises NotAlikeError where it does not follow from shorter ones."""
        probed = proved(partial(self._at, "probe"), self._whole, self._stars)
        if probed is None or not probed.proves(self._at("probe", self._whole), self._whole):
            raise NotAlikeError("the code around them does not treat them alike")
        extrapolated = proved(partial(self._at, "run"), self._whole, self._stars)
        if extrapolated is None:
            raise NotAlikeError("one more of them does not add the same each time")
        return extrapolated.at(self._whole, placed=partial(self._placed, extrapolated.counts))

    def _at(self, what: str, rounds: Counts) -> Ledger:
        known = self._known.get((what, rounds))
        if known is not None:
            return known
        with shortened(self._model, self._optimizers, self._stacks, rounds) as removed:
            ledger = self._run() if what == "run" else self._probe.run(self._probed, removed)
        if ledger.partial:
            raise NotAlikeError(ledger.partial)
        self._known[what, rounds] = ledger
        return ledger

    def _stars(self, path: str) -> str:
        """A path with a star for the number of a block of a stack."""
        for stack in self._stacks:
            parts = _below(stack, path)
            if parts is not None:
                return _joined(stack, "*", parts)
        return path

    def _placed(self, counts: Counts, path: str) -> str:
        """A path of the model with so many rounds as it is in the whole one."""
        for stack, count in zip(self._stacks, counts, strict=True):
            parts = _below(stack, path)
            if parts is not None and parts[0].isdigit():
                return _joined(stack, str(stack.place(int(parts[0]), count, stack.count)), parts)
        return path


def _below(stack: Stack, path: str) -> list[str] | None:
    """The parts of a path below a stack: the name of a block first; None where it is not below."""
    if stack.path:
        if not path.startswith(f"{stack.path}."):
            return None
        path = path[len(stack.path) + 1 :]
    return path.split(".") if path else None


def _joined(stack: Stack, number: str, parts: Sequence[str]) -> str:
    return ".".join((*((stack.path,) if stack.path else ()), number, *parts[1:]))


def _note(stack: Stack) -> str:
    """What was multiplied, for the ledger's notes."""
    prefix = f"{stack.path}." if stack.path else ""
    last = stack.first + stack.size * stack.count - 1
    rounds = f" in rounds of {stack.size}" if stack.size > 1 else ""
    return f"{prefix}{stack.first} to {prefix}{last} are alike{rounds}: traced once and multiplied by {stack.count}"


@contextmanager
def _without_random_numbers() -> Iterator[None]:
    # Python's and numpy's random numbers may decide what runs, as for stochastic depth; torch's are fake here.
    before = _random_states()
    yield
    if _random_states() != before:
        raise NotAlikeError("the code draws random numbers, which may decide what runs")


def _random_states() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate()
    name, keys, at, *rest = numpy.get_state()
    return random.getstate(), name, keys.tobytes(), at, rest
