"""torch's stage of a pipeline, with memory for what it receives and sends only as long as that is used.

torch (before 2.15) keeps buffers for all micro-batches of a step, in both directions, and every output that it has
sent. What the ledger accounts for has neither, as in Megatron-LM.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from trainledger.engine.train.parallel.stages import Stage
from trainledger.engine.train.step import Clock


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
        for each in ops:
            if each.peer in self._sending:
                self._sending[each.peer].wait()
            self._sending[each.peer] = dist.isend(each.tensor, each.peer, group=each.group)
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
        for each in (each for infos in received for each in infos):
            if getattr(each, "buffer", None) is not None:  # token ids have none
                each.buffer = torch.empty(0, device=self.device)
