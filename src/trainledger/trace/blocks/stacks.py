"""Stacks of identical blocks in a model, and the model with fewer of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainledger.trace.blocks.equivalence import Equivalence, Setting, classes_of, settings_of
from trainledger.trace.blocks.extrapolate import Counts
from trainledger.trace.fakes.tensors import restored

LONGEST_PATTERN = 16  # blocks after which a pattern of different ones begins again


@dataclass(frozen=True)
class Stack:
    """A run of rounds in a container: from the block ``first`` on, ``size`` blocks that come ``count`` times.

    ``kinds`` are numbers of all the container's ``blocks``, equal where they are alike.
    """

    path: str
    container: nn.Module
    first: int
    size: int
    count: int
    kinds: tuple[int, ...]
    blocks: tuple[nn.Module, ...]

    def kept(self, rounds: int) -> list[int]:
        """The places of the blocks that a stack of so many rounds keeps: the last ones of the run are left out."""
        after = self.first + self.count * self.size
        pattern = self.kinds[self.first : self.first + self.size]
        while after < len(self.kinds) and self.kinds[after] == pattern[(after - self.first) % self.size]:
            after += 1  # a round that is not whole ends the run; the one before may as well
        removed = (self.count - rounds) * self.size
        return [*range(after - removed), *range(after, len(self.kinds))]

    def place(self, number: int, rounds: int, count: int) -> int:
        """The place of a block of a stack of ``rounds`` in one of ``count``: its first half is at the start."""
        at = number - self.first
        return number if at < (rounds + 1) // 2 * self.size else number + (count - rounds) * self.size


@dataclass(frozen=True)
class Found:
    """The stacks of a model. ``by_place`` are the attributes whose values differ by a block's place alone."""

    stacks: tuple[Stack, ...]
    by_place: frozenset[Setting]
    hidden: bool


def stacks_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], least: int) -> Found:
    """The stacks with at least so many identical rounds; of stacks inside of others, the outer ones."""
    alike: Equivalence | None = None
    stacks: list[Stack] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) or id(module) in inside:
            continue
        blocks = tuple(each for each in module._modules.values() if each is not None)
        if len(blocks) < max(least, len(module._modules)):
            continue
        alike = alike or Equivalence(model, settings_of(optimizers))
        kinds = tuple(classes_of(blocks, alike.blocks))
        run = _longest_run(kinds, least)
        if run is None:
            continue
        stacks.append(Stack(path, module, *run, kinds, blocks))
        inside |= {id(each) for block in blocks for each in block.modules()}
    if alike is None or not stacks:
        return Found((), frozenset(), False)
    return Found(tuple(stacks), frozenset(alike.by_place), alike.hidden)


def _longest_run(kinds: Sequence[int], least: int) -> tuple[int, int, int] | None:
    """The first block, the size and the number of the rounds that take in the most blocks."""
    best: tuple[int, int, int] | None = None
    for size in range(1, min(LONGEST_PATTERN, len(kinds) // least) + 1):
        first = 0
        for at in range(size, len(kinds) + 1):
            if at < len(kinds) and kinds[at] == kinds[at - size]:
                continue
            count = (at - first) // size
            if count >= least and (best is None or count * size > best[1] * best[2]):
                best = first, size, count
            first = at - size + 1
    return best


@contextmanager
def shortened(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], stacks: Sequence[Stack], rounds: Counts
) -> Iterator[frozenset[int]]:
    """Let each stack have so many rounds, and let optimizers know only what is left; gives ids of the removed blocks.

    Afterwards model and optimizers are as before (`restored`), whatever a step has changed.
    """
    with restored(model, optimizers):
        before = {id(each) for each in model.parameters()}
        removed: set[int] = set()
        for stack, count in zip(stacks, rounds, strict=True):
            items = list(stack.container._modules.items())
            kept = stack.kept(count)
            numbered = [name for name, _ in items] == [str(each) for each in range(len(items))]
            stack.container.__dict__["_modules"] = {
                str(new) if numbered else items[old][0]: items[old][1] for new, old in enumerate(kept)
            }
            removed |= {id(block) for place, (_, block) in enumerate(items) if place not in set(kept)}
            removed -= {id(block) for block in stack.container._modules.values()}
        gone = before - {id(each) for each in model.parameters()}
        for optimizer in optimizers:
            optimizer.param_groups = [each for each in (_left(group, gone) for group in optimizer.param_groups) if each]
            left = {each: dict(values) for each, values in optimizer.state.items() if id(each) not in gone}
            optimizer.state = defaultdict(dict, left)
        yield frozenset(removed)


def _left(group: dict[str, Any], gone: set[int]) -> dict[str, Any] | None:
    """A group of parameters without those that were removed; None where none is left."""
    kept = [place for place, each in enumerate(group["params"]) if id(each) not in gone]
    if len(kept) == len(group["params"]):
        return dict(group)
    lists: dict[str, Any] = {
        name: [group[name][each] for each in kept] for name in ("params", "param_names") if name in group
    }
    return {**group, **lists} if kept else None
