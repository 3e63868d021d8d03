"""A chain of torch's operations on one tensor, from text, without torch: which are views, which copy, which fail.

The text is what one would write after the tensor in Python: ``transpose(0, 1) view(32)``, ``.transpose(0,1).view(32)``
or, without brackets that a shell would take, ``transpose:0,1 view:32``; ``[:, 1]`` picks a part.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text, shown
from trainledger.tensors import einops
from trainledger.tensors.copies import COPIES, itemsize_of
from trainledger.tensors.einsum import LARGEST, MOST_DIMS, Tensor
from trainledger.tensors.slices import SLICES, indexed
from trainledger.tensors.strided import Chain, ChainStep, Strided
from trainledger.tensors.views import SHAPES, CannotApply, Operation

OPERATIONS: dict[str, Operation] = {**SHAPES, **SLICES, **COPIES}
OPERATIONS |= {name: einops.operation(name) for name in ("rearrange", "reduce")}
_EINOPS_REPEAT = einops.operation("repeat")  # of a pattern; torch has a repeat of its own
LONGEST, MOST_STEPS = 2000, 100
_MANY, _NAMED = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS
_MANY_NAMES = ("index", "dim", "dims", "shape", "size", "sizes", "repeats")
_SHORT = re.compile(r"([A-Za-z_]\w*):([^\s()\[\]]+)", re.ASCII)


@frozen
class Call:
    """One operation of a chain as it was written."""

    name: str
    args: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """
        >>> read_chain("transpose:0,1 [1:,None] view(float16)")[1].text
        '[1:, None]'
        """
        if self.name == "[]":
            return f"[{', '.join(_written(argument) for argument in self.args)}]"
        inside = [
            *(_written(argument) for argument in self.args),
            *(f"{name}={_written(each)}" for name, each in self.named),
        ]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


def start_of(tensor: Tensor) -> Strided:
    """A new tensor in row-major order; `InvalidInput` for formats whose elements have no bytes of their own."""
    itemsize = itemsize_of(tensor.dtype)
    if itemsize is None:
        rule = "packs its elements or keeps separate scales, so that no element has an address"
        raise InvalidInput([Problem("tensor", tensor.dtype, rule, "uint8")])
    return Strided(tensor.dtype, itemsize, tensor.shape, tensor.strides, 0, tensor.nbytes)


def chain(tensor: Tensor, operations: str | Iterable[str]) -> Chain:
    """What each operation makes of a tensor; where torch would raise, the chain ends with a `Problem` as ``failure``.

    `InvalidInput` with a sentence for text that is no chain.

    >>> from trainledger.tensors.einsum import read_tensor
    >>> print(chain(read_tensor("float32[4,8]"), "transpose reshape(32)"))
    fp32[4, 8], stride [8, 1], offset 0
      transpose: fp32[8, 4], stride [1, 8], offset 0: view, free: dims 0 and 1 are swapped; the elements stay in place
      reshape(32): fp32[32], stride [1], offset 0: copy, 128 B: fp32[8, 4] with strides [1, 8] cannot be viewed as [32]\
