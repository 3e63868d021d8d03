"""What a call in the compiler's code computes and moves: known at compile time, from the loops it was made of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from trainledger.trace.operators.table import operator_of
from trainledger.trace.recorder.source_lines import is_users, shown_file

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_COMPUTED = ("copy", "allocate", "embedding", "random")


@dataclass(frozen=True)
class Work:
    """One call of a graph: its FLOPs, those of them that are recomputation, and where it comes from.

    ``owner`` is the ``id`` of the module, None where the compiler does not know one, 0 for code outside of all.
    ``reads`` and ``writes`` are elements by position of the call's arguments; both are empty for a call of an operator,
    which is accounted for when it runs.
    """

    name: str
    kind: str = ""
    flops: int = 0
    flops_recomputed: int = 0
    recomputed: bool = False
    owner: int | None = None
    line: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


def work_of_operator(node: Any, in_backward: bool) -> Work:
    """The call of a library's kernel: which module and line it belongs to, and whether it is recomputation."""
    overload = getattr(node, "op_overload", None)
    name = str(getattr(node, "python_kernel_name", None) or overload or "")
    origins = list(node.get_origins())
    own = [each for each in origins if each.target is overload and overload is not None]
    if not own and getattr(node, "origin_node", None) is not None:
        own = [node.origin_node]
    origins = own or origins
    owner, line = _place(origins)
    recomputed = in_backward and bool(origins) and all(map(_of_forward, origins))
    return Work(name, recomputed=recomputed, owner=owner, line=line)


def work_of_kernel(
    name: str, nodes: Iterable[Any], places: list[set[str]], in_backward: bool, number: Callable[[Any], int]
) -> Work:
    """The call of a kernel that the compiler made of these scheduled loops.

    ``places`` are the buffers by position of the arguments, one that is reused under all its names; ``number`` makes
    an integer of a size. Each operation of the graph counts once per element, however often the kernel's loops repeat
    it, and what the compiler makes of one reduction counts as that reduction, as it does where it is not compiled. What
    is read more than once counts once, and what the kernel itself has written does not count as read.
    """
    loops = [each for node in nodes for each in node.get_nodes()]
    origins: list[Any] = list(dict.fromkeys(each for loop in loops for each in loop.node.get_origins()))
    computing = [each for each in origins if each.op == "call_function"]
    owner, line = _place(computing)
    made = {each.name for loop in loops for each in loop.read_writes.writes}
    read = {each for loop in loops for each in loop.read_writes.reads if each.name not in made}
    written = {each for loop in loops for each in loop.read_writes.writes}
    real = loops[0].scheduler.mutation_real_name if loops else {}  # of what is written over
    flops = _flops_of(computing)
    share = _recomputed_share(computing) if in_backward else 0.0
    return Work(
        name=name,
        kind=_kind(loops, flops),
        flops=flops,
        flops_recomputed=round(flops * share),
        recomputed=share == 1.0,
        owner=owner,
        line=line,
        # A buffer that is read and written over is two of the arguments.
        reads=tuple(
            0 if each in places[:at] else _elements(read, each, real, number) for at, each in enumerate(places)
        ),
        writes=tuple(
            0 if each in places[at + 1 :] else _elements(written, each, real, number) for at, each in enumerate(places)
        ),
    )


def _kind(loops: list[Any], flops: int) -> str:
    if any(each.is_reduction() for each in loops):
        return "reduction"
    return "elementwise" if flops else "copy"


def _elements(dependencies: set[Any], names: set[str], real: dict[str, str], number: Callable[[Any], int]) -> int:
    # Of a table that is looked up in, at most as many elements as come out are read.
    touched = 0
    for each in dependencies:
        if each.name in names or real.get(each.name) in names:
            indirect = hasattr(each, "size") and each.is_indirect()
            touched += math.prod(number(size) for size in each.size) if indirect else number(each.get_numel())
    return touched


def _recomputed_share(origins: list[Any]) -> float:
    """Which part of the operations of a kernel in a backward graph answers none but repeats one of the forward."""
    recomputed = total = 0
    for each in origins:
        flops = _flops(each)
        total += flops
        recomputed += flops if _of_forward(each) else 0
    if not total:
        return float(bool(origins) and all(map(_of_forward, origins)))
    return recomputed / total


def _flops_of(nodes: Iterable[Any]) -> int:
    # Inductor takes a reduction of the program apart, such as var_mean into sums and squares: it counts once, as
    # uncompiled.
    flops, reductions = 0, dict[Any, int]()
    for each in nodes:
        original = each.meta.get("original_aten")
        if isinstance(original, OpOverload) and operator_of(original).kind == "reduction":
            names = tuple(getattr(of, "name", "") for of in each.meta.get("from_node") or ())
            call = str(original), each.meta.get("seq_nr"), _of_forward(each), names
            reductions[call] = max(reductions.get(call, 0), _flops(each))
        else:
            flops += _flops(each)
    return flops + sum(reductions.values())


def _flops(node: Any) -> int:
    """One for each element of the largest of its operands and results."""
    func, out = node.target, node.meta.get("val")
    if not isinstance(func, OpOverload) or func.is_view or operator_of(func).kind in _NOT_COMPUTED:
        return 0
    name = func._schema.name
    if name == "prims::convert_element_type" or name.startswith(("prims::inductor", "prims::iota")):
        return 0  # as a cast, a draw and an arange are elsewhere
    outs = out if isinstance(out, (list, tuple)) else [out]
    values = [*outs, *(each.meta.get("val") for each in node.all_input_nodes)]
    sizes = [each.numel() for each in values if isinstance(each, torch.Tensor)]
    # Of a size that varies, the one that it was compiled with.
    return max((each if isinstance(each, int) else int(each.node.hint or 0) for each in sizes), default=0)


def _of_forward(node: Any) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def _place(nodes: list[Any]) -> tuple[int | None, str]:
    """The module and the line of the last of these operations, in the order of the graph, that has a line."""
    for each in sorted(nodes, key=lambda each: getattr(each, "_sort_key", ()), reverse=True):
        line = _line(each.meta.get("stack_trace") or "")
        stack = each.meta.get("nn_module_stack") or each.meta.get("fwd_nn_module_stack")
        if line or stack:
            return _owner(stack), line
    return None, ""


def _owner(stack: dict[str, Any] | None) -> int | None:
    # Dynamo's nn_module_stack has the modules' id as keys, with how often the module ran before.
    if not stack:
        return 0
    found = re.match(r"\d+", next(reversed(stack)))
    return None if found is None else int(found[0])


def _line(stack_trace: str) -> str:
    for file, number in reversed(_FRAME.findall(stack_trace)):
        if is_users(file):
            return f"{shown_file(file)}:{number}"
    return ""
