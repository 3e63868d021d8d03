"""Memory over one size: its parts, its peak beside the sum of all parts, and the largest size that fits."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.forecast.explain.envelope import Envelope
from trainledger.report.document import Document, sections
from trainledger.spec.run import Run
from trainledger.spec.units import format_nbytes


def envelope_document(run: Run, about: Sequence[str], envelope: Envelope, means: str) -> Document:
    """The peak over one size, its parts as expressions, the sum of all, and the largest size that fits; ``about`` says
    whose memory it is."""
    name = envelope.symbol
    pieces = []
    for piece in envelope.pieces:
        where = f"for all {name}" if len(envelope.pieces) == 1 else _range(name, piece.first, piece.last)
        pieces.append(f"peak = {in_bytes(piece.formula)}   ({where}, at {piece.at})")
    categories = tuple(f"{category} = {in_bytes(formula)}" for category, formula in envelope.categories.items())
    absent = "".join(f" - {category} {in_bytes(formula)}" for category, formula in envelope.absent.items())
    beside = "".join(f" + {category} {in_bytes(formula)}" for category, formula in envelope.beside.items())
    why = "what is subtracted is not alive at that moment, what is added is made for it alone"
    return Document(
        title=f"memory of {run.model.name} over {name}",
        sections=sections(
            *about,
            f"{name}: {means}; from {envelope.exact_from} on. All bytes.",
            categories,
            pieces,
            (
                f"sum = {in_bytes(envelope.whole)}   (all of them at once, as textbooks add them)",
                f"peak = sum{absent}{beside}: {why}",
            ),
            verdict(envelope) if envelope.memory_nbytes is not None else None,
        ),
        data=lambda: {"run": run_data(run), **plain(envelope)},
    )


def in_bytes(formula: str) -> str:
    """A formula in one size as a text in which a letter does not read as the unit.

    >>> in_bytes("9 T^2 + 16384 B - 8"), in_bytes("16,384")
    ('9 x T^2 + 16,384 x B - 8', '16,384')
    """
    times = re.sub(r"(?<=\d) (?=[A-Z(c])", " x ", formula)
    return re.sub(r"(?<![\d,.^])\d{4,}", lambda digits: f"{int(digits[0]):,}", times)


def verdict(envelope: Envelope) -> str:
    """The largest size that fits, as a sentence."""
    memory = format_nbytes(envelope.memory_nbytes or 0)
    if not envelope.largest:
        return f"Not even {envelope.symbol} = {envelope.pieces[0].first} fits in {memory}."
    assert envelope.nbytes_at_largest is not None
    tensors = format_nbytes(envelope.nbytes_at_largest)
    if envelope.most is not None and envelope.largest > envelope.most:
        return f"All {envelope.most:,} positions of the model fit in {memory} ({envelope.largest:,} would)."
    return f"So at most {envelope.symbol} = {envelope.largest:,} in {memory}: {tensors} of tensors."


def _range(name: str, first: int, last: int | None) -> str:
    if last is None:
        return f"{name} >= {first}"
    return f"{name} = {first}" if first == last else f"{first} <= {name} <= {last}"