: dims 0 and 1 would be merged into one, for which dim 0 would need stride 32, and it has stride 1
    """
    calls = read_chain(operations)
    one = start = start_of(tensor)
    steps: list[ChainStep] = []
    for number, call in enumerate(calls, start=1):
        try:
            result, kind, why = _applied(one, call)
        except CannotApply as reason:
            failure = Problem(f"step {number}, {call.text}", None, reason.rule, reason.nearest)
            return Chain(start, tuple(steps), call.text, failure)
        written = {"copy": result.nbytes, "result": result.nbytes, "in place": result.nbytes}.get(kind, 0)
        steps.append(ChainStep(call.text, result, kind, written, why))
        one = result
    return Chain(start, tuple(steps))


def _applied(tensor: Strided, call: Call) -> tuple[Strided, str, str]:
    if call.name == "[]":
        made = indexed(tensor, call.args)
    else:
        call = _several(call)
        patterned = call.name == "repeat" and any(isinstance(argument, str) for argument in call.args)
        operation = _EINOPS_REPEAT if patterned else OPERATIONS[call.name]
        _check_arguments(call, operation)
        made = operation(tensor, *call.args, **dict(call.named))
    result = made[0]
    if len(result.shape) > MOST_DIMS:
        raise CannotApply(f"makes {len(result.shape)} dims; a tensor has at most {MOST_DIMS}")
    if result.elements > LARGEST or result.span[1] > LARGEST:
        raise CannotApply(f"makes more than {LARGEST:.0e} elements".replace("+", ""))
    return made


def _several(call: Call) -> Call:
    """A call with a name such as ``dims=`` as one that gives the same arguments one by one."""
    code = OPERATIONS[call.name].__code__
    names = code.co_varnames[1 : code.co_argcount]
    named = dict(call.named)
    many = [each for each in named if each in _MANY_NAMES and each not in names]
    before = [name for name in names[len(call.args) :] if name in named]
    whole = len(call.args) + len(before) == len(names) and len(named) == len(call.named)
    if not code.co_flags & _MANY or code.co_flags & _NAMED or len(many) != 1 or not whole:
        return call
    args = (*call.args, *(named[each] for each in before), named[many[0]])
    return Call(call.name, args, tuple(each for each in call.named if each[0] not in (*before, *many)))


def _check_arguments(call: Call, operation: Operation) -> None:
    """Say what an operation takes where the arguments are not that."""
    code = operation.__code__
    names = code.co_varnames[1 : code.co_argcount]
    only_named = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    any_number = bool(code.co_flags & _MANY)
    least = len(names) - len(operation.__defaults__ or ())
    takes = f"{call.name}({', '.join((*names, *(['...'] if any_number else []), *only_named))})"
    given = [name for name, _ in call.named]
    strange = next((name for name in given if name not in (*names, *only_named)), None)
    if strange is not None and not code.co_flags & _NAMED:
        raise CannotApply(f"has no argument {strange}; it is {takes}", nearest_text(strange, [*names, *only_named]))
    if len(call.args) > len(names) and not any_number:
        raise CannotApply(f"takes {len(names)} arguments at most, and {len(call.args)} are given; it is {takes}")
    filled = {*names[: len(call.args)], *given}
    if len(filled) < len(call.args[: len(names)]) + len(set(given)) or len(set(given)) < len(given):
        raise CannotApply(f"has one argument twice; it is {takes}")
    missing = [name for name in names[:least] if name not in filled]
    if missing:
        raise CannotApply(f"lacks {' and '.join(missing)}; it is {takes}")


def read_chain(operations: str | Iterable[str]) -> tuple[Call, ...]:
    """The operations in text, in one piece or several; `InvalidInput` with a sentence otherwise."""
    text = operations if isinstance(operations, str) else " ".join(operations)
    if len(text) > LONGEST:
        raise InvalidInput([Problem("operations", text, f"is longer than {LONGEST:,} characters")])
    calls = [call for word in _words(text) for call in _read(word)]
    if len(calls) > MOST_STEPS:
        raise InvalidInput(
            [Problem("operations", None, f"has {len(calls)} operations; {MOST_STEPS} are shown at most")]
        )
    return tuple(calls)


def _words(text: str) -> list[str]:
    """The text split at spaces outside brackets."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter.isspace() and depth <= 0:
            words.append("")
        else:
            words[-1] += letter
    return [word for word in words if word]


