"""The private names of torch's compiler that the tracer needs, looked up here and nowhere else."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from trainledger.spec.problem import InvalidInput, Problem

_DYNAMO = "torch._dynamo.convert_frame"
_NAMES = {
    "frames": (_DYNAMO, "CatchErrorsWrapper", ("__call__",)),
    "skipped": (_DYNAMO, "ConvertFrameReturn", ()),
    "modes": ("torch.utils._python_dispatch", "", ("_disable_current_modes",)),
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
def name(what: str) -> Any:
    """A class, a module or a list of the compiler's. Raises InvalidInput where this torch has it no longer."""
    module, owner, members = _NAMES[what]
    where = module
    try:
        found: Any = importlib.import_module(module)
        if owner:
            where = f"{module}.{owner}"
            found = getattr(found, owner)
        for each in members:
            if not hasattr(found, each):
                where = f"{where}.{each}"
                raise AttributeError(where)
    except (ImportError, AttributeError):
        rule = f"is needed for the ledger of a compiled step, and torch {torch.__version__} does not have it"
        raise InvalidInput([Problem(where, None, rule, "torch 2.13, or the model without compile")]) from None
    return found


def has_all_names() -> bool:
    """Whether this torch has all that following compiled code needs."""
    try:
        for each in _NAMES:
            name(each)
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
def modes_off() -> Iterator[None]:
    """No dispatch mode is active inside."""
    with name("modes")._disable_current_modes():
        yield


@contextmanager
def modes_unseen() -> Iterator[None]:
    """Dynamo does not see the dispatch modes that are active, for which it would run everything eagerly."""
    modes = name("modes")
    before = getattr(modes, _FLAG, None)
    if before is None or not hasattr(modes, _SET_FLAG):  # a version that looks at the modes themselves
        yield
        return
    setattr(modes, _FLAG, False)
    getattr(modes, _SET_FLAG)(False)
    try:
        yield
    finally:
        setattr(modes, _FLAG, before)
        getattr(modes, _SET_FLAG)(before)


@contextmanager
def function_modes_off() -> Iterator[None]:
    """No mode that sees torch's functions is active inside: under one Dynamo does not follow every tensor method."""
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(name("functions")._pop_mode_temporarily())
        yield


@contextmanager
def hooks_unseen() -> Iterator[None]:
    """Hooks on all modules, as a recorder's, are not called inside: a compiler would compile them along."""
    hooks = name("hooks")
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
