"""A step's ledger in a few figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainledger.ledger.entry import Ledger

if TYPE_CHECKING:
    from trainledger.ledger.timeline import Peak


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
