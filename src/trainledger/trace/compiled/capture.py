"""The compiler's own code of a graph, made without its kernels.

Inductor lowers, fuses, schedules and plans memory as ever and writes the Python that allocates, reuses and frees; only
the C++ of the kernels is not compiled. Before each call that code says which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.trace.compiled import torch_internals
from trainledger.trace.compiled.kernels import Work, work_of_kernel, work_of_operator
from trainledger.trace.compiled.running import NEXT, Runs
from trainledger.trace.patches import replaced

_WORKS = "_trainledger_works"  # the calls of a graph, kept with it


@contextmanager
def without_kernels(runs: Runs) -> Iterator[None]:
    """Inside, Inductor makes no kernels; the code that it writes is told to ``runs`` when it is run."""

    def define(before: Any) -> Any:
        def define_and_say(self: Any, src_code: Any, nodes: Any, kernel_args: Any = None) -> Any:
            graph = torch_internals.name("graph").graph
            kernel = before(self, src_code, nodes, kernel_args)
            places = _places(self.kernel_group.args if kernel_args is None else kernel_args)
            _say(graph, work_of_kernel(kernel, nodes, places, bool(graph.is_backward), _number(graph)))
            return kernel

        return define_and_say

    def call(before: Any) -> Any:
        def say_and_call(self: Any, scheduler_node: Any) -> Any:
            graph, node = torch_internals.name("graph").graph, scheduler_node.node
            _say(graph, work_of_operator(node, bool(graph.is_backward)))
            return before(self, scheduler_node)

        return say_and_call

    def load(_: Any) -> Any:
        def as_module(self: Any, wrapper_code: Any) -> ModuleType:
            if self.cpp_wrapper:
                rule = "has the allocations written in C++, which the ledger of a compiled step cannot follow"
                raise InvalidInput([Problem("cpp_wrapper", True, rule, False)])
            return _module(self, wrapper_code.value, runs)

        return as_module

    with ExitStack() as stack:
        for each in torch_internals.settings():
            stack.enter_context(each)
        stack.enter_context(replaced(torch_internals.name("kernels"), "define_kernel", define))
        stack.enter_context(replaced(torch_internals.name("scheduler"), "codegen_extern_call", call))
        stack.enter_context(replaced(torch_internals.name("graphs"), "_compile_to_module_lines", load))
        yield


def _say(graph: Any, work: Work) -> None:
    works: list[Work] = graph.__dict__.setdefault(_WORKS, [])
    graph.wrapper_code.writeline(f"{NEXT}({len(works)})")
    works.append(work)


def _module(graph: Any, source: str, runs: Runs) -> ModuleType:
    """The module of the code that Inductor wrote, kept from Inductor's own list of modules."""
    module = ModuleType("trainledger_compiled")
    module.__file__ = "<compiled>"
    for constants in ("constants", "torchbind_constants", "opaque_value_type_classes"):
        module.__dict__.update(getattr(graph, constants, {}))

    def stub(self: Any, argtypes: Any, source_code: str) -> Callable[..., None]:
        return lambda *arguments: runs.kernel(arguments)

    with replaced(torch_internals.name("compiling"), "cpp_pybinding", lambda _: stub):
        exec(compile(source, module.__file__, "exec"), module.__dict__)
    module.__dict__.update(runs.names(graph.__dict__.get(_WORKS, [])))
    module.__dict__["call"] = runs.graph(module.__dict__["call"], is_backward=bool(graph.is_backward))
    return module


def _places(arguments: Any) -> list[set[str]]:
    """The names of the buffers by position of a kernel's arguments, one that is reused under all its names."""
    _, called, _ = arguments.cpp_argdefs()
    reused = [set(each.other_names) for each in arguments.inplace_buffers.values() if hasattr(each, "other_names")]
    return [next((names for names in reused if each in names), {each}) for each in called]


def _number(graph: Any) -> Callable[[Any], int]:
    """An integer of a size; of one that varies, the one that it was compiled with."""

    def number(size: Any) -> int:
        try:
            return int(size)
        except (TypeError, ValueError):
            sizes = graph.sizevars
            hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
            return int(hint(size, fallback=0))

    return number
