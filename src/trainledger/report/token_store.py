"""The document of a token store: its files, splits and shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainledger.document import Code, Document, Table, section, sections
from trainledger.units import format_nbytes

if TYPE_CHECKING:
    from trainledger.data import TokenStore


def document(store: TokenStore, seq_len: int, *, verified: bool = False, first_batch: Sequence[str] = ()) -> Document:
    """What a store holds, and the sequences of ``first_batch`` as text; ``verified``: every SHA-256 was compared."""
    data = _data(store, seq_len) | ({"verified": True} if verified else {})
    if first_batch:
        data["first_batch"] = list(first_batch)
    source = f"{data['files']} files of {format_nbytes(data['corpus_nbytes'])}, tokenizer {data['tokenizer']}"
    rows = tuple(
        (
            name,
            str(each["documents"]),
            each["tokens"],
            each["text_nbytes"],
            f"{each['bytes_per_token']:.3f}",
            str(each["sequences"]),
        )
        for name, each in data["splits"].items()
    )
    columns = ("", "documents", "tokens", "text", "bytes/token", f"sequences of {seq_len}")
    table = Table("splits", columns, rows, units=("", "", "count", "nbytes"), align="lrrrrr")
    return Document(
        "The corpus as tokens",
        sections(
            f"{source}, vocabulary {data['vocab_size']}",
            table,
            _remarks(data),
            *(section(f"--- step 0, sequence {at} ---", Code(each)) for at, each in enumerate(first_batch)),
        ),
        data=lambda: data,
    )


def _remarks(data: dict[str, Any]) -> Iterator[str]:
    entropy = data["unigram_entropy_nats"]
    yield f"A model that knows only token frequencies has a loss of {entropy:.4f} nats on the validation tokens."
    yield f"{data['shards']} shards of {data['dtype']} in {data['directory']}"
    if data["repaired_documents"]:
        count, first = data["repaired_documents"], data["first_repaired"]
        yield f"{count} documents have bytes that are not UTF-8, which became U+FFFD, first at {first}"
    if data["skipped_binary_files"]:
        yield f"{data['skipped_binary_files']} binary files in the corpus' directories were left out"
    if data.get("verified"):
        yield "every file has its recorded SHA-256"


def _data(store: TokenStore, seq_len: int) -> dict[str, Any]:
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
