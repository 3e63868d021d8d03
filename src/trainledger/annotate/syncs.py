"""Where a program waits for a value of a tensor."""

from __future__ import annotations

from trainledger.annotate.callers import Caller
from trainledger.annotate.copies import called

SYNCHRONIZING = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "unique_dim",
    "nonzero_numpy",
})  # fmt: skip
_READS = "reads a number off a tensor"
_SAID = {
    "nonzero": "counts what is not zero", "masked_select": "counts what a mask picks", "equal": "compares values",
    "index": "counts what a mask picks", "_unique2": "counts distinct values",
}  # fmt: skip


class Sync:
    """One place that waits: how often, in how many steps, and before how many of the steps' ends it had begun."""

    __slots__ = ("caller_line", "device", "first", "inside", "last", "steps", "times", "what", "where")

    def __init__(self, line: str, what: str, where: str, device: str, inside: str, at: int) -> None:
        self.caller_line, self.what, self.where, self.device, self.inside = line, what, where, device, inside
        self.times = self.steps = 0
        self.first, self.last = at, -1


class Syncs:
    """Counts by line and expression. Of a program that uses an accelerator, only what waits for that counts."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Sync] = {}
        self.accelerated = False

    def take(self, caller: Caller, name: str, device: str, step: int) -> None:
        """Count one; ``step`` is how many steps have ended before."""
        self.accelerated = self.accelerated or not device.startswith("cpu")
        what = words(name, caller.expression)
        found = self.found.get((caller.at, what))
        if found is None:
            found = self.found[caller.at, what] = Sync(caller.at, what, caller.file, device, caller.inside, step)
        found.times += 1
        if found.last != step:
            found.steps += 1
            found.last = step

    def waits(self) -> list[Sync]:
        """Those that wait for a device, of a program that uses one; else all."""
        return [each for each in self.found.values() if not (self.accelerated and each.device.startswith("cpu"))]


def words(name: str, expression: str) -> str:
    """How a wait is told.

    >>> words("_local_scalar_dense", "loss.item()"), words("_local_scalar_dense", "x > 0"), words("cpu", "x.cpu()")
    ('.item()', 'reads a number off a tensor', '.cpu()')
    """
    if not name.startswith("_") and name not in _SAID:
        return {"print": "print of a tensor"}.get(name) or (name if "." in name else f".{name}()")
    call = called(expression)
    if call in ("item", "tolist", "nonzero", "equal", "unique", "masked_select", "allclose", "cpu", "numpy"):
        return f".{call}()" if call not in ("equal", "allclose") else f"torch.{call}"
    if call in ("float", "int", "bool", "print", "range", "math"):
        return f"{call}(tensor)"
    return _SAID.get(name, _READS)
