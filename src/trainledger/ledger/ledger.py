"""The ledger of a step: its entries in the order they run, their sums, and the peak of their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from trainledger.frozen import frozen
from trainledger.ledger.core.arithmetic import summed
from trainledger.ledger.entry import Amounts, Entry, Int, TensorLife
from trainledger.ledger.memory.timeline import Peak, peak


@frozen
class Ledger:
    """The entries of one optimizer step of one device, in the order they run.

    ``resident`` is what is live before the step, by category; ``uncounted`` lists what has no rule, with
    how often it ran; ``parameters`` are distinct trained elements; ``tokens`` pass through in the step.
    ``tensors`` are the pieces of memory one by one, which a full trace tells; ``partial`` is a sentence why a trace
    ended before its step did, empty for a whole one; ``notes`` are what else must be said of it.
    """

    entries: tuple[Entry, ...]
    resident: Amounts = ()
    parameters: Int = 0
    tokens: Int = 0
    micro_batches: Int = 1
    uncounted: tuple[tuple[str, int], ...] = ()
    writer: str = ""
    tensors: tuple[TensorLife, ...] = ()
    partial: str = ""
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        partial = ", partial" if self.partial else ""
        return f"Ledger({len(self.entries)} entries, parameters={self.parameters}, writer={self.writer!r}{partial})"

    def total(self, amount: str) -> Int:
        """The sum of one amount (``flops``, ``read``, ``kept`` …) over all entries, each as often as it runs."""
        _known(amount)
        return summed(
            getattr(each, amount) * each.times if each.loop else getattr(each, amount) for each in self.entries
        )

    @property
    def flops(self) -> Int:
        return self.total("flops")

    @property
    def model_flops(self) -> Int:
        return self.total("model_flops")

    @property
    def matmul_flops(self) -> Int:
        """FLOPs of matmuls and attention kernels, what is called hardware FLOPs; pointwise work left out."""
        return self.filter(lambda each: each.kind in ("matmul", "attention")).flops

    @property
    def kept_nbytes(self) -> Int:
        """Bytes that one micro-batch's forward keeps for its backward."""
        return self.total("kept") // self.micro_batches

    def by(self, key: str, amount: str = "flops") -> dict[str, Int]:
        """One amount split by an attribute of the entries (``phase``, ``kind``, ``basis`` …).

        By ``path`` the blocks of a model are taken together: ``layers.*`` for ``layers.0``, ``layers.1`` …
        """
        _known(key, amount)
        split: dict[str, Int] = {}
        for each in self.entries:
            label = getattr(each, key)
            if key == "path":
                label = ".".join("*" if part.isdigit() else part for part in label.split("."))
            split[label] = split.get(label, 0) + getattr(each, amount) * each.times
        return split

    def diff(self, other: Ledger, key: str = "kind", amount: str = "flops") -> dict[str, Int]:
        """This ledger's amount less the other's, by an attribute of the entries; what is equal is left out."""
        mine, theirs = self.by(key, amount), other.by(key, amount)
        differences = {each: mine.get(each, 0) - theirs.get(each, 0) for each in {**mine, **theirs}}
        return {label: rest for label, rest in differences.items() if _differs(rest)}

    def peak(self) -> Peak:
        """The most bytes live at once, by category, and the entry that runs then."""
        return peak(self)

    def filter(self, keep: Callable[[Entry], bool]) -> Ledger:
        """The same ledger with the entries that ``keep`` accepts."""
        return self._with(each for each in self.entries if keep(each))

    def __add__(self, other: Ledger) -> Ledger:
        return self._with((*self.entries, *other.entries))

    def _with(self, entries: Iterable[Entry]) -> Ledger:
        return replace(self, entries=tuple(entries))


def summary(ledger: Ledger, peak: Peak | None = None) -> dict[str, Any]:
    """What a step's ledger says, under the names that forecasts and measurements give it; its ``peak`` if known."""
    peak = peak or ledger.peak()
    kept = ledger.filter(lambda each: bool(each.kept)).by("kind", "kept")
    return {
        "parameters": ledger.parameters,
        "tokens_per_step": ledger.tokens,
        "flops": {kind: flops for kind, flops in ledger.by("kind").items() if flops},
        "model_flops": ledger.model_flops,
        "kept_nbytes": ledger.kept_nbytes,
        "kept_by_kind": {kind: nbytes // ledger.micro_batches for kind, nbytes in kept.items()},
        "peak_nbytes": peak.nbytes,
        "peak_by_category": dict(peak.by_category),
    }


def _known(*names: str) -> None:
    known = Entry.__dataclass_fields__
    for name in names:
        if name not in known:
            raise ValueError(f"an entry has no {name!r}; it has {', '.join(known)}")


def _differs(difference: Int) -> bool:
    different = difference != 0
    return bool(different.any()) if hasattr(different, "any") else bool(different)
