"""The data: text, tokenizer, validation split."""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.spec.setting import setting

STANDARD_LIBRARY = "python-standard-library"


@frozen(kw_only=True)
class DataSpec:
    """A corpus and its tokenizer."""

    path: tuple[str, ...] = setting(
        "files, globs or directories of text, .jsonl(.gz, .zst) or .parquet; "
        f'"{STANDARD_LIBRARY}" = the text of the running interpreter\'s own library',
        quantity="texts", default=(STANDARD_LIBRARY,),
    )  # fmt: skip
    text_field: str = setting("field of a JSONL or Parquet record with the text", quantity="text", default="text")
    tokenizer: str = setting(
        '"bytes", "bpe" (trained on the corpus) or the path of a tokenizer.json', quantity="text", default="bytes"
    )
    end_token: str | None = setting(
        "token that ends a document in a tokenizer.json; absent = the first of these that it has: "
        "<|endoftext|>, <|end_of_text|>, </s>, <eos>",
        quantity="text", default=None,
    )  # fmt: skip
    vocab_size: int | None = setting(
        "vocabulary of a bpe tokenizer; absent = model.vocab_size", default=None, at_least=257
    )
    validation_fraction: float = setting(
        "share of the documents that is for validation", quantity="number", default=0.02, above=0, at_most=0.5
    )
    cache: str = setting("directory of the tokenized text", quantity="text", default="cache")
