"""The loss of several documents and its standard error."""

import math

import numpy as np
import pytest

from trainledger.engine.data.losses import DocumentLoss, Losses, perplexity


def test_the_standard_error_is_that_of_documents_drawn_again():
    """Against the bootstrap over documents (Efron 1979)."""
    drawn = np.random.default_rng(1)
    tokens = drawn.integers(10, 200, 300)
    nats = tokens * drawn.normal(3, 0.5, 300)
    losses = Losses(tuple(DocumentLoss("", int(n), int(4 * n), float(x)) for n, x in zip(tokens, nats, strict=True)))
    again = drawn.integers(0, 300, (4000, 300))
    bootstrapped = (nats[again].sum(axis=1) / tokens[again].sum(axis=1)).std()
    assert losses.standard_error == pytest.approx(bootstrapped, rel=0.05)
    assert Losses(losses.documents[:1]).standard_error is None


def test_a_loss_beyond_what_a_number_holds_is_an_infinite_perplexity():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e4) == math.inf
