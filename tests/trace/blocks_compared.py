"""Two ledgers of one step, of which one has loops: equal operation by operation."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from agreement import live_nbytes, unrolled

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger

AMOUNTS = ("flops", "model_flops", "read", "written", "kept", "scratch")


def same_ledger(once: Ledger, whole: Ledger) -> None:
    """That a ledger is multiplied and yet the whole one, as integers, in every total and at every moment."""
    assert any(each.loop for each in once), once.notes
    assert not any(each.loop for each in whole)
    assert len(once) < len(whole)
    assert once.parameters == whole.parameters
    assert sorted(once.resident) == sorted(whole.resident)
    assert once.uncounted == whole.uncounted
    assert (once.tokens, once.micro_batches, once.partial) == (whole.tokens, whole.micro_batches, whole.partial)
    assert sum(each.times for each in once) == len(whole)
    for amount in AMOUNTS:
        for key in ("phase", "kind", "basis", "line", "dtype", "path"):
            assert once.by(key, amount) == whole.by(key, amount)
    assert once.kept_nbytes == whole.kept_nbytes
    assert once.peak().nbytes == whole.peak().nbytes
    assert once.peak().by_category == whole.peak().by_category
    assert live_nbytes(once) == live_nbytes(whole)
    ours, theirs = [facts(each) for each in unrolled(once)], [facts(each) for each in whole]
    assert ours == theirs


def facts(entry: Entry) -> Any:
    path = re.sub(r"\b\d+\b", "*", entry.path)
    return replace(entry, path=path, loop=(), allocated=tuple(sorted(entry.allocated)), freed=nonzero(entry.freed))


def nonzero(amounts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(each for each in amounts if each[1]))
