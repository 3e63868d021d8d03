"""Rules for operators that are not torch's own, given by whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.flop_counter import flop_registry

from trainledger.ledger.entry import KINDS
from trainledger.trace.operators import CUSTOM, Operator, operator_of

Rule = TypeVar("Rule", bound=Callable[..., int])


def cost_rule(operator: str | OpOverload | OpOverloadPacket, *, kind: str = "matmul") -> Callable[[Rule], Rule]:
    """Say how many FLOPs an operator does: a decorator of a function of its arguments and ``out``, its result.

    ``operator`` is one of ``torch.ops`` or its name (``"my_lib::attention"``); ``kind`` one of the kinds of an entry.
    FLOPs of kinds ``matmul`` and ``attention`` are the model's own, others are not. A later rule takes the place of an
    earlier one. What ``torch.utils.flop_counter.register_flop_formula`` was told needs no second rule. Raises
    ValueError for a kind that is none and for a name without a library.

    >>> @cost_rule("my_lib::gated")
    ... def gated(x, weight, *, out):
    ...     return 2 * x.numel() * weight.shape[0]
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    name = operator if isinstance(operator, str) else _name_of(operator)
    if "::" not in name:
        raise ValueError(f"an operator is named with its library, such as 'my_lib::{name}', not {name!r}")

    def remember(rule: Rule) -> Rule:
        def flops(args: tuple[Any, ...], out: Any) -> tuple[int, int]:
            *given, options = args
            counted = rule(*given, **options, out=out)
            return counted, counted if kind in ("matmul", "attention") else 0

        CUSTOM[name] = Operator(name, kind, flops, takes_options=True, source=f"cost_rule {rule.__qualname__}")
        operator_of.cache_clear()
        return rule

    return remember


def registered_with_torch(func: OpOverload) -> Operator | None:
    """The account of an operator by the formula that torch's own FLOP counter was given for it, if it was."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None

    def flops(args: tuple[Any, ...], out: Any) -> tuple[int, int]:
        *given, options = args
        counted = int(formula(*given, **options, out_val=out))
        return counted, counted

    return Operator(func._schema.name, "matmul", flops, takes_options=True, source="torch.utils.flop_counter")


def _name_of(operator: OpOverload | OpOverloadPacket) -> str:
    return operator._schema.name if isinstance(operator, OpOverload) else str(operator._qualified_op_name)
