"""Seconds in which a micro-batch's gradients are added to those before it, for each parameter that a rank computes."""

from __future__ import annotations

from dataclasses import replace

from trainledger.ledger.rank import rank_of
from trainledger.ledger.standing import standing
from trainledger.ledger.step import account_of
from trainledger.plan.layouts.grid import ALONE, RESHARDS, SHARING
from trainledger.plan.layouts.times import Times
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

_SHARD, _MICRO_BATCHES = 8, 4


class Adding:
    """Reads it off the ledger of one stage for each way to share states."""

    def __init__(self, run: Run, times: Times, *, backend: str) -> None:
        self.run, self.times, self.backend = run, times, backend
        self._known: dict[tuple[int, bool], float] = {}

    def seconds(self, sharing: int, *, interleaved: bool, pipeline: int) -> float:
        """Seconds for each element; 0 where blocks reduce every time, and a rank adds up small pieces only."""
        alone = pipeline == 1
        if sharing == RESHARDS or (alone and sharing > 1) or self.run.recipe.lora_rank is not None:
            return 0.0
        key = (sharing, interleaved)
        if key not in self._known:
            self._known[key] = self._read(*key)
        return self._known[key]

    def _read(self, sharing: int, interleaved: bool) -> float:
        zero, reshard = SHARING[sharing]
        layers = self.run.model.n_layers
        layout = Layout(
            zero=zero, reshard_after_forward=reshard, shard=1 if sharing == ALONE else _SHARD, pipeline=2,
            schedule="interleaved" if interleaved else "1f1b", virtual_stages=2 if interleaved else 1,
            stage_layers=(layers, 0, 0, 0) if interleaved else (layers, 0),
        )  # fmt: skip
        recipe = replace(self.run.recipe, micro_batch=1, global_batch=_MICRO_BATCHES * layout.shard)
        model = replace(self.run.model, n_predict_ahead=0)  # no pipeline has them, and an element costs the same
        rank = rank_of(replace(self.run, model=model, layout=layout, recipe=recipe))
        ledger = account_of(rank, backend=self.backend)
        adds = [
            each for each in ledger
            if each.name == "add_" and each.phase == "backward" and each.loop and each.loop[0][0].startswith("micro")
        ]  # fmt: skip
        total = sum(self.times.roofline.time(each).seconds / each.loop[0][1] for each in adds)
        return float(total) / float(max(1, standing(rank, backend=self.backend).computed))
