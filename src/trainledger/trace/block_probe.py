"""A forward and backward of a model of any length whose blocks hardly run: what the code around them does with each.

The first block of each kind that is called in some way runs, and the last of its stack; results like its own take the
place of its results and of those of other blocks that are called in the same way. Entries are the operations between
the blocks, how and under which settings each block is called, when its backward runs, and when memory is freed. So a
loop that depends on how many blocks there are (segments that are checkpointed together, hooks of tensors from some
block on, what is held of the last few) shows at the length at which it does. Attributes that differ from block to block
are watched: where the code of a block reads one, every block runs, and all must run the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.trace.patches import Args, Kwargs, replaced
from trainledger.trace.recorder.attribution import Attribution
from trainledger.trace.recorder.storages import tensors_in
from trainledger.trace.stacks import Found, Stack

_Answer = Callable[["_Call", Mapping[str, Tensor]], Any]  # a block's result, made of the tensors it was given
_DEVICE = torch.ops.prim.device.default
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class NotAlikeError(Exception):
    """Blocks that look alike are not, or the code around them does not treat them so; the sentence says what."""


class Probe:
    """Probes one model at several lengths: blocks that are called in the same way must run the same operations."""

    def __init__(self, model: nn.Module, found: Found) -> None:
        self._model = model
        self._found = found
        self.answers: dict[Any, _Answer] = {}
        self._ran: dict[Any, tuple[Any, ...]] = {}
        self._calls: dict[Any, int] = {}
        self.reads_place = found.hidden

    def run(self, step: Callable[[], Any], removed: frozenset[int]) -> Ledger:
        """The operations between the blocks, the calls of blocks and what is freed, in order.

        Raises NotAlikeError where a block that is not in the model any more is called, or blocks run differently.
        """
        around = _Around(self._model)
        # The code of a block may depend on how many there are, too
        self.answers.clear()
        with ExitStack() as stack:
            for each in self._found.stacks:
                for block, kind in zip(each.blocks, each.kinds, strict=True):
                    call = _Call(self, around, each, kind, block, gone=id(block) in removed)
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
            step()
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
        self.anchor = torch.empty((), requires_grad=True)
        self._guards: dict[int, ref[Any]] = {}

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
            self.watch(out)
        return out

    def watch(self, out: Any) -> None:
        """Record when the memory of a result is freed, whoever made it: the first block's input as those of others."""

        def gone(key: int, nbytes: int, _: Any) -> None:
            del self._guards[key]
            self.entries.append(Entry("free", "", "forward", "", shape=(nbytes,)))

        for storage in (tensor.untyped_storage() for tensor in tensors_in(out)):
            key = storage._cdata
            if key not in self._guards:
                self._guards[key] = ref(storage, partial(gone, key, storage.nbytes()))


class _Call:
    """Replaces the forward of one block."""

    def __init__(self, probe: Probe, around: _Around, stack: Stack, kind: int, block: nn.Module, gone: bool) -> None:
        self._probe, self.around = probe, around
        self._stack, self._kind, self._gone = stack, kind, gone
        self._is_last = block is stack.blocks[-1]
        self.path = f"{stack.path}.0" if stack.path else "0"
        self._modules = [(name, module, _plain(module)) for name, module in block.named_modules()]

    def instead_of(self, forward: Callable[..., Any]) -> _Call:
        """Replace a block's forward, with its signature."""
        self._forward = self.__wrapped__ = forward
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around, probe = self.around, self._probe
        if around.inside is not None:
            return self._forward(*args, **kwargs)
        if self._gone:
            raise NotAlikeError(f"code outside of {self._stack.path} refers to them and calls them")
        given: list[tuple[str, Tensor]] = []
        around.objects = []
        how = (_call_of((args, kwargs), "", around, given), _settings(), *self._changed())
        call = (self._stack.path, self._kind, how)
        answer = None if probe.reads_place or self._is_last else probe.answers.get(call)
        out: Any = None
        ran: list[Any] = []
        around.inside = ran
        try:
            if answer is None:
                with _outside_of_checkpointing():
                    out = self._forward(*args, **kwargs)
                answer = _answer_of(out, given)
                probe.learn(call, answer, tuple(ran))
            around.inside = ran = []
            out = out if answer is None else answer(self, dict(given))
        finally:  # also where checkpointing ends a recomputation when it has what it needs
            around.inside = None
            around.entries.append(Entry("call", self.path, "forward", "", source=str(probe.number((call, tuple(ran))))))
        around.watch(out)
        around.last = {id(tensor): f"took {name}" for name, tensor in given}
        around.last |= {id(tensor): f"gave {name}" for name, tensor in _named(out, "")}
        around.known = {id(each): f"took {at}" for at, each in enumerate(around.objects)}
        around.alive = [args, kwargs, out]
        return out

    def _changed(self) -> list[Any]:
        """Attributes of the block's modules that are others than when the forward began."""
        now = ((name, _plain(module).items(), before) for name, module, before in self._modules)
        return [
            (name, *item) for name, items, before in now for item in items if before.get(item[0], self) is not item[1]
        ]


