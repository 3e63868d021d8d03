"""The data: text, tokenizer, validation split, and how several texts are mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting

STANDARD_LIBRARY = "python-standard-library"
BLOCK_ROWS = 1000  # sequences in a row of which a mixture has the same number from each source


@frozen(kw_only=True)
class MixtureSource:
    """One of the texts of a mixture."""

    path: tuple[str, ...] = setting("files, globs or directories, as data.path", quantity="texts")
    weight: float = setting(
        "share of the sequences, over the sum of all weights", quantity="number", above=0, at_most=1e9
    )
    text_field: str | None = setting(
        "field of a JSONL or Parquet record with the text; absent = data.text_field", quantity="text", default=None
    )


@frozen(kw_only=True)
class DataSpec:
    """A corpus, or a mixture of several, and its tokenizer."""

    path: tuple[str, ...] = setting(
        "files, globs or directories of text, .jsonl(.gz, .zst) or .parquet; "
        f'"{STANDARD_LIBRARY}" = the text of the running interpreter\'s own library',
        quantity="texts", default=(STANDARD_LIBRARY,),
    )  # fmt: skip
    mixture: tuple[tuple[str, MixtureSource], ...] | None = setting(
        "several texts instead of path, [data.mixture.NAME] with path and weight for each; absent = path alone",
        quantity="named", members=MixtureSource, default=None,
    )  # fmt: skip
    text_field: str = setting("field of a JSONL or Parquet record with the text", quantity="text", default="text")
    tokenizer: str = setting(
        '"bytes", "bpe" (trained on the corpus, all sources of a mixture) or the path of a tokenizer.json',
        quantity="text", default="bytes",
    )  # fmt: skip
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

    @property
    def replaced(self) -> tuple[str, ...]:
        """The fields that others replace."""
        return ("path",) if self.mixture else ()

    @property
    def sources(self) -> tuple[tuple[str, DataSpec], ...]:
        """Each source as separate data, by name; a corpus alone has the empty name."""
        if not self.mixture:
            return (("", self),)
        return tuple(
            (name, replace(self, mixture=None, path=each.path, text_field=each.text_field or self.text_field))
            for name, each in self.mixture
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sources, in their order."""
        return tuple(each.weight for _, each in self.mixture) if self.mixture else (1.0,)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all sources."""
        return tuple(path for _, each in self.sources for path in each.path)


def dealt(places: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole places for weights, by the largest-remainder method; of equal ones the first.

    >>> dealt(1000, (0.7, 0.3)), dealt(10, (1, 1, 1)), dealt(1000, (1, 5000))
    ((700, 300), (4, 3, 3), (0, 1000))
    """
    exact = [Fraction(each) for each in weights]
    quotas = [each * places / sum(exact) for each in exact]
    whole = [int(each) for each in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda at: whole[at] - quotas[at])
    for at in by_remainder[: places - sum(whole)]:
        whole[at] += 1
    return tuple(whole)
