"""A step whose identical blocks are traced once and multiplied, or the sentence why that cannot be.

A model with fewer blocks is traced, so that a probe must show what the code around them does with the others. It runs
the forward of any length of the model; the first block of each kind that is called in some way runs, others that are
called in the same way get results like its own. Its entries are the operations between the blocks and how each block is
called. Attributes that differ from block to block are watched: where the code of a block reads one, every block runs,
and all must run the same operations.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.trace.extrapolate import MICRO_BATCHES, Counts, counted, proved, with_rounds
from trainledger.trace.fakes.tensors import restored
from trainledger.trace.patches import Args, Kwargs, replaced
from trainledger.trace.recorder.attribution import Attribution
from trainledger.trace.recorder.storages import tensors_in
from trainledger.trace.stacks import Found, Stack, shortened, stacks_of

_Answer = Callable[[Mapping[str, Tensor]], Any]  # a block's result, made of the tensors it was given
_DEVICE = torch.ops.prim.device.default


class NotAlikeError(Exception):
    """Blocks that look alike are not, or the code around them does not treat them so; the sentence says what."""


class Probe:
    """Probes one model at several lengths: what a kind of blocks answers is learned once."""

    def __init__(self, model: nn.Module, found: Found) -> None:
        self._model = model
        self._found = found
        self.answers: dict[Any, _Answer] = {}
        self._ran: dict[Any, tuple[Any, ...]] = {}
        self._calls: dict[Any, int] = {}
        self.reads_place = found.hidden

    def run(self, forward: Callable[[], Any], removed: frozenset[int]) -> Ledger:
        """The operations between the blocks, and the calls of blocks, in order.

        Raises NotAlikeError where a block that is not in the model any more is called, or blocks run differently.
        """
        around = _Around(self._model)
        with ExitStack() as stack:
            for each in self._found.stacks:
                for block, kind in zip(each.blocks, each.kinds, strict=True):
                    call = _Call(self, around, each, kind, gone=id(block) in removed)
                    stack.enter_context(replaced(block, "forward", call.instead_of))
            for owner, name in self._found.by_place:
                if hasattr(owner, name):
                    # The class has something of that name: reads of it cannot be watched
                    self.reads_place = True
                else:
                    setattr(owner, name, _watched(name, partial(setattr, self, "reads_place", True)))
                    stack.callback(delattr, owner, name)
            around.attribution.follow()
            stack.callback(around.attribution.leave)
            stack.enter_context(around)
            forward()
        return Ledger(tuple(around.entries))

    def number(self, call: Any) -> int:
        """A number for a way of calling a block."""
        return self._calls.setdefault(call, len(self._calls))

    def learn(self, call: Any, answer: _Answer | None, ran: tuple[Any, ...]) -> None:
        """What a block of a kind did when called in some way, which is what all of them do."""
        if self._ran.setdefault(call, ran) != ran:
            raise NotAlikeError("one of them runs other operations than those before it")
        if answer is not None:
            self.answers[call] = answer


class _Around(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run; ``inside`` are those of the block that runs, if one does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.inside: list[Any] | None = None
        self.last: dict[int, str] = {}  # by their ids, the tensors that the call before took and gave
        self.known: dict[int, str] = {}  # other objects that it took
        self.objects: list[Any] = []
        self.alive: list[Any] = []
        self.attribution = Attribution(model, None, lambda *_: None)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        made = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(out))
        if self.inside is not None:
            self.inside.append((func, made))
        else:
            path = self.attribution.path("forward")
            sizes = tuple(size for shape, _ in made for size in shape)
            formats = str([(len(shape), dtype) for shape, dtype in made])
            self.entries.append(Entry(str(func), path, "forward", "", shape=sizes, source=formats))
        return out


class _Call:
    """Replaces the forward of one block."""

    def __init__(self, probe: Probe, around: _Around, stack: Stack, kind: int, gone: bool) -> None:
        self._probe, self._around = probe, around
        self._stack, self._kind, self._gone = stack, kind, gone
        self._path = f"{stack.path}.0" if stack.path else "0"

    def instead_of(self, forward: Callable[..., Any]) -> _Call:
        """Replace a block's forward, with its signature."""
        self._forward = self.__wrapped__ = forward
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around, probe = self._around, self._probe
        if around.inside is not None:
            return self._forward(*args, **kwargs)
        if self._gone:
            raise NotAlikeError(f"code outside of {self._stack.path} refers to them and calls them")
        given: list[tuple[str, Tensor]] = []
        around.objects = []
        call = (self._stack.path, self._kind, torch.is_grad_enabled(), _call_of((args, kwargs), "", around, given))
        around.entries.append(Entry("call", self._path, "forward", "", source=str(probe.number(call))))
        answer = None if probe.reads_place else probe.answers.get(call)
        if answer is not None:
            around.inside = []
            out = answer(dict(given))
        else:
            ran: list[Any] = []
            around.inside = ran
            out = self._forward(*args, **kwargs)
            probe.learn(call, _answer_of(out, given), tuple(ran))
        around.inside = None
        around.last = {id(each): f"took {name}" for name, each in given}
        around.last |= {id(each): f"gave {name}" for name, each in _named(out, "")}
        around.known = {id(each): f"took {at}" for at, each in enumerate(around.objects)}
        around.alive = [args, kwargs, out]
        return out


