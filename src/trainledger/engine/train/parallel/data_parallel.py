"""Ranks with other sequences: replicas, or state sharded over them.

FSDP2 (ZeRO-3) gathers parameters block by block; with ZeRO-1 a rank has whole parameters and a piece of the optimizer's
state, with ZeRO-2 of gradients too. Replicas sum gradients by DDP, or in its buckets what DDP cannot wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from trainledger.engine.train.parallel.expert import stacks_of
from trainledger.engine.train.parallel.mesh import shard_mesh, with_replicas
from trainledger.engine.train.precision import TORCH, Named, StandIns
from trainledger.spec.layout import Layout
from trainledger.spec.precision import Precision
from trainledger.spec.units import ceil_div

_common: Any = _fsdp_common
# What shards parameters of one module over ranks of their own; older versions shard all of a module over the same.
_PLACEMENT: Any = getattr(_common, "ShardPlacementResult", None)


# All else is one group that stays gathered (torch's default for a root module): embedding, last norm and head are used
# at both ends of a step, and a second gather would send them twice.
def shard(
    model: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    precision: Precision,
    experts: DeviceMesh | None = None,
    *,
    frozen: bool = False,
    on_host: bool = False,
) -> None:
    """FSDP2: each block a group of its own, all else one group that stays gathered until its backward is over, or of a
    ``frozen`` model, which has none, until its forward is.

    Where the precision gathers in another format than it holds, FSDP2 makes the copies and widens the gradients.
    Experts that are spread over ranks (``experts`` has both axes) are sharded over those that have the same, and whole
    where there is no other. ``on_host``: pieces are in host memory (`Recipe.offload`), which a CPU's are anyway.
    """
    policy = MixedPrecisionPolicy()
    if precision.copies == "gathered":
        policy = MixedPrecisionPolicy(TORCH[precision.compute], TORCH[precision.gradients])
    given: dict[str, Any] = {"mesh": with_replicas(layout, mesh, shard_mesh(layout, mesh)), "mp_policy": policy}
    if on_host:
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    alike = None if experts is None else experts["expert_shard"]
    if alike is not None and alike.size() == 1:
        given["ignored_params"] = {parameter for stack in stacks_of(model) for parameter in stack.parameters()}
    elif alike is not None and _PLACEMENT is None:
        for stack in stacks_of(model):
            own = given | {"mesh": with_replicas(layout, mesh, alike)}
            fully_shard(stack, reshard_after_forward=layout.reshards, **own)
    elif alike is not None:
        given["shard_placement_fn"] = _placement(model, with_replicas(layout, mesh, alike))
    for block in model.layers:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=frozen or layout.reshards, **given)
    fully_shard(model, reshard_after_forward=True if frozen else None, **given)
    if layout.prefetch != 1:
        _prefetch(list(model.layers), layout.prefetch)  # type: ignore[arg-type]


# Experts were FSDP2 modules of their own first: 3 % less memory than the account, and a plan of Mixtral on 64 H100 a
# quarter slower, as their gather is not ahead of anything. Since torch 2.13 FSDP2 takes a mesh for each parameter and
# gathers both at once.
def _placement(model: nn.Module, alike: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Experts over ranks of their own, all else as it is; FSDP2 then gathers both at once."""
    info: Any = _common.HSDPMeshInfo(alike, 1, 0) if alike.ndim == 2 else _common.FSDPMeshInfo(alike, 0)
    over, experts = (
        _PLACEMENT(Shard(0), info),
        {id(parameter) for stack in stacks_of(model) for parameter in stack.parameters()},
    )
    return lambda parameter: over if id(parameter) in experts else None


def _prefetch(blocks: list[Any], ahead: int) -> None:
    """Say which blocks are gathered while one runs backward: by default FSDP2 takes the one before it."""
    for index, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])


# What DDP calls sending buffers in every forward: since torch 2.13 an option that leaves the first sending alone. All
# ranks work out the same buffers, so that none need be sent at all.
_NEW, _OLD = "forward_sync_buffers", "broadcast_buffers"
_DDP = signature(nn.parallel.DistributedDataParallel.__init__).parameters
FIRST_BUCKET_NBYTES, BUCKET_NBYTES = 2**20, 25 * 2**20
_BUFFERS: dict[str, Any] = {_NEW if _NEW in _DDP else _OLD: False}


# The process group must end after DDP does: rank 1 once ended it while DDP still held it, gloo's thread waited for
# Python's lock, and the test hung for 500 s (torch 2.13).
def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.parallel.DistributedDataParallel:
    """The model wrapped in DDP over the mesh's replicas; frozen weights, which are the same on all, are not sent."""
    # gloo sends no 8-bit floats, which scales of frozen weights are (torch 2.13).
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    ignore: Any = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, frozen)
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("replicate"), **_BUFFERS)


