"""An entry: what one operation of a step computes, moves, keeps and does to memory.

Closed form, trace and measurement all write this shape (`ledger.ledger` puts them together); every report reads it.
"""

from __future__ import annotations

from typing import Any

from trainledger.spec.frozen import frozen

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
    """One operation of a step: its FLOPs, bytes moved, bytes kept, and memory allocated and freed.

    ``flops`` counts 2 per multiply-add and 1 per element of pointwise work; ``model_flops`` are those that
    count as model FLOPs (matmuls and attention of forward and backward, without recomputation).
    ``kept`` are bytes it creates that a later phase reads; ``scratch`` lives only while it runs.
    ``allocated`` and ``freed`` move the live bytes by category: allocated before it runs, freed after.
    ``dtype`` is the format a matmul's inputs have, which decides the peak it runs against, and ``shape`` its sizes
    (batch, m, n, k) of [m, k] @ [k, n], which decide how much of that it reaches; those of a fused attention are
    (sequences x heads, queries, keys, width of keys, width of values, 1 where a kernel knows that it is causal, else
    0). The shapes of other kinds are empty. ``fused`` is there where the run compiles its blocks and a compiler can
    make one kernel of this operation and others (`memory.compiled`): the bytes that it then reads and writes outside of
    that kernel, and how many kernels it begins (1 for the first operation of one, else 0).
    ``loop`` says which loops it runs in, outermost first, as (name, count) pairs. ``payload``, ``group``
    and ``ranks`` are the bytes of a collective, the mesh axes it goes over and how many ranks those have; the bytes are
    those of the whole message as NCCL's tests count them: of all that is reduced, of what an all-gather makes, of what
    a reduce-scatter or an all-to-all reads, of what one rank sends to one other. ``overlap`` says with what it can
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

    def in_loops(self, loop: tuple[tuple[str, Int], ...]) -> Entry:
        """The same operation in other loops.

        >>> Entry("mm", "", "forward", "matmul").in_loops((("layers", 4),)).times
        4
        """
        found = object.__new__(Entry)  # a step has thousands, and the shared ``__init__`` takes most of their time
        vars(found).update(vars(self), loop=loop)
        return found


@frozen
class TensorLife:
    """One piece of memory of a traced step.

    ``born`` is the index of the entry that made it, -1 where it was there before the step; ``died`` that of the
    entry after which it is gone, None where it outlives the step. ``shape`` and ``dtype`` are those of the tensor it
    was made for, ``name`` the parameter's or the operation's, ``line`` the user's code ("file:line").

    >>> life = TensorLife(nbytes=32, category="scratch", name="mm", shape=(2, 4), dtype="fp32", born=3, died=5)
    >>> [life.lives(at) for at in (2, 3, 5, 6)]
    [False, True, True, False]
    """

    nbytes: int
    category: str
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    path: str = ""
    phase: str = ""
    line: str = ""
    born: int = -1
    died: int | None = None

    def lives(self, at: int) -> bool:
        """Whether it is live while the entry with this index runs."""
        return self.born <= at and (self.died is None or at <= self.died)