def _watched(name: str, read: Callable[[], None]) -> property:
    """An attribute of modules of which ``read`` is called when code reads it."""

    def get(module: Any) -> Any:
        read()
        if name not in module.__dict__:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        return module.__dict__[name]

    def put(module: Any, value: Any) -> None:
        module.__dict__[name] = value

    return property(get, put)


# How a block is called, and what it answers


def _call_of(value: Any, name: str, around: _Around, given: list[tuple[str, Tensor]]) -> Any:
    """An argument as it is compared: shapes for tensors, and whether the call before had the same one."""
    if isinstance(value, Tensor):
        given.append((name, value))
        known = around.last.get(id(value), "new")
        return (known, tuple(value.shape), value.stride(), value.dtype, value.requires_grad, value.is_leaf)
    if isinstance(value, Mapping):
        items = ((key, _call_of(each, f"{name}.{key}", around, given)) for key, each in value.items())
        return (type(value), *items)
    if isinstance(value, (list, tuple)):
        return (type(value), *(_call_of(each, f"{name}.{at}", around, given) for at, each in enumerate(value)))
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return (type(value), value)
    around.objects.append(value)
    return (type(value), around.known.get(id(value), "new"))


def _answer_of(out: Any, given: Sequence[tuple[str, Tensor]]) -> _Answer | None:
    """What makes a result like this one of a call's tensors; None where a part of it cannot be made again."""
    names = {id(each): name for name, each in given}

    def form(value: Any) -> _Answer:
        kind = type(value)  # what an answer refers to must not keep the result itself
        if isinstance(value, Tensor):
            if kind is not FakeTensor or isinstance(value, nn.Parameter):
                raise TypeError
            name = names.get(id(value))
            return _like(value) if name is None else lambda tensors: tensors[name]
        if kind in (tuple, list):
            parts = [form(each) for each in value]
            return lambda tensors: kind(part(tensors) for part in parts)
        if kind is dict:
            items = {key: form(each) for key, each in value.items()}
            return lambda tensors: {key: part(tensors) for key, part in items.items()}
        if is_dataclass(value) and isinstance(value, Mapping) and not isinstance(value, type):
            made = {each.name: form(getattr(value, each.name)) for each in fields(value)}
            return lambda tensors: kind(**{name: part(tensors) for name, part in made.items()})
        if value is None or isinstance(value, (bool, int, float, str)):
            return lambda tensors: value
        raise TypeError

    try:
        return form(out)
    except TypeError:
        return None


def _like(tensor: Tensor) -> _Answer:
    # A result that a block made is not kept: what refers to it would keep its graph and the block's activations alive.
    shape, stride, dtype, device = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    learns = tensor.requires_grad

    def made(tensors: Mapping[str, Tensor]) -> Tensor:
        new = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        # As a leaf it could not be changed in place
        return new.requires_grad_() * 1 if learns else new

    return made


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named(each, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from _named(each, f"{name}.{at}")


BLOCKS = ("auto", "once", "all")
LEAST = 8  # identical rounds from which on tracing a few and multiplying is quicker
LEAST_ASKED = 4  # where it was asked for


def traced_once(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    run: Callable[[int], Ledger],
    forward: Callable[[], Any],
    *,
    rounds: int = 1,
    least: int = LEAST,
) -> Ledger | str:
    """The ledger of a step of ``rounds`` micro-batches from steps of the same model with fewer blocks.

    ``run`` traces a step of so many micro-batches of the model as it is, and ``forward`` runs one forward of it.
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
                ledger = _Shortened(model, optimizers, found, lambda: run(traced), forward).ledger()
            else:
                with restored(model, ()):
                    ledger = run(traced)
            notes = [_note(each) for each in found.stacks]
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
        forward: Callable[[], Any],
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._stacks = found.stacks
        self._run, self._forward = run, forward
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
            ledger = self._run() if what == "run" else self._probe.run(self._forward, removed)
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
        for each, count in zip(self._stacks, counts, strict=True):
            parts = _below(each, path)
            if parts is not None and parts[0].isdigit():
                return _joined(each, str(each.place(int(parts[0]), count, each.count)), parts)
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
