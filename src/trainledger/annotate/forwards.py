"""Forward passes that record gradients which no backward ever asks for: evaluation without ``no_grad``.

Followed are matrix products, attention and convolutions, each of whose nodes runs an operation in its backward.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainledger.annotate.callers import Chain

HEAVY = ("matmul", "attention")
_MOST_OPEN = 50_000


class Forward:
    """Products of one place whose nodes were never used."""

    __slots__ = ("flops", "grown", "line", "operations")

    def __init__(self, line: str) -> None:
        self.line = line
        self.operations = self.flops = self.grown = 0


class _Product:
    __slots__ = ("before", "chain", "flops", "live")

    def __init__(self, chain: Chain, flops: int, before: int, live: int) -> None:
        self.chain, self.flops, self.before, self.live = chain, flops, before, live


class Forwards:
    """Products by the number of their node, until a backward runs it."""

    def __init__(self) -> None:
        self._open: dict[int, _Product] = {}
        self._unused: list[tuple[int, _Product]] = []
        self._used: set[str] = set()
        self._last_used = -1

    def made(self, number: int, chain: Chain, flops: int, before: int, live: int) -> None:
        """A product got a node; ``before`` and ``live`` are bytes live before it and after it."""
        if len(self._open) >= _MOST_OPEN:
            self.settle(sorted(self._open)[_MOST_OPEN // 2])
        self._open[number] = _Product(chain, flops, before, live)

    def ran(self, number: int) -> None:
        """A backward runs a node."""
        product = self._open.pop(number, None)
        if product is not None:
            self._used.update(product.chain)
            self._last_used = max(self._last_used, number)

    def settle(self, before: int) -> None:
        """No backward will run a node with a lower number."""
        for number in [each for each in self._open if each < before]:
            if len(self._unused) < _MOST_OPEN:
                self._unused.append((number, self._open[number]))
            del self._open[number]

    def never_used(self, *, ended: bool, told: Iterable[tuple[int, int]] = ()) -> list[Forward]:
        """Places of products that no backward has used, without those of ``told`` nodes (from, to).

        Where the program has not ``ended``, those after the last that was used might have been yet to come.
        """
        bounds = list(told)
        found: dict[str, Forward] = {}
        last = ""
        began = 0
        for number, product in sorted([*self._unused, *self._open.items()], key=lambda each: each[0]):
            if (not ended and number > self._last_used) or any(low <= number < high for low, high in bounds):
                continue
            line = next((each for each in product.chain if each not in self._used), next(iter(product.chain), ""))
            if not line:
                continue
            if line != last or product.live < began:
                last, began = line, product.before
            forward = found.setdefault(line, Forward(line))
            forward.operations += 1
            forward.flops += product.flops
            forward.grown = max(forward.grown, product.live - began)
        return list(found.values())
