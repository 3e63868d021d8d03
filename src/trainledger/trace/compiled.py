"""Compiled modules while a step is traced or metered: Dynamo compiles them anew, and Inductor's code runs.

Inductor lowers, fuses, schedules and plans memory as usual and writes the Python that allocates, reuses and frees; for
fake tensors only the C++ of the kernels is not compiled. Before each call that code says which one it is. The private
names of torch's compiler are looked up here and nowhere else.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch as dispatch

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.trace.compiled_runs import NEXT, Owners, Runs, Work, work_of_kernel, work_of_operator
from trainledger.trace.patches import all_replaced, around, replaced
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import compiled_parts, is_users, shown_file

_DYNAMO = "torch._dynamo.convert_frame"
_NAMES = {
    "frames": (_DYNAMO, "CatchErrorsWrapper", ("__call__",)),
    "skipped": (_DYNAMO, "ConvertFrameReturn", ()),
    "functions": ("torch.overrides", "", ("_pop_mode_temporarily",)),
    "hooks": ("torch.nn.modules.module", "", ("_global_forward_pre_hooks", "_global_forward_hooks")),
    "breaks": ("torch._dynamo.utils", "graph_break_reasons", ()),
    "graphs": ("torch._inductor.graph", "GraphLowering", ("_compile_to_module_lines",)),
    "kernels": ("torch._inductor.codegen.cpp", "CppScheduling", ("define_kernel",)),
    "scheduler": ("torch._inductor.scheduler", "Scheduler", ("codegen_extern_call",)),
    "compiling": ("torch._inductor.async_compile", "AsyncCompile", ("cpp_pybinding",)),
    "graph": ("torch._inductor.virtualized", "V", ()),
}
_FLAG = "_is_in_any_mode_without_ignore_compile_internals"
_SET_FLAG = "set_is_in_mode_without_ignore_compile_internals"


def dynamo_is_loaded() -> bool:
    """Whether anything can have been compiled: torch.compile imports Dynamo when it is called."""
    return _DYNAMO in sys.modules


@cache
def internal(what: str) -> Any:
    """A class, a module or a list of the compiler's. Raises InvalidInput where this torch has it no longer."""
    module, owner, members = _NAMES[what]
    where = module
    try:
        found: Any = importlib.import_module(module)
        if owner:
            where = f"{module}.{owner}"
            found = getattr(found, owner)
        for member in members:
            if not hasattr(found, member):
                where = f"{where}.{member}"
                raise AttributeError(where)
    except (ImportError, AttributeError):
        rule = f"is needed for the ledger of a compiled step, and torch {torch.__version__} does not have it"
        raise InvalidInput([Problem(where, None, rule, "torch 2.13, or the model without compile")]) from None
    return found


def has_all_names() -> bool:
    """Whether this torch has all that following compiled code needs."""
    try:
        for name in _NAMES:
            internal(name)
    except InvalidInput:
        return False
    return True


@contextmanager
def no_word_of_hooks() -> Iterator[None]:
    """Inside, torch.compile does not warn of hooks on all modules: they are the recorder's, and hidden from it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*global hooks on modules.*")
        yield


@contextmanager
def compiled_runs_eagerly() -> Iterator[None]:
    """Inside, what torch.compile made runs as if it were not compiled, also with ``fullgraph=True``.

    Under a dispatch mode it does so anyway, but refuses to where a whole graph was asked for, and Dynamo leaves what it
    meets there eager for good.
    """
    if not dynamo_is_loaded():  # the stance would import it
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def modes_unseen() -> Iterator[None]:
    """Dynamo does not see the dispatch modes that are active, for which it would run everything eagerly."""
    before = getattr(dispatch, _FLAG, None)
    # A version that looks at the modes themselves
    if before is None or not hasattr(dispatch, _SET_FLAG):
        yield
        return
    setattr(dispatch, _FLAG, False)
    getattr(dispatch, _SET_FLAG)(False)
    try:
        yield
    finally:
        setattr(dispatch, _FLAG, before)
        getattr(dispatch, _SET_FLAG)(before)


@contextmanager
def function_modes_off() -> Iterator[None]:
    """No mode that sees torch's functions is active inside: under one Dynamo does not follow every tensor method."""
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(internal("functions")._pop_mode_temporarily())
        yield


@contextmanager
def hooks_unseen() -> Iterator[None]:
    """Hooks on all modules, as a recorder's, are not called inside: a compiler would compile them along."""
    hooks = internal("hooks")
    lists = [value for each, value in vars(hooks).items() if each.startswith("_global_forward") and value]
    before = [dict(each) for each in lists]
    for each in lists:
        each.clear()
    try:
        yield
    finally:
        for each, content in zip(lists, before, strict=True):
            each.update(content)


