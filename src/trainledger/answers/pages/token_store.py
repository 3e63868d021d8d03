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
        for name, each in facts["splits"].items():
            yield (
                f"{source} {name}".lstrip(),
                str(each["documents"]),
                each["tokens"],
                each["text_nbytes"],
                f"{each['bytes_per_token']:.3f}",
                str(each["sequences"]),
                f"{facts['epochs']:.3g}" if name == "train" else "",
            )


def _made_of(sources: dict[str, Any]) -> Iterator[str]:
    for name, each in sources.items():
        files = f"{each['files']} files of {format_nbytes(each['corpus_nbytes'])}"
        said = f"{name}, {format_percent(each['share'])} of the sequences: {files}" if name else files
        yield f"{said}, tokenizer {each['tokenizer']}, vocabulary {each['vocab_size']}"


def _remarks(data: dict[str, Any], sources: dict[str, Any]) -> Iterator[str]:
    entropy = data["unigram_entropy_nats"]
    yield f"A model that knows only token frequencies has a loss of {entropy:.4f} nats on the validation tokens."
    for each in sources.values():
        yield f"{each['shards']} shards of {each['dtype']} in {each['directory']}"
        if each["repaired_documents"]:
            count, first = each["repaired_documents"], each["first_repaired"]
            yield f"{count} documents have bytes that are not UTF-8, which became U+FFFD, first at {first}"
        if each["skipped_binary_files"]:
            yield f"{each['skipped_binary_files']} binary files in the corpus' directories were left out"
    if data.get("verified"):
        yield "every file has its recorded SHA-256"


def _data(mixture: Mixture, recipe: Recipe) -> dict[str, Any]:
    rows = recipe.total_steps * recipe.global_batch
    epochs = mixture.epochs(rows, seed=recipe.seed, seq_len=recipe.seq_len)
    sources = {
        each.name: _of_store(each.store, recipe.seq_len) | {"share": each.share, "epochs": epochs[each.name]}
        for each in mixture.sources
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
        each.name: {
            "tokens": each.tokens,
            "documents": each.documents,
            "text_nbytes": each.text_nbytes,
            "bytes_per_token": each.bytes_per_token,
            "sequences": each.sequences(seq_len),
        }
        for each in (store.train, store.validation)
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