def sum_over_replicas(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """The mean over replicas of all gradients, once a step, in buckets as large as DDP's.

    For what DDP cannot wrap: a stage of a pipeline whose backward a schedule runs in parts.
    """
    group, ranks = mesh.get_group("replicate"), mesh.get_group("replicate").size()
    bucket: list[Tensor] = []
    nbytes, limit = 0, FIRST_BUCKET_NBYTES

    def send() -> None:
        flat = torch.cat([tensor.flatten() for tensor in bucket]).div_(ranks)
        dist.all_reduce(flat, group=group)
        for each, mean in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            each.copy_(mean.view_as(each))
        bucket.clear()

    for parameter in reversed(list(parameters)):
        if parameter.grad is None:
            continue
        bucket.append(parameter.grad)
        nbytes += parameter.grad.nbytes
        if nbytes >= limit:
            send()
            nbytes, limit = 0, BUCKET_NBYTES
    if bucket:
        send()


# ZeRO-1 and 2: each parameter has memory for as many numbers on every rank, filled up with zeros, and a piece is a
# rank's part of that memory, whatever the parameter's shape: what the optimizer writes into a piece the model has, and
# nothing is copied. ZeRO-1 sums whole gradients once a step, in place; ZeRO-2 those of a block as soon as its backward
# is over, and keeps its part only. Updates go to all in one message. Checkpoints have rows, as those of FSDP2.


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


# Pieces are equal parts of all elements and not rows: matrices with fewer rows than ranks would send up to 14 % of a
# step more. Each parameter is cut by itself, unlike in DeepSpeed or Megatron-LM, so that a piece has a name and any
# layout reads any checkpoint.
class ShardedUpdate:
    """The pieces of a model's parameters that this rank updates, and what the ranks tell each other for that.

    ``pieces`` are by parameter. The model must have memory and keep it.
    """

    def __init__(self, model: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
        self.mesh = shard_mesh(layout, mesh)
        self.group, self.ranks = self.mesh.get_group(), layout.shard_ranks
        self.replicas = mesh.get_group("replicate") if layout.replicate > 1 else None
        self.each_backward = layout.zero == 2
        self.parts = layout.data_ranks * layout.context  # the loss is the mean over them
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._filled = {name: self._move(name) for name in self.names}
        self.pieces = {
            parameter: nn.Parameter(self.as_piece(self._own(filled), parameter))
            for parameter, filled in self._filled.items()
        }
        self._summing: _Summing | None = None
        self._missing: list[set[nn.Parameter]] = []  # by unit, the parameters without a gradient yet
        if self.each_backward:
            self._follow(model)

    def optimizer(self, make: Callable[[Named], torch.optim.Optimizer]) -> UpdateOfPieces:
        """An optimizer of the model's parameters that updates this rank's pieces; ``make`` builds it from those."""
        return UpdateOfPieces(self, make)

    def _own(self, filled: Tensor) -> Tensor:
        """This rank's part of a flat tensor that is filled up, a view."""
        return filled.view(self.ranks, -1)[self.mesh.get_local_rank()]

    def _fill_up(self, whole: Tensor) -> Tensor:
        """A tensor as a row of numbers, as many for each rank: itself, or a copy."""
        flat = whole.reshape(-1)
        missing = -flat.numel() % self.ranks
        return flat if not missing else torch.cat([flat, flat.new_zeros(missing)])

    def _move(self, parameter: nn.Parameter) -> Tensor:
        """Give a parameter memory for as many numbers on every rank, where it has not; all of that memory."""
        filled = self._fill_up(parameter.detach())
        parameter.data = filled[: parameter.numel()].view(parameter.shape)
        return filled

    def as_piece(self, own: Tensor, parameter: nn.Parameter) -> DTensor:
        """A rank's part as a DTensor; of one dim only where its parameter is a vector, as vectors are not decayed."""
        own = own if parameter.ndim < 2 else own.unsqueeze(-1)
        return DTensor.from_local(own, self.mesh, (Shard(0),), run_check=False)

    # What a checkpoint has

    # Rows as FSDP2 cuts them (`torch.chunk`: all ranks but the last ones have ceil(rows / ranks)), so that either reads
    # the other's checkpoint.
    def as_rows(self, parameter: nn.Parameter, whole: Tensor, *, copied: bool = False) -> DTensor:
        """This rank's rows of a tensor of a parameter's shape, a view unless ``copied``."""
        rows = ceil_div(whole.shape[0], self.ranks)
        begin = min(self.mesh.get_local_rank() * rows, whole.shape[0])
        own = whole[begin : begin + rows]
        return DTensor.from_local(
            own.clone() if copied else own,
            self.mesh,
            (Shard(0),),
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def rows_of(self, parameter: nn.Parameter, piece: DTensor) -> DTensor:
        """This rank's rows of what all ranks have pieces of; all must ask for it."""
        whole = piece.full_tensor().view(-1)[: parameter.numel()].view(parameter.shape)
        return self.as_rows(parameter, whole, copied=True)

    def piece_of(self, parameter: nn.Parameter, rows: DTensor) -> DTensor:
        """This rank's piece of what all ranks have rows of; all must ask for it."""
        return self.as_piece(self._own(self._fill_up(rows.full_tensor())).clone(), parameter)

    # Gradients: ZeRO-2

    def _follow(self, model: Any) -> None:
        """Each block is a unit, and all else is one more, as with FSDP2."""
        inside = {parameter for layer in model.layers for parameter in layer.parameters()}
        units = [[parameter for parameter in layer.parameters() if parameter in self.pieces] for layer in model.layers]
        units.append([piece for piece in self.pieces if piece not in inside])
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
        gradients = [parameter.grad for parameter in unit if parameter.grad is not None]
        flat = [gradient.reshape(-1) for gradient in gradients]
        sent = torch._chunk_cat(flat, dim=0, num_chunks=self.ranks)  # for each rank its part of all, filled up
        del gradients, flat
        for parameter in unit:
            parameter.grad = None
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
        sizes = [self._filled[parameter].numel() // self.ranks for parameter in summing.parameters]
        for parameter, own in zip(summing.parameters, torch.split(summing.own, sizes), strict=True):
            gradient, piece = self.as_piece(own, parameter), self.pieces[parameter]
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
                assert all(piece.grad is None for piece in self.pieces if piece not in missing), (
                    "a block's gradient is whole"
                )
            self._receive()

    # Gradients: ZeRO-1

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """ZeRO-1, after the last backward: sum the whole gradients, each rank its own rows, where they are."""
        if self.each_backward:
            return
        gradients: dict[nn.Parameter, Tensor] = {}
        for piece in self.pieces:
            if piece.grad is not None:
                gradients[piece] = self._fill_up(piece.grad)
                piece.grad = None  # where it was copied, so that one copy at a time is beside what it is of
        # gloo reduces in a copy of its input: +4 to +8 % of the peak of small models (torch 2.13); NCCL was not
        # measured.
        with _coalescing_manager(self.group):
            for filled in gradients.values():
                _reduce_scatter(self._own(filled), filled, group=self.group)
        if self.replicas is not None:
            with _coalescing_manager(self.replicas):
                for filled in gradients.values():
                    dist.all_reduce(self._own(filled), group=self.replicas)
        for parameter, filled in gradients.items():
            own = self._own(filled)
            own.div_(self.parts)
            self.pieces[parameter].grad = self.as_piece(own, parameter)

    # Parameters

    @torch.no_grad()
    def gather(self) -> None:
        """Give every rank what the others have updated."""
        with _coalescing_manager(self.group):
            for filled in self._filled.values():
                _all_gather(filled, self._own(filled), group=self.group)


class UpdateOfPieces(StandIns):
    """Steps an optimizer over this rank's pieces of a model's parameters, then gathers what the others have updated.

    To the outside it is an optimizer of the parameters; ``state`` of one holds the state of its piece.
    """

    def __init__(self, update: ShardedUpdate, make: Callable[[Named], torch.optim.Optimizer]) -> None:
        super().__init__(update.names, update.pieces, make)
        self.update = update

    def like(self, parameter: nn.Parameter) -> Tensor:
        """This rank's rows."""
        return self.update.as_rows(parameter, parameter.detach())

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The states of a parameter, this rank's rows of them."""
        return {
            name: self.update.rows_of(parameter, each) if isinstance(each, DTensor) else each
            for name, each in self.state.get(parameter, {}).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inner states from states of rows."""
        in_order = [each for group in self.param_groups for each in group["params"]]
        pieces = {
            index: {
                name: self.update.piece_of(in_order[index], state) if isinstance(state, DTensor) else state
                for name, state in states.items()
            }
            for index, states in state_dict["state"].items()
        }
        super().load_state_dict({"state": pieces})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """The inner optimizer's step over the pieces, and the others' pieces into the parameters."""
        self.step_inner()
        self.update.gather()
