"""The peak as a function of one size: which moment of the step is the highest where, and the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from trainledger.forecast.explain.symbols import expanded, formula, rounded_up, smallest, symbolic
from trainledger.forecast.plan.edges import last_holding
from trainledger.ledger.memory.timeline import Moment, timeline
from trainledger.spec.frozen import frozen
from trainledger.spec.run import Run

LARGEST = 2**40  # beyond every size of a run


@frozen
class Piece:
    """From ``first`` to ``last`` (None: for ever) the peak is this formula, reached at this operation."""

    first: int
    last: int | None
    formula: str
    at: str
    by_category: dict[str, str]


@frozen
class Envelope:
    """The peak over one size, and the largest that fits in ``memory_nbytes``: 0: not even one, None: none given.

    ``most`` is what the run's own rules allow, memory aside; None where they set no bound. ``whole`` adds up all
    categories as if all of them were alive at once; of these ``absent`` are not alive at the peak of the largest sizes,
    which has ``beside`` them what they do not count: scratch, and gradients of logits.
    """

    symbol: str
    exact_from: int
    pieces: tuple[Piece, ...]
    memory_nbytes: int | None
    largest: int | None
    nbytes_at_largest: int | None
    categories: dict[str, str]
    whole: str
    absent: dict[str, str]
    beside: dict[str, str]
    most: int | None = None


def envelope(
    run: Run,
    name: str,
    *,
    backend: str = "cpu",
    memory_nbytes: int | None = None,
    stage: int = 0,
    holds: Callable[[int], bool] | None = None,
) -> Envelope:
    """The peak of a run as formulas in one size, all others at the run's numbers.

    ``holds`` says whether a peak of so many bytes fits; absent, one of at most ``memory_nbytes`` does.
    ``name`` is a letter of `symbols.FREE`. The formulas hold from two on; a size of one may run other operations.
    Raises `InvalidInput` where the run has no such size.
    """
    found = symbolic(run, backend=backend, only=[name], stage=stage)
    (symbol,) = found.values
    moments, sums = _distinct(timeline(found.ledger))
    counts = [_counter(each, symbol) for each in sums]

    def highest(size: int) -> tuple[int, Moment]:
        sizes = [(count(size), -index) for index, count in enumerate(counts)]
        nbytes, index = max(sizes)
        return nbytes, moments[-index]

    exact_from = smallest(run, name) + 1
    least = 1 if exact_from == 2 else exact_from
    pieces = _pieces(highest, _shown, least)
    fits = holds or (lambda nbytes: memory_nbytes is None or nbytes <= memory_nbytes)
    largest = None
    if memory_nbytes is not None:
        largest = last_holding(lambda size: fits(highest(size)[0]), LARGEST, least, least) or 0
    amounts, (_, last) = _categories(found), highest(LARGEST - 1)
    more = {name: expanded(last.live.get(name, 0) - amounts.get(name, 0)) for name in [*amounts, *last.live]}
    grows = {category: _counter(nbytes, symbol)(LARGEST) for category, nbytes in more.items()}
    several = f" of each of {found.ledger.micro_batches} micro-batches" if found.ledger.micro_batches != 1 else ""
    return Envelope(
        symbol=name,
        exact_from=exact_from,
        pieces=tuple(pieces),
        memory_nbytes=memory_nbytes,
        largest=largest,
        nbytes_at_largest=highest(largest)[0] if largest else None,
        categories={
            f"{category}{several if category in _KEPT else ''}": _shown(nbytes) for category, nbytes in amounts.items()
        },
        whole=_shown(expanded(sum(amounts.values()))),
        absent={category: _shown(expanded(-more[category])) for category, nbytes in grows.items() if nbytes < 0},
        beside={category: _shown(more[category]) for category, nbytes in grows.items() if nbytes > 0},
        most=run.model.max_seq_len if name == "T" else None,
    )


_KEPT = ("activations", "logits and loss")


def _categories(found: Any) -> dict[str, Any]:
    """The most bytes of each category in a step, of what forward keeps those of one micro-batch."""
    ledger = found.ledger
    most = {category: expanded(nbytes) for category, nbytes in ledger.resident}
    kept: dict[str, Any] = {}
    gradients = 0
    for each in ledger:
        for category, nbytes in each.allocated:
            if each.phase == "forward" and category in _KEPT:
                kept[category] = kept.get(category, 0) + nbytes * each.times
            elif category == "gradients":
                gradients += nbytes * each.times
    most["gradients"] = expanded(gradients)
    return most | {category: _each(expanded(nbytes), ledger.micro_batches) for category, nbytes in kept.items()}


def _shown(amount: Any) -> str:
    return formula(rounded_up(amount))


def _each(amount: Any, micro_batches: Any) -> Any:
    whole = isinstance(amount, int) and isinstance(micro_batches, int)
    return amount // micro_batches if whole else amount / micro_batches


def _distinct(moments: tuple[Moment, ...]) -> tuple[list[Moment], list[Any]]:
    """One moment for each different formula of the live bytes, and these formulas."""
    seen: dict[Any, Moment] = {}
    for moment in moments:
        seen.setdefault(expanded(moment.nbytes), moment)
    return list(seen.values()), list(seen)


def _pieces(highest: Any, shown: Any, first: int) -> list[Piece]:
    pieces: list[Piece] = []
    _, moment = highest(first)
    while True:
        last = _last_of(highest, first, moment)
        live = {category: shown(expanded(nbytes)) for category, nbytes in moment.live.items() if nbytes != 0}
        at = f"{moment.entry.name} of {moment.entry.path or 'the update'}, {moment.entry.phase}"
        pieces.append(Piece(first, last, shown(expanded(moment.nbytes)), at, live))
        if last is None:
            return pieces
        first = last + 1
        _, moment = highest(first)


def _last_of(highest: Any, first: int, moment: Moment) -> int | None:
    """The last size from ``first`` on at which this moment is the highest; None where it stays so."""
    last = last_holding(lambda size: highest(size)[1] is moment, LARGEST, first, first)
    return None if last == LARGEST - 1 else last


def _counter(amount: Any, symbol: Any) -> Callable[[int], int]:
    """The bytes at a size: by Horner's rule where the formula is a polynomial of whole numbers, which most are."""
    if not hasattr(amount, "xreplace"):
        return lambda size: int(amount)
    coefficients = amount.as_poly(symbol).all_coeffs() if amount.is_polynomial(symbol) else []
    if not coefficients or not all(coefficient.is_Integer for coefficient in coefficients):
        return lambda size: int(amount.xreplace({symbol: size}))
    whole = [int(coefficient) for coefficient in coefficients]
    return lambda size: reduce(lambda total, each: total * size + each, whole, 0)