@contextmanager
def _outside_of_checkpointing() -> Iterator[None]:
    """Inside, checkpointing around sees nothing of a block, in whose place it sees a stand-in."""
    with ExitStack() as stack:
        while type(dispatch._get_current_dispatch_mode()).__module__ == "torch.utils.checkpoint":
            stack.enter_context(dispatch._pop_mode_temporarily())
        # A result that saves itself, not a tensor of its memory, would live for ever
        stack.enter_context(saved_tensors_hooks(Tensor.detach, lambda tensor: tensor))
        yield


def _plain(thing: Any) -> dict[str, Any]:
    return {name: value for name, value in getattr(thing, "__dict__", {}).items() if isinstance(value, _PLAIN)}


class _StandIn(torch.autograd.Function):
    """A result of a block and, in backward, gradients of the tensors that it was given."""

    @staticmethod
    def forward(ctx: Any, call: _Call, made: Callable[[], Tensor], anchor: Tensor, *given: Tensor) -> Tensor:
        ctx.call = call
        ctx.gradients = [_maker(tensor) if tensor.requires_grad else None for tensor in given]
        # Not what was given, which code may change in place; checkpointing recomputes for what was saved
        ctx.save_for_backward(made())
        return made()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        around = ctx.call.around
        _ = ctx.saved_tensors  # which recomputes where it is checkpointed
        around.entries.append(Entry("backward", ctx.call.path, "forward", ""))
        around.inside = []
        try:
            gradients = [gradient and gradient() for gradient in ctx.gradients]
        finally:
            around.inside = None
        around.watch(gradients)
        return None, None, None, *gradients


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
    if isinstance(value, _PLAIN):
        return (type(value), value)
    around.objects.append(value)
    return (type(value), around.known.get(id(value), "new"), *_plain(value).items())


def _settings() -> Any:
    """Settings outside of a block that its operations or their backward follow."""
    formats = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]
    cuda = torch.backends.cuda
    fused = [getattr(cuda, f"{each}_sdp_enabled")() for each in ("flash", "mem_efficient", "math", "cudnn")]
    stack: Any = torch.overrides._get_current_function_mode_stack
    modes = [*dispatch._get_current_dispatch_mode_stack(), *stack()]
    codes = [(type(mode), *map(_code, vars(mode).values())) for mode in modes]
    hooks = map(_code, torch._C._autograd._top_saved_tensors_default_hooks(True) or ())
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    return (*flags, *formats, *fused, *codes, *hooks)


def _code(function: Any) -> Any:
    """What a function does: its code and the numbers and names that it refers to; None of anything else."""
    if isinstance(function, partial):
        return (_code(function.func), repr(function.args), repr(function.keywords))
    cells = (each.cell_contents for each in getattr(function, "__closure__", None) or ())
    named = (cell if isinstance(cell, _PLAIN) else repr(cell) for cell in cells if isinstance(cell, (*_PLAIN, list)))
    return (getattr(function, "__code__", None), *named)


def _answer_of(out: Any, given: Sequence[tuple[str, Tensor]]) -> _Answer | None:
    """What makes a result like this one of a call's tensors; None where a part of it cannot be made again."""
    names = {id(tensor): name for name, tensor in given}

    def form(value: Any) -> _Answer:
        kind = type(value)  # what an answer refers to must not keep the result itself
        if isinstance(value, Tensor):
            if kind is not FakeTensor or isinstance(value, nn.Parameter):
                raise TypeError
            name = names.get(id(value))
            return _like(value) if name is None else lambda call, tensors: tensors[name]
        if kind in (tuple, list):
            parts = [form(each) for each in value]
            return lambda call, tensors: kind(part(call, tensors) for part in parts)
        if kind is dict:
            items = {key: form(each) for key, each in value.items()}
            return lambda call, tensors: {key: part(call, tensors) for key, part in items.items()}
        if is_dataclass(value) and isinstance(value, Mapping) and not isinstance(value, type):
            made = {field.name: form(getattr(value, field.name)) for field in fields(value)}
            return lambda call, tensors: kind(**{name: part(call, tensors) for name, part in made.items()})
        if value is None or isinstance(value, (bool, int, float, str)):
            return lambda call, tensors: value
        raise TypeError

    try:
        return form(out)
    except TypeError:
        return None


def _like(tensor: Tensor) -> _Answer:
    # A result that a block made is not kept: what refers to it would keep its graph and the block's activations alive.
    made = _maker(tensor)
    if not tensor.requires_grad:
        return lambda call, tensors: made()
    apply: Any = _StandIn.apply
    return lambda call, tensors: apply(call, made, call.around.anchor, *tensors.values())


def _maker(tensor: Tensor) -> Callable[[], Tensor]:
    shape, stride = tuple(tensor.shape), tensor.stride()
    return partial(torch.empty_strided, shape, stride, dtype=tensor.dtype, device=tensor.device)


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named(each, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from _named(each, f"{name}.{at}")
