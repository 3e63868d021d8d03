"""The account of one layout: the same figures as a plan of it, from its distinct stages only."""

from __future__ import annotations

from typing import Any

from trainledger.frozen import frozen
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.model.parameters import leaves_of
from trainledger.ledger.parallel.rank_plan import parts_of
from trainledger.ledger.ranks import RankAccount, account_of_stage
from trainledger.plan.layouts.grid import Stages
from trainledger.plan.layouts.stages import kinds_of
from trainledger.predict.parallel_step import layout_time
from trainledger.predict.predict import memory_of_device
from trainledger.spec.cluster import Device
from trainledger.spec.recompute import layer_runs
from trainledger.spec.run import Run


@frozen
class Score:
    """Seconds of a step (None: a rate is not known, and ``why``), bytes of the heaviest rank and of its device."""

    seconds: float | None
    peak_nbytes: int
    device_nbytes: int
    fits: bool | None
    why: str = ""


def rescore(run: Run, machine: Device, *, backend: str) -> Score:
    """What a layout comes to.

    Of stages that have the same layers the first is followed, which has the most micro-batches in flight; of ranks that
    share states the one with the largest pieces. The others take as long, and hold no more.
    """
    layout = run.layout
    stages = Stages(layout.pipeline, layout.schedule, layout.virtual_stages, layout.stage_layers)
    runs = layer_runs(run.model, run.recipe)
    every = kinds_of(stages, [each.count * len(each.kinds) for each in runs])
    # Counts of layers do not tell where in a pattern of different ones a stage begins; a rank does, and takes longer.
    patterns = any(len(each.kinds) > 1 for each in runs)
    parts = [parts_of(run, each.stage) if patterns else each.chunks for each in every]
    first: dict[Any, int] = {}
    for each, part in zip(every, parts, strict=True):
        first.setdefault(part, each.stage)
    ledgers = {part: account_of_stage(run, stage, backend=backend) for part, stage in first.items()}
    peak = max(peak_nbytes(each) for each in ledgers.values())
    memory = memory_of_device(run, peak, machine)
    ranks = [
        RankAccount(
            stage=each.stage, place=0, count=layout.devices // layout.pipeline, layers=sum(each.layers),
            first=each.first, last=each.last, in_flight=0, ledger=ledgers[part], alike=first[part],
        )
        for each, part in zip(every, parts, strict=True)
    ]  # fmt: skip
    tensors = leaves_of(run.model, run.recipe).trained().tensors
    step = layout_time(run, ranks, machine, tensors=tensors)
    why = "" if step.seconds is not None else step.notes[0]
    return Score(step.seconds, peak, int(memory.nbytes), memory.fits, why)
