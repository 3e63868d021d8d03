"""The account of one operator as data, and rules for operators that are not torch's own, given by the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.flop_counter import flop_registry

from trainledger.ledger.entry import KINDS
from trainledger.spec.problem import shown
from trainledger.trace.patches import Args, Kwargs

Count = Callable[[Args, Any], int]  # FLOPs or bytes, of the arguments and the result
Shape = Callable[[Args], tuple[int, ...]]
Rule = TypeVar("Rule", bound=Callable[..., int])
MODEL_KINDS = ("matmul", "attention")  # whose FLOPs are the model's own


@dataclass(frozen=True)
class Operator:
    """How one operator is accounted for; with ``takes_options`` ``flops`` gets its keywords as a last argument.

    ``model_flops`` are the model's own where they are not all FLOPs of one of `MODEL_KINDS`; ``shape`` is that of a
    matmul or attention; ``scratch`` is what a CPU's kernel allocates besides its results.
    """

    name: str
    kind: str
    flops: Count
    model_flops: Count | None = None
    assumed: bool = False
    shape: Shape = lambda args: ()
    takes_options: bool = False
    source: str = ""
    scratch: Count | None = None

    def counted(self, args: Args, options: Kwargs, out: Any) -> tuple[int, int]:
        """FLOPs done, and the model's own share of them."""
        given = (*args, options) if self.takes_options else args
        done = self.flops(given, out)
        if self.kind not in MODEL_KINDS:
            return done, 0
        return done, done if self.model_flops is None else self.model_flops(given, out)


CUSTOM: dict[str, Operator] = {}  # by the operator's name with its library


def cost_rule(operator: str | OpOverload | OpOverloadPacket, *, kind: str = "matmul") -> Callable[[Rule], Rule]:
    """A decorator that registers the FLOPs of an operator: a function of its arguments and its result, ``out``.

    ``operator`` is one of ``torch.ops`` or its name (``"my_lib::attention"``); ``kind`` one of the kinds of an entry.
    FLOPs of kinds ``matmul`` and ``attention`` are model FLOPs, others are not. A later rule replaces an
    earlier one. A formula registered with ``torch.utils.flop_counter.register_flop_formula`` needs no second rule.
    Raises ValueError for a kind that is none, for what names no operator, and, when the operator runs, where the rule
    gives anything but a whole number from zero on: the trace then ends there and its ``partial`` says so.

    >>> @cost_rule("my_lib::gated")
    ... def gated(x, weight, *, out):
    ...     return 2 * x.numel() * weight.shape[0]
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if not isinstance(operator, (str, OpOverload, OpOverloadPacket)):
        rule = "must be one of torch.ops, such as torch.ops.my_lib.op, or its name, such as 'my_lib::op'"
        raise ValueError(f"operator {rule}, not {shown(operator)}")
    name = operator._schema.name if isinstance(operator, OpOverload) else operator
    name = name if isinstance(name, str) else str(name._qualified_op_name)
    if not all(name.partition("::")):
        raise ValueError(f"an operator is named with its library, such as 'my_lib::{name}', not {name!r}")

    def remember(rule: Rule) -> Rule:
        if not callable(rule):
            raise ValueError(f"the rule of {name} must be a function, not {shown(rule)}")
        source = f"cost_rule {getattr(rule, '__qualname__', type(rule).__name__)}"

        def flops(args: Args, out: Any) -> int:
            *given, options = args
            return _whole(rule(*given, **options, out=out), name, source)

        CUSTOM[name] = Operator(name, kind, flops, takes_options=True, source=source)
        return rule

    return remember


def registered_with_torch(func: OpOverload) -> Operator | None:
    """The account of an operator by the formula that was registered with torch's own FLOP counter; None without one."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None

    def flops(args: Args, out: Any) -> int:
        *given, options = args
        return _whole(formula(*given, **options, out_val=out), name, source)

    name, source = func._schema.name, "torch.utils.flop_counter"
    return Operator(name, "matmul", flops, takes_options=True, source=source)


def _whole(counted: object, name: str, source: str) -> int:
    """FLOPs that a rule gave; ValueError where they are no whole number from zero on."""
    try:
        whole = index(counted)  # type: ignore[arg-type]
    except TypeError:
        whole = -1
    if whole < 0 or isinstance(counted, Tensor):
        rule = "FLOPs must be a whole number from zero on"
        raise ValueError(f"the rule of {name} ({source}) gave {shown(counted)}: {rule}")
    return whole
