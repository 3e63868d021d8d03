"""The distinct ranks of a spread run in figures, as a plan prints them."""

from __future__ import annotations

from typing import Any

from trainledger.ledger.ranks import RankAccount


def rank_facts(rank: RankAccount) -> dict[str, Any]:
    """A rank in figures: its place, its memory, its FLOPs, and the bytes of its collectives by axis and kind."""
    peak = rank.ledger.peak()
    sent: dict[str, int] = {}
    for each in rank.ledger:
        if each.kind == "collective" and each.payload:
            key = f"{each.name} over {each.group}"
            sent[key] = sent.get(key, 0) + each.payload * each.times
    return {
        "title": rank.title, "count": rank.count, "stage": rank.stage, "place": rank.place, "layers": rank.layers,
        "in_flight": rank.in_flight, "parameters": rank.ledger.parameters, "model_flops": rank.ledger.model_flops,
        "peak_nbytes": peak.nbytes, "peak_by_category": peak.by_category,
        "peak_at": f"{peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}",
        "payload_nbytes": sent,
    }  # fmt: skip
