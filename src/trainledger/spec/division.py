"""Counts rounded up: of pieces that hold so much, and to a multiple."""

from __future__ import annotations

from typing import Any, overload


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: Any, b: Any) -> Any: ...
def ceil_div(a: Any, b: Any) -> Any:
    """How many pieces of size ``b`` hold ``a``, the last one perhaps in part; exact for integers of any size.

    Also of arrays, for many counts at once, and of sympy expressions, for a formula.

    >>> ceil_div(10, 4), ceil_div(8, 4), ceil_div(0, 4)
    (3, 2, 0)
    """
    return -(-a // b)


@overload
def round_up(a: int, multiple: int) -> int: ...
@overload
def round_up(a: Any, multiple: Any) -> Any: ...
def round_up(a: Any, multiple: Any) -> Any:
    """The smallest multiple that is not below ``a``, of what `ceil_div` takes.

    >>> round_up(50257, 128), round_up(256, 128)
    (50304, 256)
    """
    return -(-a // multiple) * multiple
