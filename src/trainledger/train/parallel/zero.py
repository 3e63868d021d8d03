"""Whole parameters on every rank, and of the optimizer's state a piece (ZeRO-1); of gradients too (ZeRO-2).

A piece is rows of a parameter, as FSDP2 cuts them, so that checkpoints of all kinds of sharding are alike. It is a
DTensor on the parameter's own memory: what the optimizer writes into a piece the model has.

ZeRO-1 sums whole gradients once a step, in place; ZeRO-2 those of a block as soon as its backward is over, and keeps
its rows only. What the ranks have updated goes to all in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor, Shard

from trainledger.spec.layout import Layout
from trainledger.train.mixed_precision import Named, StandIns

# torch 2.13 has other names for these two.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class _Summing:
    """Gradients of a unit on their way: this rank's rows arrive in ``own``, and ``sent`` must stay until then."""

    parameters: list[nn.Parameter]
    own: Tensor
    sent: Tensor
    work: Any


class ShardedUpdate:
    """The pieces of a model's parameters that this rank updates, and what the ranks tell each other for that.

    ``pieces`` are by parameter. The model must have memory and keep it.
    """

    def __init__(self, model: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
        self.mesh = mesh["shard"]
        self.group, self.ranks = self.mesh.get_group(), layout.shard
        self.replicas = mesh.get_group("replicate") if layout.replicate > 1 else None
        self.each_backward = layout.zero == 2
        self.parts = layout.data_ranks  # the loss is the mean over them
        self.names = {each: name for name, each in model.named_parameters() if each.requires_grad}
        self.pieces = {each: nn.Parameter(self._piece_of(each.detach())) for each in self.names}
        self._summing: _Summing | None = None
        self._missing: list[set[nn.Parameter]] = []  # by unit, the parameters without a gradient yet
        if self.each_backward:
            self._follow(model)

    def optimizer(self, make: Callable[[Named], torch.optim.Optimizer]) -> UpdateOfPieces:
        """An optimizer of the model's parameters that updates this rank's pieces; ``make`` builds it from those."""
        return UpdateOfPieces(self, make)

    def _rows(self, whole: Tensor) -> int:
        """Rows of every rank's piece; the last ranks have fewer, or none."""
        return -(-whole.shape[0] // self.ranks)

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor, a view."""
        rows = self._rows(whole)
        begin = min(self.mesh.get_local_rank() * rows, whole.shape[0])
        return whole[begin : begin + rows]

    def _piece_of(self, whole: Tensor) -> DTensor:
        return self._as_piece(self._own(whole), whole)

    def _as_piece(self, own: Tensor, whole: Tensor) -> DTensor:
        return DTensor.from_local(
            own, self.mesh, (Shard(0),), run_check=False, shape=whole.shape, stride=whole.stride()
        )

    # Gradients: ZeRO-2

    def _follow(self, model: Any) -> None:
        """Each block is a unit, and all else is one more, as with FSDP2."""
        inside = {each for layer in model.layers for each in layer.parameters()}
        units = [[each for each in layer.parameters() if each in self.pieces] for layer in model.layers]
        units.append([each for each in self.pieces if each not in inside])
        for unit in filter(None, units):
            missing = set(unit)
            self._missing.append(missing)
            for each in unit:
                each.register_post_accumulate_grad_hook(partial(self._arrived, unit, missing))

    def _arrived(self, unit: Sequence[nn.Parameter], missing: set[nn.Parameter], parameter: Tensor) -> None:
        missing.discard(parameter)
        if not missing:
            missing.update(unit)
            self._send(unit)

    @torch.no_grad()
    def _send(self, unit: Sequence[nn.Parameter]) -> None:
        """Start summing a unit's gradients; those of the unit before have arrived by then."""
        self._receive()
        gradients = [each.grad for each in unit if each.grad is not None]
        sent = torch._chunk_cat(gradients, dim=0, num_chunks=self.ranks)  # for each rank its rows of all, filled up
        del gradients
        for each in unit:
            each.grad = None
        own = sent.new_empty(sent.shape[1])
        work = _reduce_scatter(own, sent.view(-1), group=self.group, async_op=True)
        self._summing = _Summing(list(unit), own, sent, work)

    @torch.no_grad()
    def _receive(self) -> None:
        """Keep this rank's rows of the gradients that are on their way, or add them to what is there."""
        summing, self._summing = self._summing, None
        if summing is None:
            return
        summing.work.wait()
        if self.replicas is not None:
            dist.all_reduce(summing.own, group=self.replicas)
        summing.own.div_(self.parts)
        sizes = [self._rows(each) * each[0].numel() for each in summing.parameters]
        for each, flat in zip(summing.parameters, torch.split(summing.own, sizes), strict=True):
            own = self._own(each)
            gradient = self._as_piece(flat[: own.numel()].view(own.shape), each)
            piece = self.pieces[each]
            if piece.grad is None:
                piece.grad = gradient
            else:
                piece.grad.add_(gradient)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around forward and backward of a micro-batch: at its end all that was sent has arrived."""
        yield
        if self.each_backward:
            for missing in self._missing:
                assert all(each.grad is None for each in self.pieces if each not in missing), (
                    "a block's gradient is whole"
                )
            self._receive()

    # Gradients: ZeRO-1

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """ZeRO-1, after the last backward: sum the whole gradients, each rank its own rows, where they are."""
        if self.each_backward:
            return
        there = [each for each in self.pieces if each.grad is not None]
        gradients = [each.grad for each in there if each.grad is not None]
        filled = [_in_rows(each, self._rows(each) * self.ranks) for each in gradients]
        with _coalescing_manager(self.group):
            for each in filled:
                _reduce_scatter(self._own(each), each, group=self.group)
        own = [self._own(each) for each in gradients]
        for mine, each, gradient in zip(own, filled, gradients, strict=True):
            if each is not gradient:
                mine.copy_(self._own(each)[: len(mine)])
        del filled
        if self.replicas is not None:
            with _coalescing_manager(self.replicas):
                for mine in own:
                    dist.all_reduce(mine, group=self.replicas)
        for parameter, mine in zip(there, own, strict=True):
            mine.div_(self.parts)
            self.pieces[parameter].grad = self._as_piece(mine, parameter)

    # Parameters

    @torch.no_grad()
    def gather(self) -> None:
        """Give every rank what the others have updated."""
        wholes = [each.detach() for each in self.pieces]
        filled = [_in_rows(each, self._rows(each) * self.ranks) for each in wholes]
        with _coalescing_manager(self.group):
            for each in filled:
                _all_gather(each, self._own(each), group=self.group)
        for whole, each in zip(wholes, filled, strict=True):
            if each is not whole:
                whole.copy_(each[: len(whole)])


class UpdateOfPieces(StandIns):
    """Steps an optimizer over this rank's pieces of a model's parameters, then gathers what the others have updated.

    To the outside it is an optimizer of the parameters; ``state`` of one holds the state of its piece.
    """

    def __init__(self, update: ShardedUpdate, make: Callable[[Named], torch.optim.Optimizer]) -> None:
        super().__init__(update.names, update.pieces, make)
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """The inner optimizer's step over the pieces, and the others' pieces into the parameters."""
        self.step_inner()
        self.update.gather()


def _in_rows(whole: Tensor, rows: int) -> Tensor:
    """A tensor with so many rows: itself, or a copy that is filled up."""
    if rows == whole.shape[0]:
        return whole.contiguous()
    filled = whole.new_zeros(rows, *whole.shape[1:])
    filled[: whole.shape[0]].copy_(whole)
    return filled
