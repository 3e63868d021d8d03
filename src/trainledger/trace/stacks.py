"""Stacks of identical blocks in a model, how blocks are compared, and the model with fewer of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.trace.extrapolate import Counts
from trainledger.trace.fakes.tensors import restored
from trainledger.trace.patches import names

_PARTS = ("_parameters", "_buffers", "_modules")
_BY_HANDLE = names("""
    _backward_pre_hooks _backward_hooks _forward_hooks _forward_pre_hooks _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks_with_kwargs
""")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PLAIN = (bool, float, complex, bytes, type(None), torch.dtype, torch.device, type, range)
_DIGITS = re.compile(r"(\d+)")

Setting = tuple[type, str]  # a class of modules and the name of an attribute


class Equivalence:
    """Compares blocks of one model; ``settings_of`` is how optimizers treat each parameter.

    ``by_place`` collects which attributes of which classes differ by the place in the list and nothing else, and
    ``hidden`` says that one does so where reading it cannot be seen.
    """

    def __init__(self, model: nn.Module, settings_of: Mapping[int, Any]) -> None:
        self.by_place: set[Setting] = set()
        self.hidden = False
        self._settings = settings_of
        self._uses = Counter(id(tensor) for module in model.modules() for tensor in _tensors_of(module))
        self._own_uses: dict[int, Counter[int]] = {}

    def blocks(self, one: nn.Module, other: nn.Module, apart: int) -> bool:
        """Whether two blocks, which are so many places apart, differ by their place at most."""
        before, hidden, self.hidden = set(self.by_place), self.hidden, False
        pair = _Pair(self, one, other, apart)
        alike = pair.modules(one, other)
        if alike:
            self.hidden = self.hidden or hidden
        else:
            self.by_place, self.hidden = before, hidden
        return alike

    def tensors(self, one: Tensor, other: Tensor, blocks: _Pair) -> bool:
        """Whether two parameters or buffers are alike, and each its block's own or the same for both."""
        if _facts(one) != _facts(other) or self._settings.get(id(one)) != self._settings.get(id(other)):
            return False
        if not self._is_own(one, blocks.one) or not self._is_own(other, blocks.other):
            return one is other
        return all(blocks.each(_hooks(one, name), _hooks(other, name)) for name in _HOOKS_OF_TENSORS)

    def _is_own(self, tensor: Tensor, block: nn.Module) -> bool:
        uses = self._own_uses.get(id(block))
        if uses is None:
            uses = Counter(id(each) for module in block.modules() for each in _tensors_of(module))
            self._own_uses[id(block)] = uses
        return uses[id(tensor)] == self._uses[id(tensor)]


