"""The layers that a pipeline rank owns, with embedding or head on the first or last, and micro-batches through them.

torch's schedules take a step; an evaluation is forwards alone. Parameters keep the names that they have in the whole
model, so that their first values and their checkpoints do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from trainledger.engine.nn.checkpointing import run_layers
from trainledger.engine.nn.loss import next_token_loss, run_loss, weighing
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.parallel.data_parallel import sum_over_replicas
from trainledger.engine.train.precision import TORCH, autocast
from trainledger.engine.train.step import Batch, Clock
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

BEFORE = ("embed_tokens", "embed_positions", "embed_norm")  # on the first stage
AFTER = ("norm", "lm_head")  # on the last


def stages_of(model: Transformer, run: Run, rank: int) -> list[Stage]:
    """The stages of one rank of a pipeline, which share their modules with ``model``; it keeps no others.

    Of V stages on each rank, the rank has every P-th of the pipeline's (Narayanan et al. 2021).
    """
    layers = layers_of_stages(run.layout, run.model.n_layers)
    stages = [Stage(model, run, layer, layers[layer]) for layer in range(rank, len(layers), run.layout.pipeline)]
    held = {id(module) for stage in stages for module in stage.modules()}
    for index, block in enumerate(list(model.layers)):
        if id(block) not in held:
            del model.layers._modules[str(index)]  # `del model.layers[index]` would give the others new names
    for name in (*BEFORE, *AFTER):
        if id(getattr(model, name)) not in held:
            setattr(model, name, None)
    return stages


def layers_of_stages(layout: Layout, n_layers: int) -> list[range]:
    """The layers of each stage of the whole pipeline.

    >>> layers_of_stages(Layout(pipeline=2, stage_layers=(1, 2)), 3)
    [range(0, 1), range(1, 3)]
    """
    count = layout.pipeline * layout.virtual_stages
    sizes = layout.stage_layers or (n_layers // count,) * count
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class Stage(Transformer):
    """Some layers in a row of a model, with its embedding or its head where they are the first or the last.

    ``index`` is its place among all stages of the pipeline. It is called with token ids on the first stage, else with
    what the stage before gives; the last takes targets too, and gives the loss.
    """

    def __init__(self, model: Transformer, run: Run, index: int, layers: range) -> None:
        nn.Module.__init__(self)
        layout = run.layout
        self.spec, self.checkpointing, self.unused_rows = model.spec, model.checkpointing, model.unused_rows
        self.recipe, self.n_batches = run.recipe, run.grad_accum
        self.index, self.first_layer = index, layers.start
        self.begins, self.ends = index == 0, index == layout.pipeline * layout.virtual_stages - 1
        self.token_ranks = layout.tensor if layout.sequence_parallel else 1
        self.rotary, self.rotary_local, self.masks = model.rotary, model.rotary_local, model.masks
        self.dropout, self.loss, self.mtp = model.dropout, model.loss, None
        for name in BEFORE:
            setattr(self, name, getattr(model, name) if self.begins else None)
        self.layers = nn.ModuleList(model.layers[layer] for layer in layers)
        for name in AFTER:
            setattr(self, name, getattr(model, name) if self.ends else None)

    def forward(self, x: Tensor, targets_BT: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """What the next stage reads, [B, T, D]; on the last stage, with targets, the micro-batch's part of the loss.

        Without gradients, as in an evaluation, its whole mean loss.
        """
        with autocast(self.recipe.precision, x.device), weighing(None, self.n_batches):
            if not self.ends:
                x_BTD = self._hidden(x).contiguous()
                return x_BTD.clone() if x_BTD._is_view() else x_BTD  # torch detaches it in place
            assert targets_BT is not None, "the last stage takes the loss"
            if not torch.is_grad_enabled():
                return _whole(next_token_loss(self._last(x), targets_BT))
            loss = run_loss(self._last, x, targets_BT, self.recipe)
            if self.n_batches > 1:
                loss = loss / self.n_batches
        return _whole(loss)

    def _last(self, x: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """What the whole model gives, of what the stage before it has made: logits, or with targets the loss."""
        x_BTD = self._hidden(x)
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        if targets_BT is not None:
            assert self.loss is not None, "this model's loss is taken of its logits"
            return self.loss.whole(x_BTD, targets_BT, self.lm_head)
        logits_BTV: Tensor = self.lm_head(x_BTD)
        return logits_BTV

    def _hidden(self, x: Tensor) -> Tensor:
        """The output of the stage's layers."""
        n_tokens = x.shape[1] if self.begins else x.shape[1] * self.token_ranks
        first = [self.embed(x) if self.begins else x]  # no name here keeps it alive while the layers run
        del x
        layers = range(self.first_layer, self.first_layer + len(self.layers))
        shared = self.shared(layers, first[0], n_tokens)
        return run_layers(
            list(self.layers), shared, first.pop(), self.spec, self.checkpointing, before=self.first_layer
        )


def _whole(loss: Tensor) -> Tensor:
    """A loss that all tensor ranks have, as a plain tensor, and no view, as torch detaches it in place."""
    return loss.to_local().clone() if isinstance(loss, DTensor) else loss


