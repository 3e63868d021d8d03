"""Published models and the tokens that they were trained on: ``trained_models.toml``."""

from __future__ import annotations

import os
import tomllib
from functools import cache

from trainledger.spec.frozen import frozen


@frozen
class TrainedModel:
    """A published model: the parameters that take part in a token's forward, and the tokens that it was trained on."""

    title: str
    parameters: int
    tokens: int
    source: str


@cache
def trained_models() -> tuple[TrainedModel, ...]:
    """Published models and the tokens that they were trained on.

    >>> [each.tokens for each in trained_models() if each.title == "Chinchilla 70B"]
    [1400000000000]
    """
    with open(os.path.join(os.path.dirname(__file__), "trained_models.toml"), "rb") as file:
        return tuple(TrainedModel(**each) for each in tomllib.load(file)["model"])