class _Pair:
    """Two blocks while they are compared."""

    def __init__(self, alike: Equivalence, one: nn.Module, other: nn.Module, apart: int) -> None:
        self.one, self.other = one, other
        self._alike = alike
        self._apart = apart
        self._names = {id(module): name for name, module in one.named_modules()}
        self._other_names = {id(module): name for name, module in other.named_modules()}
        self._seen: set[tuple[int, int]] = set()
        self._within: Setting | None = None

    def modules(self, one: nn.Module, other: nn.Module) -> bool:
        if type(one) is not type(other):
            return False
        if (id(one), id(other)) in self._seen:
            return True
        self._seen.add((id(one), id(other)))
        mine, theirs = one.__dict__, other.__dict__
        if mine.keys() != theirs.keys():
            return False
        for name, value in mine.items():
            its = theirs[name]
            if name in _PARTS:
                if not self._registered(name, value, its):
                    return False
            elif name in _BY_HANDLE:
                if (value or its) and not self.each(value.values(), its.values()):
                    return False
            else:
                self._within = (type(one), name)
                if value is not its and not self.same(value, its):
                    return False
        return True

    def _registered(self, name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
        def alike(value: Any, its: Any) -> bool:
            if value is None or its is None:
                return value is its
            return self.modules(value, its) if name == "_modules" else self._alike.tensors(value, its, self)

        return list(mine) == list(theirs) and all(map(alike, mine.values(), theirs.values()))

    def each(self, mine: Iterable[Any], theirs: Iterable[Any]) -> bool:
        one, other = list(mine), list(theirs)
        return len(one) == len(other) and all(map(self._nested, one, other))

    def _nested(self, one: Any, other: Any) -> bool:
        """As `same`, inside of a value that is no plain attribute of a module."""
        within, self._within = self._within, None
        try:
            return self.same(one, other)
        finally:
            self._within = within

    def same(self, one: Any, other: Any) -> bool:
        """Whether two values are equal, numbers and names in text but for the places of their blocks."""
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, _PLAIN):
            return bool(one == other)
        if type(one) is int:
            return one == other or self._by_place(other - one == self._apart)
        if isinstance(one, str):
            return one == other or self._by_place(self._same_text(one, other))
        if isinstance(one, nn.Module):
            name = self._names.get(id(one))
            return name is not None and name == self._other_names.get(id(other)) and self.modules(one, other)
        if isinstance(one, Tensor):
            return self._alike.tensors(one, other, self)
        if (id(one), id(other)) in self._seen:
            return True
        self._seen.add((id(one), id(other)))
        return self._objects(one, other)

    def _objects(self, one: Any, other: Any) -> bool:
        if isinstance(one, Mapping):
            return list(one) == list(other) and self.each(one.values(), other.values())
        if isinstance(one, (list, tuple)):
            return self.each(one, other)
        if isinstance(one, FunctionType):
            if one.__code__ is not other.__code__:
                return False
            mine, theirs = ([each.cell_contents for each in f.__closure__ or ()] for f in (one, other))
            return self.each(mine, theirs) and self._nested(one.__defaults__, other.__defaults__)
        if isinstance(one, MethodType):
            return self._nested(one.__func__, other.__func__) and self._nested(one.__self__, other.__self__)
        if isinstance(one, partial):
            return self.each((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
        try:
            if bool(one == other):
                return True
        except Exception:
            return False
        attributes = getattr(one, "__dict__", None)
        return bool(attributes) and self._nested(attributes, other.__dict__)

    def _by_place(self, so: bool) -> bool:
        if so:
            if self._within is None:
                self._alike.hidden = True
            else:
                self._alike.by_place.add(self._within)
        return so

    def _same_text(self, one: str, other: str) -> bool:
        mine, theirs = _DIGITS.split(one), _DIGITS.split(other)
        if len(mine) != len(theirs) or mine[::2] != theirs[::2]:
            return False
        steps = {int(its) - int(my) for my, its in zip(mine[1::2], theirs[1::2], strict=True)}
        return steps <= {0, self._apart}


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [
        parameter for parameter in (*module._parameters.values(), *module._buffers.values()) if parameter is not None
    ]


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if tensor.layout == torch.strided else ()
    return type(tensor), tensor.requires_grad, tensor.shape, tensor.dtype, tensor.device, tensor.layout, stride


def _hooks(tensor: Tensor, name: str) -> Iterable[Any]:
    return (getattr(tensor, name, None) or {}).values()


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, Any]:
    """How optimizers treat each parameter (by id): by which, and with which options; of numbers whether they are 0."""
    found: dict[int, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            options = {
                name: bool(value) if isinstance(value, (int, float)) else repr(value)
                for name, value in group.items()
                if name not in ("params", "param_names")
            }
            settings = (number, tuple(sorted(options.items())))
            for each in group["params"]:
                states = tuple(sorted(map(str, optimizer.state.get(each, {}))))
                found[id(each)] = (*found.get(id(each), ()), settings, states)
    return found


def classes_of(blocks: Sequence[nn.Module], alike: Callable[[nn.Module, nn.Module, int], bool]) -> list[int]:
    """For each block the number of its kind: that of the first block that it is alike."""
    firsts: list[int] = []
    kinds: list[int] = []
    for place, block in enumerate(blocks):
        known = (kind for kind, first in enumerate(firsts) if alike(blocks[first], block, place - first))
        kinds.append(next(known, len(firsts)))
        if kinds[-1] == len(firsts):
            firsts.append(place)
    return kinds


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
            # A round that is not whole ends the run; the one before may as well
            after += 1
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
        before = {id(parameter) for parameter in model.parameters()}
        removed: set[int] = set()
        for stack, count in zip(stacks, rounds, strict=True):
            items = list(stack.container._modules.items())
            kept = stack.kept(count)
            numbered = [name for name, _ in items] == [str(item) for item in range(len(items))]
            stack.container.__dict__["_modules"] = {
                str(new) if numbered else items[old][0]: items[old][1] for new, old in enumerate(kept)
            }
            removed |= {id(block) for place, (_, block) in enumerate(items) if place not in set(kept)}
            removed -= {id(block) for block in stack.container._modules.values()}
        gone = before - {id(parameter) for parameter in model.parameters()}
        for optimizer in optimizers:
            optimizer.param_groups = [each for each in (_left(group, gone) for group in optimizer.param_groups) if each]
            left = {tensor: dict(values) for tensor, values in optimizer.state.items() if id(tensor) not in gone}
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
