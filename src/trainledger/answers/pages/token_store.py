"""The document of a run's token stores: their files, splits and shards, and how often the run goes through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainledger.report.document import Code, Document, Table, section, sections
from trainledger.spec.recipe import Recipe
from trainledger.spec.units import format_nbytes, format_percent

if TYPE_CHECKING:
    from trainledger.engine.data.mixture import Mixture
    from trainledger.engine.data.store import TokenStore


def page(mixture: Mixture, recipe: Recipe, *, verified: bool = False, first_batch: Sequence[str] = ()) -> Document:
    """What the stores hold, and the sequences of ``first_batch`` as text; ``verified``: every SHA-256 was compared."""
    data = _data(mixture, recipe) | ({"verified": True} if verified else {})
    if first_batch:
        data["first_batch"] = list(first_batch)
    sources = data.get("sources", {"": data})
    columns = ("", "documents", "tokens", "text", "bytes/token", f"sequences of {recipe.seq_len}", "epochs")
    table = Table("splits", columns, tuple(_rows(sources)), units=("", "", "count", "nbytes"), align="lrrrrrr")
    return Document(
        "The corpus as tokens",
        sections(
            tuple(_made_of(sources)),
            table,
            _remarks(data, sources),
            *(section(f"--- step 0, sequence {at} ---", Code(each)) for at, each in enumerate(first_batch)),
        ),
        data=lambda: data,
    )


def _rows(sources: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    for source, facts in sources.items():
        for name, fact in facts["splits"].items():
            yield (
                f"{source} {name}".lstrip(),
                str(fact["documents"]),
                fact["tokens"],
                fact["text_nbytes"],
                f"{fact['bytes_per_token']:.3f}",
                str(fact["sequences"]),
                f"{facts['epochs']:.3g}" if name == "train" else "",
            )


def _made_of(sources: dict[str, Any]) -> Iterator[str]:
    for name, source in sources.items():
        files = f"{source['files']} files of {format_nbytes(source['corpus_nbytes'])}"
        said = f"{name}, {format_percent(source['share'])} of the sequences: {files}" if name else files
        yield f"{said}, tokenizer {source['tokenizer']}, vocabulary {source['vocab_size']}"


def _remarks(data: dict[str, Any], sources: dict[str, Any]) -> Iterator[str]:
    entropy = data["unigram_entropy_nats"]
    yield f"A model that knows only token frequencies has a loss of {entropy:.4f} nats on the validation tokens."
    for source in sources.values():
        yield f"{source['shards']} shards of {source['dtype']} in {source['directory']}"
        if source["repaired_documents"]:
            count, first = source["repaired_documents"], source["first_repaired"]
            yield f"{count} documents have bytes that are not UTF-8, which became U+FFFD, first at {first}"
        if source["skipped_binary_files"]:
            yield f"{source['skipped_binary_files']} binary files in the corpus' directories were left out"
    if data.get("verified"):
        yield "every file has its recorded SHA-256"


def _data(mixture: Mixture, recipe: Recipe) -> dict[str, Any]:
    rows = recipe.total_steps * recipe.global_batch
    epochs = mixture.epochs(rows, seed=recipe.seed, seq_len=recipe.seq_len)
    sources = {
        source.name: _of_store(source.store, recipe.seq_len) | {"share": source.share, "epochs": epochs[source.name]}
        for source in mixture.sources
    }
    if len(sources) == 1:
        return next(iter(sources.values()))
    return {
        "fingerprint": mixture.fingerprint,
        "seq_len": recipe.seq_len,
        "unigram_entropy_nats": mixture.unigram_entropy_nats,
        "sources": sources,
    }


def _of_store(store: TokenStore, seq_len: int) -> dict[str, Any]:
    index = store.index
    splits = {
        split.name: {
            "tokens": split.tokens,
            "documents": split.documents,
            "text_nbytes": split.text_nbytes,
            "bytes_per_token": split.bytes_per_token,
            "sequences": split.sequences(seq_len),
        }
        for split in (store.train, store.validation)
    }
    return {
        "directory": str(store.directory),
        "fingerprint": store.fingerprint,
        "files": len(index["corpus"]["files"]),
        "corpus_nbytes": index["corpus"]["nbytes"],
        "skipped_binary_files": len(index["corpus"]["skipped"]),
        "repaired_documents": index["repaired"],
        "first_repaired": index["first_repaired"],
        "tokenizer": index["tokenizer"]["name"],
        "vocab_size": store.vocab_size,
        "seq_len": seq_len,
        "unigram_entropy_nats": store.unigram_entropy_nats,
        "shards": len(index["shards"]),
        "dtype": index["dtype"],
        "splits": splits,
    }
