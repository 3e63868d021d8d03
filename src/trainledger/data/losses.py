"""What a model makes of documents: the loss of each, and of all together with how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DocumentLoss:
    """The sum of the losses of a document's tokens, its end token among them."""

    place: str
    tokens: int
    text_nbytes: int
    nats: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.nats / self.tokens)


@dataclass(frozen=True)
class Losses:
    """What a model makes of documents: nats per token over all tokens, and how sure that is.

    >>> even = Losses((DocumentLoss("a", 10, 40, 20.0), DocumentLoss("b", 30, 120, 60.0)))
    >>> even.nats_per_token, even.standard_error, round(even.bits_per_byte, 3)
    (2.0, 0.0, 0.721)
    """

    documents: tuple[DocumentLoss, ...]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.documents)

    @property
    def text_nbytes(self) -> int:
        return sum(each.text_nbytes for each in self.documents)

    @property
    def nats_per_token(self) -> float:
        return math.fsum(each.nats for each in self.documents) / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        """Loss of a byte of text, which does not depend on the tokenizer."""
        return math.fsum(each.nats for each in self.documents) / math.log(2) / self.text_nbytes

    @property
    def standard_error(self) -> float | None:
        """Standard error of the nats per token over documents drawn alike (a ratio of sums; Cochran 1977, section 6.4);
        None of a single document."""
        count, mean = len(self.documents), self.nats_per_token
        if count < 2:
            return None
        rest = math.fsum((each.nats - mean * each.tokens) ** 2 for each in self.documents)
        return math.sqrt(rest * count / (count - 1)) / self.tokens


def perplexity(nats_per_token: float) -> float:
    """exp of the loss; infinite where that is no number."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return math.inf
