"""The texts that a BPE is trained on: a bounded part of a corpus, from all over it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from trainledger.data.document import Segment
from trainledger.data.documents import documents, held_out
from trainledger.units import KIB, MIB

SAMPLE_CHARACTERS = 16 * MIB
SMALLEST_SHARE = 64 * KIB


def sample_texts(
    segments: Sequence[Segment],
    text_field: str,
    validation_fraction: float,
    characters: int = SAMPLE_CHARACTERS,
) -> Iterator[str]:
    """Texts that are not held out, together at most ``characters``: all of a corpus that is no larger, else an
    equal share from the beginning of each segment, the segments taken in an order shuffled by a fixed key."""
    total = sum(each.file_nbytes for each in {each.path: each for each in segments}.values())
    complete = total <= characters and not any(each.compression or each.kind == "parquet" for each in segments)
    share = characters if complete else max(characters // len(segments), SMALLEST_SHARE)
    order = range(len(segments)) if complete else sorted(range(len(segments)), key=_shuffled)
    left = characters
    for number in order:
        taken = 0
        for document in documents(segments[number], text_field):
            if held_out(document.text.encode(), validation_fraction):
                continue
            text = document.text[: min(left, share - taken)]
            yield text
            taken += len(text)
            left -= len(text)
            if left <= 0:
                return
            if taken >= share:
                break


def _shuffled(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=b"trainledger: sample").digest()
