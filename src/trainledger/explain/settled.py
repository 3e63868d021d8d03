"""Formulas as they stand for a run's own sizes: which of two is the smaller, and what divides without remainder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympy import Symbol


def settled(amount: Any, values: Mapping[Symbol, int]) -> Any:
    """A formula that comes to the same number with these sizes, without what they decide.

    Of a minimum or a maximum it has the part that these sizes make it; a quotient that is whole with them is not
    rounded, and one that is rounded up is a ``ceiling``, not a ``floor`` of what is below zero.

    >>> import sympy
    >>> D, F, L = sympy.symbols("D F L", integer=True, positive=True)
    >>> settled(4 * D * sympy.Min(1, L - 1) - 8 * D * sympy.floor(-F / 32), {D: 512, F: 64, L: 4})
    D*F/4 + 4*D
    >>> settled(-8 * D * sympy.floor(-F / 32), {D: 512, F: 65})
    8*D*ceiling(F/32)
    """
    if not hasattr(amount, "replace"):
        return amount
    import sympy

    def number(part: Any) -> Any:
        return part.xreplace(values)

    def decided(one: Any) -> Any:
        most = isinstance(one, sympy.Max)
        # Of equal parts the shorter.
        return min(one.args, key=lambda each: (-number(each) if most else number(each), len(str(each))))

    def divided(one: Any) -> Any:
        (quotient,) = one.args
        if number(quotient).is_integer:
            return quotient
        return one.func(sympy.cancel(quotient))

    # From the innermost outwards: a quotient that is whole may be a part of another.
    whole = amount.replace(lambda each: isinstance(each, (sympy.Min, sympy.Max)), decided)
    whole = whole.replace(lambda each: isinstance(each, (sympy.floor, sympy.ceiling)), divided)
    return rounded_up(whole.expand())


def rounded_up(amount: Any) -> Any:
    """A formula in which what is rounded up says so: ``ceiling(x)`` for ``-floor(-x)``, as of pieces of a shard.

    >>> import sympy
    >>> rounded_up(-8 * sympy.floor(-sympy.Symbol("F") / 32))
    8*ceiling(F/32)
    """
    if not hasattr(amount, "replace"):
        return amount
    import sympy

    return amount.replace(
        lambda each: isinstance(each, sympy.floor) and each.args[0].could_extract_minus_sign(),
        lambda each: -sympy.ceiling(-each.args[0]),
    )