def _read(word: str) -> list[Call]:
    short = _SHORT.fullmatch(word)
    python = f"{short[1]}({short[2]})" if short else word
    dot = "" if python.startswith(("[", ".")) else "."
    try:
        with warnings.catch_warnings():  # of odd escapes and the like
            warnings.simplefilter("ignore")
            tree = ast.parse(f"x{dot}{python}", mode="eval").body
        calls: list[Call] = []
        while not (isinstance(tree, ast.Name) and tree.id == "x"):
            call, tree = _outermost(tree)
            calls.insert(0, call)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        rule = "is no operation such as transpose(0,1), view(4,8), contiguous or [:,1]"
        raise InvalidInput([Problem("operations", word, rule, _nearest_word(word))]) from None
    for call in calls:
        if call.name not in OPERATIONS and call.name != "[]":
            near = nearest_text(call.name, OPERATIONS)
            rule = f"is no operation that is known here ({', '.join(_known())})"
            raise InvalidInput([Problem("operations", call.name, rule, near)])
    return calls


def _known() -> list[str]:
    return sorted({operation.removesuffix("_") for operation in OPERATIONS}, key=lambda each: (each.lower(), each))


def _nearest_word(word: str) -> str | None:
    name = re.match(r"\.?([A-Za-z_]\w*)", word, re.ASCII)
    return nearest_text(name[1], OPERATIONS) if name else None


def _outermost(tree: ast.expr) -> tuple[Call, ast.expr]:
    """The last operation of an expression, and what it is applied to; ValueError where it is none."""
    match tree:
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=args, keywords=named):
            pairs = tuple((each.arg or "", _value(each.value)) for each in named)
            return Call(name, tuple(_value(argument) for argument in args), pairs), value
        case ast.Attribute(value=value, attr=name):
            return Call(name), value
        case ast.Subscript(value=value, slice=index):
            items = tuple(map(_item, index.elts)) if isinstance(index, ast.Tuple) else (_item(index),)
            return Call("[]", items), value
    raise ValueError(type(tree).__name__)


def _value(tree: ast.expr) -> Any:
    """A number, a name such as float16, None, or a tuple of them."""
    match tree:
        case ast.Constant(value=int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name
        case ast.Tuple(elts=elts) | ast.List(elts=elts):
            return tuple(_value(element) for element in elts)
    raise ValueError(type(tree).__name__)


def _item(tree: ast.expr) -> Any:
    """One index in brackets."""
    if isinstance(tree, ast.Slice):
        ends = (
            None if expression is None else _value(expression) for expression in (tree.lower, tree.upper, tree.step)
        )
        return slice(*ends)
    if isinstance(tree, ast.Constant) and tree.value is Ellipsis:
        return Ellipsis
    return _value(tree)


def _written(value: Any) -> str:
    """An argument as Python would write it."""
    if isinstance(value, slice):
        ends = ["" if each is None else str(each) for each in (value.start, value.stop)]
        return ":".join([*ends, *([] if value.step is None else [str(value.step)])])
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, str) and not value.isidentifier():
        return repr(value)
    return "..." if value is Ellipsis else str(value)


def read_index(text: str, field: str = "--at") -> tuple[int, ...]:
    """An index such as ``1,2`` (or nothing for a single number's); `InvalidInput` otherwise.

    >>> read_index("1,-2"), read_index("")
    ((1, -2), ())
    """
    words = [part.strip() for part in text.strip().strip("[]()").split(",")] if text.strip() else []
    if not all(re.fullmatch(r"[+-]?\d{1,18}", word, re.ASCII) for word in words):
        raise InvalidInput([Problem(field, text, f"is no index; write it like 1,2 ({shown(text)} has other things)")])
    return tuple(map(int, words))


def places(chained: Chain, index: Sequence[int], field: str = "--at") -> list[int | None]:
    """The place in its storage of ``tensor[index]``, of the first tensor and after each step; None where it has none.

    `InvalidInput` where no tensor of the chain has the index.
    """
    found: list[int | None] = []
    sentences = []
    for one in (chained.start, *(step.result for step in chained.steps)):
        try:
            found.append(one.place(index))
        except IndexError as error:
            found.append(None)
            sentences.append(str(error))
    if all(each is None for each in found):
        near = ",".join(str(max(0, size - 1)) for size in chained.start.shape)
        raise InvalidInput([Problem(field, ",".join(map(str, index)), sentences[0], near)])
    return found
