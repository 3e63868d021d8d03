"""Compiled modules while a step is traced: Dynamo compiles them for fake tensors and runs the compiler's code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.trace.compiled import torch_internals
from trainledger.trace.compiled.torch_internals import hooks_unseen, modes_off
from trainledger.trace.patches import replaced
from trainledger.trace.recorder.attribution import plain_name
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import is_users, shown_file


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was asked for a module or for one inside of it.

    >>> is_compiled(nn.Linear(2, 2)), is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    (False, True)
    """
    return any(True for _ in compiled_parts(model))


def compiled_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The compiled modules of a model with their names: those that ``torch.compile`` or ``Module.compile`` made."""
    for name, module in model.named_modules():
        if hasattr(module, "_torchdynamo_orig_callable") or module._compiled_call_impl is not None:
            yield name, module


@contextmanager
def captured(model: nn.Module, recorder: Recorder, mode: FakeTensorMode) -> Iterator[None]:
    """Inside, what is compiled runs as compiled code does, on fake tensors, and the recorder is told of it.

    Whatever Inductor compiles is compiled anew without its kernels, backward included. Graph breaks and what could
    not be compiled for fake tensors, which then runs eagerly, are said in the recorder's notes. What this process has
    compiled before is forgotten: its next call compiles it again.
    """
    if not torch_internals.dynamo_is_loaded():
        yield
        return
    from trainledger.trace.compiled.capture import without_kernels
    from trainledger.trace.compiled.owners import Owners
    from trainledger.trace.compiled.running import Runs

    runs = Runs(recorder, mode, Owners(model))
    parts = [each for _, each in compiled_parts(model)]

    def compiling(before: Any) -> Any:
        def compile_frame(self: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
            with (
                modes_off(),
                hooks_unseen(),
                without_kernels(runs),
                _compiling(recorder),
            ):
                try:
                    return before(self, frame, cache_entry, frame_state)
                except Exception as error:
                    if not _is_of_compiler(error):
                        raise
                    recorder.notes.append(_failed(frame, error))
                    return torch_internals.name("skipped")()

        return compile_frame

    recorder.sees_compiled = True
    torch._dynamo.reset()
    breaks = len(torch_internals.name("breaks"))
    with ExitStack() as stack:
        for each in parts:
            stack.enter_context(_followed(each, recorder))
        stack.enter_context(replaced(torch_internals.name("frames"), "__call__", compiling))
        stack.enter_context(torch_internals.modes_unseen())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*global hooks on modules.*")  # the recorder's, which are hidden
        try:
            yield
        finally:
            recorder.notes += dict.fromkeys(_breaks(breaks))
            torch._dynamo.reset()


@contextmanager
def _compiling(recorder: Recorder) -> Iterator[None]:
    """Inside, what looks like a backward is the compiler's, which follows one to write its graph."""
    before, recorder.compiling = recorder.compiling, True
    try:
        yield
    finally:
        recorder.compiling = before


@contextmanager
def _followed(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Let the recorder know when a compiled module runs, and no hook be called that would be compiled along."""
    if module._compiled_call_impl is None:  # of torch.compile: a module around the one that is compiled
        with replaced(module, "forward", _without_hooks):
            yield
        return

    def call(before: Callable[..., Any]) -> Callable[..., Any]:
        run = _without_hooks(before)

        def compiled(*arguments: Any, **options: Any) -> Any:
            output = None
            recorder.places.enter(module, arguments)
            try:
                output = run(*arguments, **options)
            finally:
                recorder.places.exit(module, arguments, output)
            return output

        return compiled

    with replaced(module, "_compiled_call_impl", call):
        yield


def _without_hooks(run: Callable[..., Any]) -> Callable[..., Any]:
    def unseen(*arguments: Any, **options: Any) -> Any:
        with hooks_unseen(), torch_internals.function_modes_off():
            return run(*arguments, **options)

    return unseen


def ran_eagerly(model: nn.Module) -> Iterator[str]:
    """What must be said of a recording that took compiled modules as eager ones, as any dispatch mode does."""
    names = [plain_name(name) or "the model" for name, _ in compiled_parts(model)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        are = "are" if more else "is"
        yield f"{names[0]}{more} {are} compiled, and ran eagerly while each operation was recorded"


def _breaks(before: int) -> Iterator[str]:
    """A sentence for each graph break since there were as many, with its line."""
    for each in torch_internals.name("breaks")[before:]:
        users = [frame for frame in each.user_stack if is_users(frame.filename)]
        where = f" at {shown_file(users[-1].filename)}:{users[-1].lineno}" if users else ""
        yield f"graph break{where}: {_first_lines(each.reason, 1)}"


def _failed(frame: Any, error: Exception) -> str:
    code = frame.f_code
    where = f"{code.co_name} at {shown_file(code.co_filename)}:{code.co_firstlineno}"
    why = _first_lines(str(error), 2)
    return f"{where} could not be compiled for fake tensors and is accounted for as eager: {why}"


def _first_lines(text: str, count: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:count])[:300] or "no reason given"


def _is_of_compiler(error: Exception) -> bool:
    """Whether an error is the backend's or Dynamo's own, and not one that compiling for real tensors raises too."""
    return type(error).__name__ in ("BackendCompilerFailed", "InternalTorchDynamoError", "InductorError")
