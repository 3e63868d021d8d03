"""The layout: how one model is spread over devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from trainledger.frozen import frozen
from trainledger.spec.problem import Problem
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class Layout:
    """Devices along each way of splitting; one device is accounted for and trained so far."""

    replicate: int = setting(
        "copies of the model, each with its part of the batch; only 1 so far, as all of these", default=1, at_least=1
    )
    shard: int = setting("ranks that share parameters, gradients and optimizer state", default=1, at_least=1)
    tensor: int = setting("ranks that split each matrix", default=1, at_least=1)
    pipeline: int = setting("stages of layers", default=1, at_least=1)

    def problems(self) -> Iterator[Problem]:
        for each in fields(self):
            size = getattr(self, each.name)
            if size != 1:
                yield Problem(f"layout.{each.name}", size, "only one device is accounted for and trained so far", 1)
