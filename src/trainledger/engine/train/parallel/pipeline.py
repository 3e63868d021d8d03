"""Micro-batches through the stages of a pipeline: torch's schedules for a step, forwards alone for an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from trainledger.engine.train.parallel.piped import Piped
from trainledger.engine.train.parallel.replicated import sum_over_replicas
from trainledger.engine.train.parallel.stages import Stage, layers_of_stages
from trainledger.engine.train.precision import TORCH
from trainledger.engine.train.step import Batch, Clock
from trainledger.spec.problem import refuse_given
from trainledger.spec.run import Run

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,  # with one stage to a rank it is ZB-H1 (Qi et al. 2023)
}
# Stages received in batches always, for which NCCL has another communicator than for a single send.
_BEFORE_2_12 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
OF_SEVERAL = ("interleaved", "zero-bubble")  # schedules that take a list of stages


class Pipeline:
    """The stages of one rank and the schedule in which they take the micro-batches of a step."""

    def __init__(self, run: Run, stages: Sequence[Stage], mesh: DeviceMesh, device: torch.device) -> None:
        self.run, self.stages, self.device = run, stages, device
        self.mesh, self.group = mesh, mesh.get_group("pipeline")
        shape = (run.device_batch, run.rank_tokens // stages[0].token_ranks, run.model.d_model)
        dtype = TORCH[run.recipe.precision.stream]
        stream_BTD = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        ids_BT = torch.empty(run.device_batch, run.rank_tokens, dtype=torch.int64, device="meta")
        count, kind = run.layout.pipeline * run.layout.virtual_stages, run.layout.schedule
        batched = kind == "1f1b" or (_BEFORE_2_12 and device.type == "cuda")
        self.piped = [Piped(each, count, device, self.group, ids_BT, stream_BTD, batched=batched) for each in stages]
        self.schedule = SCHEDULES[kind](
            self.piped if kind in OF_SEVERAL else self.piped[0], run.grad_accum, loss_fn=_same, scale_grads=False
        )

    def step(self, batches: Sequence[Batch], clock: Clock) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss on the last stage, 0 on others."""
        for each in self.piped:
            each.clock = clock
        losses: list[Tensor] = []
        ids, told = [], {}
        if self.stages[0].begins:
            ids = [torch.cat([inputs_BT for inputs_BT, _ in batches])]
        if self.stages[-1].ends:  # an input of the stage, which takes the loss itself, and of `_same`
            targets = torch.cat([targets_BT for _, targets_BT in batches])
            told = {"targets_BT": targets, "target": targets, "losses": losses}
        self.schedule.step(*ids, return_outputs=False, **told)
        for each in self.piped:
            each.all_sent()
        if self.run.layout.replicate > 1 and self.run.layout.shard_ranks == 1:
            with clock("backward"):
                for stage in self.stages:
                    sum_over_replicas(stage.parameters(), self.mesh)
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total = total + loss.detach()
        return total

    def evaluate(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        """The mean loss of a batch, on the rank with the last stage."""
        x = inputs_BT
        for stage in self.stages:
            if not stage.begins:
                shape = (inputs_BT.shape[0], inputs_BT.shape[1] // stage.token_ranks, self.run.model.d_model)
                x = torch.empty(shape, dtype=TORCH[self.run.recipe.precision.stream], device=self.device)
                dist.recv(x, self._rank_of(stage.index - 1), group=self.group)
            x = stage(x, targets_BT if stage.ends else None)
            if not stage.ends:
                dist.send(x, self._rank_of(stage.index + 1), group=self.group)
        return x if self.stages[-1].ends else None

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage % self.run.layout.pipeline)


def _same(loss: Tensor, targets_BT: Tensor) -> Tensor:
    """The loss of a last stage that has taken it already."""
    return loss


def refuse_pipeline(run: Run) -> None:
    """Raise `InvalidInput` for what of a run no pipeline of the engine trains."""
    layout, recipe, model = run.layout, run.recipe, run.model
    if layout.pipeline == 1:
        return
    alone = "is trained without a pipeline only so far"
    batches, stages = run.grad_accum, layout.pipeline
    sizes = [len(each) for each in layers_of_stages(layout, model.n_layers)]
    rounds = max(1, batches // stages)
    dropout = recipe.dropout or recipe.attention_dropout
    copies = recipe.precision.copies == "gathered" and layout.shard_ranks == 1
    few = f"takes at least as many micro-batches as stages, {stages}, and a rank has {batches}"
    uneven = f"takes micro-batches in {rounds} equal rounds, and a rank has {batches}"
    rules = (
        ("model.tie_embeddings", model.tie_embeddings, "would be one matrix on two stages of a pipeline", False),
        ("model.n_mtp_layers", model.n_mtp_layers, alone, 0),
        ("recipe.dropout", dropout, "would not be that of one process on several stages of a pipeline", 0),
        ("recipe.precision", copies and recipe.precision.kind, f"{alone}, or with layout.shard above 1", "bf16-mixed"),
        ("recipe.compile", recipe.compile and layout.schedule == "zero-bubble",
         "does not divide a compiled backward as layout.schedule = 'zero-bubble' needs it", False),
        ("recipe.loss", layout.schedule == "zero-bubble" and recipe.loss.kind == "fused" and "fused",
         "has one backward, which layout.schedule = 'zero-bubble' runs in two parts", "chunked"),
        ("layout.stage_layers", 0 in sizes[1:-1] and sizes, "leaves a stage in the middle without a layer", None),
        ("layout.split_sends", layout.split_sends, "is accounted for, but not applied to a model yet", False),
        ("layout.reshard_after_forward", layout.shard_ranks > 1 and layout.reshards,
         "is accounted for in a pipeline, but torch's schedules gather once for a step", False),
        ("layout.schedule", layout.schedule == "1f1b" and batches < stages and layout.schedule, few, "gpipe"),
        ("layout.schedule", layout.schedule == "zero-bubble" and recipe.activation_checkpointing.kind != "none"
         and layout.schedule, "runs a checkpointed block again for each group of its weights", "1f1b"),
        ("layout.schedule", layout.schedule == "zero-bubble" and batches % rounds and layout.schedule, uneven, "1f1b"),
    )  # fmt: skip
    refuse_given(rules)
