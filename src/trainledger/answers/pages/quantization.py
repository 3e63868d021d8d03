"""The document of a quantized checkpoint: its bytes before and after, and what it has cost in loss and perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainledger.report.document import Document, Facts, Table, section, sections
from trainledger.spec.units import format_count

if TYPE_CHECKING:
    from trainledger.engine.data.losses import PairedLosses


def page(paired_losses: PairedLosses, nbytes: Mapping[str, int], asked: Mapping[str, Any]) -> Document:
    """Sizes, losses on the same documents, and their difference with its standard error.

    ``nbytes`` has before, after, codes, scales and whole; ``asked`` directory, weights, format, bits, group_size,
    matrices, dtype, text, context and stride.
    """
    error = paired_losses.standard_error
    margin = "" if error is None else f", standard error {error:.4f} of paired documents"
    shared = "row" if asked["group_size"] is None else f"{asked['group_size']} weights of a row"
    change = math.exp(paired_losses.nats_per_token) - 1
    facts = Facts(
        (
            ("written", f"{asked['directory']}"),
            ("from", f"{asked['weights']}"),
            ("format", f"{asked['format']}: {asked['bits']}-bit integers, a 16-bit scale per {shared}"),
            ("quantized", f"{asked['matrices']} matrices of the blocks' linear layers and experts"),
            ("not", f"embeddings, head, routers, norms and biases: {asked['dtype']}"),
            ("perplexity", f"{100 * change:+.2f} %"),
            ("loss", f"{paired_losses.nats_per_token:+.4f} nats per token{margin}"),
            ("text", f"{asked['text']}: {len(paired_losses.before.documents):,} documents,"),
            ("", f"{format_count(paired_losses.before.tokens)} tokens in windows of {asked['context']}"),
        )
    )
    losses = Table(
        "losses",
        ("", "nats per token", "perplexity"),
        tuple(
            (name, f"{each.nats_per_token:.4f}", f"{each.perplexity:.4g}")
            for name, each in (("before", paired_losses.before), ("after", paired_losses.after))
        ),
        align="lrr",
    )
    sizes = Table(
        "sizes",
        ("weights", "bytes", ""),
        (
            ("before, in fp32", nbytes["before"], None),
            ("codes", nbytes["codes"], None),
            ("scales", nbytes["scales"], None),
            (f"in {asked['dtype']}", nbytes["whole"], None),
            ("after", nbytes["after"], f"{nbytes['after'] / nbytes['before']:.3f} of before"),
        ),
        units=("", "nbytes"),
    )
    return Document(
        "Quantized checkpoint",
        sections(facts, section("Loss on the same documents", losses), section("Size", sizes)),
        data=lambda: _data(paired_losses, nbytes, asked),
    )


def _data(losses: PairedLosses, nbytes: Mapping[str, int], asked: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **asked,
        "before_nbytes": nbytes["before"],
        "after_nbytes": nbytes["after"],
        "codes_nbytes": nbytes["codes"],
        "scales_nbytes": nbytes["scales"],
        "whole_nbytes": nbytes["whole"],
        "before_perplexity": losses.before.perplexity,
        "after_perplexity": losses.after.perplexity,
        "nats_per_token_change": losses.nats_per_token,
        "standard_error": losses.standard_error,
        "tokens": losses.before.tokens,
        "documents": [
            {"place": before.place, "tokens": before.tokens, "before_nats": before.nats, "after_nats": after.nats}
            for before, after in zip(losses.before.documents, losses.after.documents, strict=True)
        ],
    }
