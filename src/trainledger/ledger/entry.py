"""One noun: an entry of the ledger, and the ledger itself.

Closed form, trace and measurement all write this shape; every report reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainledger.frozen import frozen

if TYPE_CHECKING:
    from trainledger.ledger.tensors import TensorLife
    from trainledger.ledger.timeline import Peak

Int = Any  # int for one run, an array for many at once, a sympy expression for a formula

PHASES = ("data", "forward", "recompute", "backward", "clip", "optimizer", "collective", "other")
KINDS = (
    "matmul", "attention", "elementwise", "norm", "softmax", "embedding", "reduction", "copy", "allocate", "random",
    "update", "transfer", "collective", "unknown",
)  # fmt: skip
CATEGORIES = (
    "parameters", "frozen weights", "gradients", "optimizer state", "activations", "logits and loss", "scratch",
    "buffers", "batch",
    "communication",
)  # fmt: skip
HOST = "host"  # what was moved to host memory: no part of the device's
BASES = ("exact", "bound", "assumed", "measured")

Amounts = tuple[tuple[str, Int], ...]  # (category, nbytes) pairs


@frozen
class Entry:
    """One operation: what it computes, moves, keeps, and what it does to memory.

    ``flops`` counts 2 per multiply-add and 1 per element of pointwise work; ``model_flops`` is its part in
    the model's own cost (matmuls and attention of forward and backward, recomputation left out).
    ``kept`` are bytes it creates that a later phase reads; ``scratch`` lives only while it runs.
    ``allocated`` and ``freed`` move the live bytes by category: allocated before it runs, freed after.
    ``dtype`` is the format a matmul's inputs have, which decides the peak it runs against, and ``shape`` its sizes
    (batch, m, n, k) of [m, k] @ [k, n], which decide how much of that it reaches; those of a fused attention are
    (sequences x heads, queries, keys, width of keys, width of values, 1 where a kernel knows that it is causal, else
    0). The shapes of other kinds are empty. ``fused`` is there where the run compiles its blocks and a compiler can
    make one kernel of this operation and others (`ledger.compiled`): the bytes that it then reads and writes outside of
    that kernel, and how many kernels it begins (1 for the first operation of one, else 0).
    ``loop`` says which loops it runs in, outermost first, as (name, count) pairs. ``payload``, ``group``
    and ``ranks`` are the bytes of a collective, the mesh axes it goes over and how many ranks those have; the bytes are
    those of the whole message as NCCL's tests count them: of all that is reduced, of what an all-gather makes, of what
    a reduce-scatter or an all-to-all reads, of what one rank sends to one other. ``overlap`` says beside what it can
    run: ``compute``, or nothing (what comes next waits for it). ``seconds`` is known only where it was measured.
    ``source`` is the rule it comes from, ``line`` the user's code that caused it ("file:line"; in backward the forward
    operation's), which only a traced step has.
    """

    name: str
    path: str
    phase: str
    kind: str
    flops: Int = 0
    model_flops: Int = 0
    read: Int = 0
    written: Int = 0
    kept: Int = 0
    scratch: Int = 0
    allocated: Amounts = ()
    freed: Amounts = ()
    dtype: str = ""
    shape: tuple[Int, ...] = ()
    fused: tuple[Int, ...] = ()
    loop: tuple[tuple[str, Int], ...] = ()
    payload: Int = 0
    group: str = ""
    ranks: Int = 1
    overlap: str = ""
    seconds: float | None = None
    basis: str = "exact"
    source: str = ""
    line: str = ""

    @property
    def times(self) -> Int:
        """How often it runs in one optimizer step."""
        times: Int = 1
        for _, count in self.loop:
            times = times * count
        return times


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
        from trainledger.ledger.timeline import peak

        return peak(self)

    def filter(self, keep: Callable[[Entry], bool]) -> Ledger:
        """The same ledger with the entries that ``keep`` accepts."""
        return self._with(each for each in self.entries if keep(each))

    def __add__(self, other: Ledger) -> Ledger:
        return self._with((*self.entries, *other.entries))

    def _with(self, entries: Iterable[Entry]) -> Ledger:
        return replace(self, entries=tuple(entries))


def _known(*names: str) -> None:
    known = Entry.__dataclass_fields__
    for name in names:
        if name not in known:
            raise ValueError(f"an entry has no {name!r}; it has {', '.join(known)}")


def summed(amounts: Iterable[Int]) -> Int:
    """The sum of amounts, those that are known to be zero left out: of large arrays each addition takes time."""
    total: Int = 0
    for each in amounts:
        if isinstance(each, int):
            total = total + each if each else total
        else:
            total = each if isinstance(total, int) and total == 0 else total + each
    return total


def _differs(difference: Int) -> bool:
    different = difference != 0
    return bool(different.any()) if hasattr(different, "any") else bool(different)
