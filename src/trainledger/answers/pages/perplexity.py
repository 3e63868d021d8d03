"""The document of a model's loss on documents: the whole, and those that the model knows least of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainledger.report.document import Document, Facts, Table, section, sections
from trainledger.spec.units import format_count, format_nbytes

if TYPE_CHECKING:
    from trainledger.engine.data.losses import Losses

SHOWN = 5


def page(losses: Losses, asked: Mapping[str, Any]) -> Document:
    """Loss, perplexity and bits per byte of all documents, and the documents with the highest loss per token.

    ``asked`` has context, stride, dtype, weights and text; JSON has every document.
    """
    error = losses.standard_error
    margin = "" if error is None else f" (standard error {error:.4f}, documents drawn alike)"
    facts = Facts(
        (
            ("loss", f"{losses.nats_per_token:.4f} nats per token{margin}"),
            ("perplexity", f"{losses.perplexity:.4g} per token"),
            ("bits per byte", f"{losses.bits_per_byte:.4f}, which does not depend on the tokenizer"),
            ("text", f"{asked['text']}: {len(losses.documents):,} documents, {format_count(losses.tokens)} tokens,"),
            ("", f"{format_nbytes(losses.text_nbytes)}"),
            ("windows", f"{asked['context']} tokens, {asked['stride']} of them predicted in each but the first"),
            ("weights", f"{asked['weights']} in {asked['dtype']}"),
        )
    )
    hardest = sorted(losses.documents, key=lambda document: document.nats / document.tokens, reverse=True)[:SHOWN]
    rows = tuple(
        (loss.place, loss.tokens, f"{loss.nats / loss.tokens:.4f}", f"{loss.perplexity:.4g}") for loss in hardest
    )
    columns = ("document", "tokens", "nats per token", "perplexity")
    table = Table("documents", columns, rows, units=("", "integer"), align="lrrr")
    return Document(
        "Loss on documents",
        sections(facts, _sources(losses), section("Documents with the highest loss per token", table)),
        data=lambda: _data(losses, asked),
    )


def _sources(losses: Losses) -> Table | None:
    """The loss on each source of a mixture."""
    by_source = losses.by_source
    if len(by_source) < 2:
        return None
    rows = tuple(
        (name, str(len(each.documents)), each.tokens, f"{each.nats_per_token:.4f}", f"{each.perplexity:.4g}",
         f"{each.bits_per_byte:.4f}")
        for name, each in by_source.items()
    )  # fmt: skip
    columns = ("source", "documents", "tokens", "nats per token", "perplexity", "bits per byte")
    return Table("sources", columns, rows, units=("", "", "integer"), align="lrrrrr")


def _figures(losses: Losses) -> dict[str, Any]:
    names = ("nats_per_token", "standard_error", "perplexity", "bits_per_byte", "tokens", "text_nbytes")
    return {name: getattr(losses, name) for name in names}


def _data(losses: Losses, asked: Mapping[str, Any]) -> dict[str, Any]:
    by_source = losses.by_source
    sources = {name: _figures(each) for name, each in by_source.items()} if len(by_source) > 1 else {}
    return {
        **_figures(losses),
        **({"sources": sources} if sources else {}),
        **asked,
        "documents": [vars(document) | {"perplexity": document.perplexity} for document in losses.documents],
    }
