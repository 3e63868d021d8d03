"""The document of a run's token stores: their files, splits and shards, and how often the run goes through them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainledger.answers.pages.plain_data import plain
from trainledger.report.document import Code, Document, Table, section, sections
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.units import counted, format_nbytes, format_percent

if TYPE_CHECKING:
    from trainledger.engine.data.lengths import Lengths
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
            _lengths_table(sources),
            *_padding_table(data, recipe),
            _remarks(data, sources),
            *(section(f"--- step 0, sequence {at} ---", Code(each)) for at, each in enumerate(first_batch)),
        ),
        data=lambda: data,
    )


def _rows(sources: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    for source, facts in sources.items():
        for name, fact in facts["splits"].items():
            if not fact["documents"]:
                continue
            yield (
                f"{source} {name}".lstrip(),
                str(fact["documents"]),
                fact["tokens"],
                fact["text_nbytes"],
                f"{fact['bytes_per_token']:.3f}",
                str(fact["sequences"]),
                f"{facts['epochs']:.3g}" if name == "train" else "",
            )


def _lengths_table(sources: dict[str, Any]) -> Table:
    """Tokens of documents: who trains them one in a row cuts and pads them."""
    rows = (
        (name or "a document", *(f"{value:.1f}" if of == "mean" else value for of, value in source["lengths"].items()))
        for name, source in sources.items()
    )
    columns = ("tokens", "shortest", "median", "90 %", "99 %", "longest", "mean", "cut at seq_len")
    units = ("", *["integer"] * 5, "", "share")
    return Table("lengths", columns, tuple(rows), units=units, align="lrrrrrrr")


def _padding_table(data: dict[str, Any], recipe: Recipe) -> Iterator[Table | str]:
    """An epoch by how documents become rows; of one source, as a mixture draws its own."""
    if "padding" not in data:
        return
    cost = data["padding"]
    kinds = {
        "packed, as train does": cost["tokens"],
        "padded, sorted by length": cost["sorted"],
        "padded, shuffled": cost["shuffled"],
        f"padded to {recipe.seq_len:,}": cost["fixed"],
    }
    rows = tuple((kind, round(tokens), 1 - cost["tokens"] / tokens) for kind, tokens in kinds.items())
    title = f"{counted(cost['micro_batch'], 'document')}, cut at {recipe.seq_len:,}"
    yield Table(
        "padding", (title, "tokens computed", "of that padding"), rows, units=("", "count", "share"), align="lrr"
    )
    yield (
        f"Of shuffled micro-batches nine in ten are padded to {cost['usual']:,} tokens or fewer; the heaviest, padded "
        f"to {cost['largest']:,}, decides whether memory is enough."
    )


def _made_of(sources: dict[str, Any]) -> Iterator[str]:
    for name, source in sources.items():
        files = f"{counted(source['files'], 'file')} of {format_nbytes(source['corpus_nbytes'])}"
        said = f"{name}, {format_percent(source['share'])} of the sequences: {files}" if name else files
        yield f"{said}, tokenizer {source['tokenizer']}, vocabulary {source['vocab_size']}"


def _remarks(data: dict[str, Any], sources: dict[str, Any]) -> Iterator[str]:
    if entropy := data["unigram_entropy_nats"]:
        yield f"A model that knows only token frequencies has a loss of {entropy:.4f} nats on the validation tokens."
    for source in sources.values():
        yield f"{counted(source['shards'], 'shard')} of {source['dtype']} in {source['directory']}"
        if source["repaired_documents"]:
            count, first = source["repaired_documents"], source["first_repaired"]
            yield f"{count} documents have bytes that are not UTF-8, which became U+FFFD, first at {first}"
        if source["skipped_binary_files"]:
            yield f"{source['skipped_binary_files']} binary files in the corpus' directories were left out"
    if data.get("verified"):
        yield "every file has its recorded SHA-256"


def _data(mixture: Mixture, recipe: Recipe) -> dict[str, Any]:
    from trainledger.engine.data.lengths import document_lengths, padding

    rows = recipe.total_steps * recipe.global_batch
    lengths = {source.name: document_lengths(source.store.train) for source in mixture.sources}
    epochs = mixture.epochs(rows, seed=recipe.seed, seq_len=recipe.seq_len)
    sources = {
        source.name: _of_store(source.store, recipe.seq_len, lengths[source.name])
        | {"share": source.share, "epochs": epochs[source.name]}
        for source in mixture.sources
    }
    if len(sources) == 1:
        ((name, data),) = sources.items()
        of_rows = padding(lengths[name], recipe.seq_len, recipe.micro_batch or recipe.global_batch)
        return data | {"padding": plain(of_rows)}
    return {
        "fingerprint": mixture.fingerprint,
        "seq_len": recipe.seq_len,
        "unigram_entropy_nats": mixture.unigram_entropy_nats,
        "sources": sources,
    }


def keep_lengths(mixture: Mixture, path: str) -> None:
    """Write how long the documents of a text are, as ``data.lengths`` reads it; raises InvalidInput."""
    from trainledger.engine.data.lengths import binned, document_lengths

    if len(mixture.sources) > 1:
        rule = "are of one text, and data.mixture has several"
        raise InvalidInput([Problem("lengths", path, rule, "--set data.path=FILE")])
    store = mixture.sources[0].store
    counted = {"tokenizer": store.index["tokenizer"]["name"], "lengths": binned(document_lengths(store.train))}
    replace_file(path, f"{json.dumps(counted)}\n".encode())


def _of_store(store: TokenStore, seq_len: int, lengths: Lengths) -> dict[str, Any]:
    from trainledger.engine.data.lengths import quantile

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
        "lengths": {
            "shortest": int(lengths[0]),
            **{f"{share:.0%}": quantile(lengths, share) for share in (0.5, 0.9, 0.99)},
            "longest": int(lengths[-1]),
            "mean": float(lengths.mean()),
            "over_seq_len": float((lengths > seq_len).mean()),
        },
    }
