"""The objective of training: the next token, or preferences between two answers to one prompt."""

from __future__ import annotations

from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class NextToken:
    """The mean loss over all tokens."""

    kind: ClassVar[str] = "next-token"
    reference: ClassVar[str | None] = None


@frozen(kw_only=True)
class DPO:
    """Direct preference optimization: -log sigmoid of beta times how much more the model than a frozen reference
    prefers the chosen answer (Rafailov et al. 2023, arXiv 2305.18290, equation 7). Sequences come in pairs."""

    kind: ClassVar[str] = "dpo"

    beta: float = setting("weight of the distance from the reference", 0.1, above=0)
    reference: str = setting(
        "device = the reference's forward is a part of each step: of a second, frozen copy of the model, or with "
        "recipe.lora of its own weights with adapters off; precomputed = its log-probabilities are taken once before",
        "device",
        choices=("device", "precomputed"),
    )


Objective = NextToken | DPO