@contextmanager
def settings() -> Iterator[None]:
    """The compiler's settings while its code says what it calls: no cache stores that; backward is compiled at once."""
    import torch._functorch.config
    import torch._inductor.config

    functorch: Any = torch._functorch.config
    inductor: Any = torch._inductor.config
    backward = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    kernels = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1}
    with ExitStack() as stack:
        for config, wanted in ((functorch, backward), (inductor, kernels)):
            known = {each: value for each, value in wanted.items() if hasattr(config, each)}
            stack.enter_context(config.patch(known))
        yield


_WORKS = "_trainledger_works"  # the calls of a graph, kept with it
# Errors of the backend's or Dynamo's own, which compiling for real tensors does not raise.
_OF_COMPILER = ("BackendCompilerFailed", "InternalTorchDynamoError", "InductorError")


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was asked for a module or for one inside of it.

    >>> is_compiled(nn.Linear(2, 2)), is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    (False, True)
    """
    return any(True for _ in compiled_parts(model))


@contextmanager
def captured(model: nn.Module, recorder: Recorder, mode: FakeTensorMode | None) -> Iterator[None]:
    """Inside, what is compiled runs as compiled code does, and is recorded: on fake tensors of a ``mode``, else really.

    Whatever Inductor compiles is compiled anew, for fake tensors without its kernels, backward included. Graph breaks
    and what could not be compiled, which then runs eagerly, are said in the recorder's notes. What this process has
    compiled before is forgotten: its next call compiles it again.
    """
    if not dynamo_is_loaded():
        yield
        return
    runs = Runs(recorder, mode, Owners(model))

    def compile_frame(before: Callable[..., Any], wrapper: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        # Inside, what looks like a backward is the compiler's, which follows one to write its graph.
        outside, recorder.compiling = recorder.compiling, True
        try:
            with dispatch._disable_current_modes(), hooks_unseen(), _without_kernels(runs):
                return before(wrapper, frame, cache_entry, frame_state)
        except Exception as error:
            if type(error).__name__ not in _OF_COMPILER:
                raise
            recorder.notes.append(_failed(frame, error))
            return internal("skipped")()
        finally:
            recorder.compiling = outside

    recorder.sees_compiled = True
    torch._dynamo.reset()
    breaks = len(internal("breaks"))
    with ExitStack() as stack:
        for _, module in compiled_parts(model):
            # Of torch.compile: a module around the one that is compiled
            if module._compiled_call_impl is None:
                stack.enter_context(replaced(module, "forward", _without_hooks))
            else:
                stack.enter_context(replaced(module, "_compiled_call_impl", _without_hooks))
                entered = around(partial(_entered, recorder, module))
                stack.enter_context(replaced(module, "_compiled_call_impl", entered))
        stack.enter_context(replaced(internal("frames"), "__call__", around(compile_frame)))
        stack.enter_context(modes_unseen())
        stack.enter_context(no_word_of_hooks())
        try:
            yield
        finally:
            recorder.notes += dict.fromkeys(_breaks(breaks))
            torch._dynamo.reset()


@contextmanager
def compiled_calls() -> Iterator[list[object]]:
    """What torch.compile made and is called inside, also where it runs eagerly; once for each call."""
    calls: list[object] = []

    def noted(before: Callable[[Any], Any], callback: Any) -> Any:
        calls.extend([callback] if callable(callback) else [])
        return before(callback)

    loaded = [(torch._dynamo.eval_frame, "_callback_from_stance", around(noted))] if dynamo_is_loaded() else []
    with all_replaced(*loaded):
        yield calls


def backend_failed() -> bool:
    """Whether a backend has lately raised in this process, as a loop may expect of it."""
    found = torch._dynamo.utils.get_compilation_metrics() if dynamo_is_loaded() else []
    return any(each.fail_type == "BackendCompilerFailed" for each in found)


def follows_compiled(model: nn.Module) -> bool:
    """Whether compiled code of a real step runs as compiled while it is recorded, with the same bits.

    On an accelerator, among several ranks, or where this torch lacks what that needs, it runs eagerly.
    """
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return on_cpu and alone and has_all_names()


def metered(model: nn.Module, recorder: Recorder, *, compiled: bool | None = None) -> AbstractContextManager[None]:
    """Inside, what is compiled of a real step runs as compiled and is recorded, else eagerly (`follows_compiled`).

    Compiled code is made anew for it, and once more when it is called after it. ``compiled``: whether some of the step
    is, where that is known; else the model's modules tell.
    """
    some = is_compiled(model) if compiled is None else compiled
    follows = some and dynamo_is_loaded() and follows_compiled(model)
    return captured(model, recorder, None) if follows else compiled_runs_eagerly()


def _entered(recorder: Recorder, module: nn.Module, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    # Of a compiled module torch calls no global hook from outside (nn.Module._wrapped_call_impl): the recorder hears of
    # it here.
    output = None
    recorder.attribution.enter(module, arguments)
    try:
        output = run(*arguments, **options)
    finally:
        recorder.attribution.exit(module, arguments, output)
    return output


def _without_hooks(run: Callable[..., Any]) -> Callable[..., Any]:
    # Dynamo compiles hooks on all modules along with the module that it compiles, the recorder's too.

    def unseen(*arguments: Any, **options: Any) -> Any:
        with hooks_unseen(), function_modes_off():
            return run(*arguments, **options)

    return unseen


def _breaks(before: int) -> Iterator[str]:
    """A sentence for each graph break since there were as many, with its line."""
    for each in internal("breaks")[before:]:
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


@contextmanager
def _without_kernels(runs: Runs) -> Iterator[None]:
    """Inside, Inductor makes no kernels; the code that it writes reports to ``runs`` when it runs."""

    def define(before: Callable[..., Any], kernels: Any, source: Any, nodes: Any, kernel_args: Any = None) -> Any:
        graph = internal("graph").graph
        kernel = before(kernels, source, nodes, kernel_args)
        places = _places(kernels.kernel_group.args if kernel_args is None else kernel_args)
        _announce(graph, work_of_kernel(kernel, nodes, places, bool(graph.is_backward), _number(graph)))
        return kernel

    def call(before: Callable[..., Any], scheduler: Any, scheduler_node: Any) -> Any:
        graph = internal("graph").graph
        _announce(graph, work_of_operator(scheduler_node.node, bool(graph.is_backward)))
        return before(scheduler, scheduler_node)

    def load(before: Callable[..., Any], graph: Any, wrapper_code: Any) -> ModuleType:
        if graph.cpp_wrapper:
            rule = "has the allocations written in C++, which the ledger of a compiled step cannot follow"
            raise InvalidInput([Problem("cpp_wrapper", True, rule, False)])
        return _module(graph, wrapper_code.value, runs)

    with (
        settings(),
        replaced(internal("kernels"), "define_kernel", around(define)),
        replaced(internal("scheduler"), "codegen_extern_call", around(call)),
        replaced(internal("graphs"), "_compile_to_module_lines", around(load)),
    ):
        yield


def _announce(graph: Any, work: Work) -> None:
    works: list[Work] = graph.__dict__.setdefault(_WORKS, [])
    graph.wrapper_code.writeline(f"{NEXT}({len(works)})")
    works.append(work)


def _module(graph: Any, source: str, runs: Runs) -> ModuleType:
    # Executed here and not by PyCodeCache, which would keep the module in a list of its own for the life of the
    # process.
    module = ModuleType("trainledger_compiled")
    module.__file__ = "<compiled>"
    for constants in ("constants", "torchbind_constants", "opaque_value_type_classes"):
        module.__dict__.update(getattr(graph, constants, {}))

    def kernel(before: Callable[..., Any], *source: Any, **options: Any) -> Callable[..., None]:
        return runs.kernel(before(*source, **options) if runs.really else None)

    with replaced(internal("compiling"), "cpp_pybinding", around(kernel)):
        exec(compile(source, module.__file__, "exec"), module.__dict__)
    module.__dict__.update(runs.names(graph.__dict__.get(_WORKS, [])))
    module.__dict__["call"] = runs.graph(module.__dict__["call"], is_backward=bool(graph.is_backward))
    return module


def _places(arguments: Any) -> list[set[str]]:
    # A buffer that is reused in place is one argument with several names (KernelArgs.inplace_buffers).
    _, called, _ = arguments.cpp_argdefs()
    buffers = arguments.inplace_buffers.values()
    reused = [set(buffer.other_names) for buffer in buffers if hasattr(buffer, "other_names")]
    return [next((names for names in reused if each in names), {each}) for each in called]


def _number(graph: Any) -> Callable[[Any], int]:
    # A size that varies counts as the one that it was compiled with: a hint in torch's SizeVarAllocator, renamed in
    # 2.11.

    def number(size: Any) -> int:
        try:
            return int(size)
        except (TypeError, ValueError):
            sizes = graph.sizevars
            hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
            return int(hint(size, fallback=0))

    return number