# torch (before 2.15) keeps buffers for all micro-batches of a step, in both directions, and every output that it has
# sent. What the ledger accounts for has neither, as in Megatron-LM: memory for what a stage receives and sends is there
# only as long as that is used.


class Piped(PipelineStage):
    """A stage among ``count`` of a pipeline whose ranks are ``group``.

    ``stream_BTD`` has the shape and format of what goes from stage to stage, ``ids_BT`` of what the first one reads.
    With ``batched`` a schedule sends and receives at once what it must; else a stage sends as soon as it is asked what
    to send. ``clock`` is entered around forwards and backwards; waiting for other stages is in neither.
    """

    def __init__(
        self,
        stage: Stage,
        count: int,
        device: torch.device,
        group: Any,
        ids_BT: Tensor,
        stream_BTD: Tensor,
        *,
        batched: bool,
    ) -> None:
        loss = torch.empty((), device="meta", requires_grad=True)
        reads, gives = ids_BT if stage.begins else stream_BTD, loss if stage.ends else stream_BTD
        super().__init__(stage, stage.index, count, device, group=group, input_args=reads, output_args=gives)
        self.stream_BTD = stream_BTD
        self.batched = batched
        self.clock: Clock = lambda phase: nullcontext()
        self._sending: dict[int, Any] = {}  # the last send to each peer

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            self._expect(self.args_recv_info[fwd_chunk_id], learns=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if not self.is_last:
            self._expect(self.grad_recv_info[bwd_chunk_id], learns=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    # With torch's buffers and outputs as they are the account was 0.98 of the measured peak for gpipe and 0.88 to 0.90
    # interleaved (2 stages, 8 micro-batches); so it is 0.999 for gpipe, 0.99 for 1f1b, 0.97 to 0.99 interleaved.
    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """The sends of an output, which autograd then knows by its shape only (Megatron-LM does so too)."""
        if self.is_last:
            return super().get_fwd_send_ops(fwd_chunk_id)
        (out_BTD,), inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = (out_BTD.detach(),), inputs
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (out_BTD,), inputs
        out_BTD.data = out_BTD.new_empty(()).expand(out_BTD.shape)
        return self._sent(ops)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, ops: Any) -> Any:
        """What is left to send. A schedule would hold all that it has sent until the step is over.

        A peer asks for what it gets in the order in which it is sent, so waiting for the last one keeps nobody waiting.
        """
        if self.batched:
            return ops
        for op in ops:
            if op.peer in self._sending:
                self._sending[op.peer].wait()
            self._sending[op.peer] = dist.isend(op.tensor, op.peer, group=op.group)
        return []

    def all_sent(self) -> None:
        """Wait for what is still under way."""
        while self._sending:
            self._sending.popitem()[1].wait()

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.clock("backward"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._forget(self.args_recv_info[bwd_chunk_id], self.grad_recv_info[bwd_chunk_id])

    # zero-bubble: torch 2.13 runs the inputs' part of a backward with the graph retained, so a micro-batch keeps all
    # that it has saved until the weights' part. The account is 0.75 to 1.00 of that peak.
    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.clock("backward"):
            super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with self.clock("backward"):
            super().perform_reduce_grad(grad_scale_factor)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        self._forget(*self.args_recv_info.values())
        return made

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(*args, **kwargs)
        self._forget(*self.grad_recv_info.values())
        return made

    def _expect(self, arriving: Any, *, learns: bool) -> None:
        for each in arriving:
            each.buffer = torch.empty_like(self.stream_BTD, device=self.device, requires_grad=learns)

    def _forget(self, *received: Any) -> None:
        for each in (info for infos in received for info in infos):
            if getattr(each, "buffer", None) is not None:  # token ids have none
                each.buffer = torch.empty(0, device=self.device)


SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,  # with one stage to a rank it is ZB-H1 (Qi et al. 2023)
}
# Stages received in batches always, for which NCCL has another communicator than for a single send.
_BEFORE_2_12 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
OF_SEVERAL = ("interleaved", "zero-bubble")  # schedules that take a list of stages


# 13 layouts of pipelines, four schedules among them, had the losses of one process within 1e-6 over 20 steps in fp32;
# in bf16-mixed the first steps are equal, then the last bit of the clipped norm decides roundings (3e-5).
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
        self.piped = [Piped(stage, count, device, self.group, ids_BT, stream_BTD, batched=batched) for stage in stages]
        self.schedule = SCHEDULES[kind](
            self.piped if kind in OF_SEVERAL else self.piped[0], run.grad_accum, loss_fn=_same, scale_grads=False
        )

    def step(self, batches: Sequence[Batch], clock: Clock) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss on the last stage, 0 on others."""
        for piped in self.piped:
            piped.clock = clock
        losses: list[Tensor] = []
        ids, told = [], {}
        if self.stages[0].begins:
            ids = [torch.cat([inputs_BT for inputs_BT, _ in batches])]
        if self.stages[-1].ends:  # an input of the stage, which takes the loss itself, and of `_same`
            targets = torch.cat([targets_BT for _, targets_BT in batches])
            told = {"targets_BT": targets, "target": targets, "losses": losses}
        self.schedule.step(*ids, return_outputs=False, **told)
        for piped in self.piped:
            piped.all_sent()
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
