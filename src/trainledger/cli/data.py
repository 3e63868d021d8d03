"""Tokenize the corpus of a run file, or find it tokenized, and say what is in it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import add_json, add_run, load_run, print_json
from trainledger.report.table import table
from trainledger.units import format_count, format_nbytes

if TYPE_CHECKING:
    from trainledger.data import TokenStore
    from trainledger.spec.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)
    parser.add_argument("--verify", action="store_true", help="read every file again and compare its SHA-256")
    parser.add_argument("--show", action="store_true", help="print the first sequences of the first batch as text")


def execute(args: argparse.Namespace) -> int:
    from trainledger.data import check_lengths, check_vocabulary, prepare

    run = load_run(args)
    store = prepare(run.data, vocab_size=run.model.vocab_size, progress=not args.json)
    check_vocabulary(store, run.model.vocab_size)
    check_lengths(store, run.recipe.seq_len)
    if args.verify:
        store.verify()
    told = summary(store, run.recipe.seq_len)
    if args.verify:
        told["verified"] = True
    if args.show:
        told["first_batch"] = _first_batch(store, run)
    if args.json:
        print_json(told)
    else:
        print(text(told))
    return 0


def summary(store: TokenStore, seq_len: int) -> dict[str, Any]:
    """What a store holds, for programs."""
    index = store.index
    splits = {
        each.name: {
            "tokens": each.tokens, "documents": each.documents, "text_nbytes": each.text_nbytes,
            "bytes_per_token": each.bytes_per_token, "sequences": each.sequences(seq_len),
        }
        for each in (store.train, store.validation)
    }  # fmt: skip
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


def text(told: dict[str, Any]) -> str:
    """The summary for a terminal of 80 columns."""
    rows = [
        [name, each["documents"], format_count(each["tokens"]), format_nbytes(each["text_nbytes"]),
         f"{each['bytes_per_token']:.3f}", each["sequences"]]
        for name, each in told["splits"].items()
    ]  # fmt: skip
    head = ["", "documents", "tokens", "text", "bytes/token", f"sequences of {told['seq_len']}"]
    lines = [
        f"{told['files']} files of {format_nbytes(told['corpus_nbytes'])}, tokenizer {told['tokenizer']}, "
        f"vocabulary {told['vocab_size']}",
        "",
        table(head, rows, align="lrrrrr"),
        "",
        f"A model that knows only how often each token occurs has a loss of {told['unigram_entropy_nats']:.4f} nats",
        "on the validation tokens.",
        f"{told['shards']} shards of {told['dtype']} in {told['directory']}",
    ]
    if told["repaired_documents"]:
        lines.append(
            f"{told['repaired_documents']} documents have bytes that are not UTF-8, which became U+FFFD, first at "
            f"{told['first_repaired']}"
        )
    if told["skipped_binary_files"]:
        lines.append(f"{told['skipped_binary_files']} binary files in the corpus' directories were left out")
    if told.get("verified"):
        lines.append("every file has its recorded SHA-256")
    for number, shown in enumerate(told.get("first_batch", ())):
        lines += ["", f"--- step 0, sequence {number} ---", shown]
    return "\n".join(lines)


def _first_batch(store: TokenStore, run: Run) -> list[str]:
    from trainledger.data import train_batch

    recipe = run.recipe
    rows = train_batch(store, seed=recipe.seed, step=0, global_batch=recipe.global_batch, seq_len=recipe.seq_len)
    tokenizer = store.tokenizer()
    return [tokenizer.decode(row[:-1].tolist()) for row in rows[:2]]
