"""The model of a run as one rank holds it: built without memory for parameters, divided, filled, and its step.

A layout is applied from outside: tensor parallelism by DTensor, sharding by FSDP2, replicas by DDP; stages of a
pipeline are cut in between, the tokens of context ranks spread before (`context`). Where whole parameters are kept and
their update is shared (ZeRO-1 and 2), nothing is done to the model (`data_parallel`). `ledger.parallel` accounts for
the same; the tests run both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trainledger.engine.nn.init import draw, initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.parallel.context import own_part, spread_tokens
from trainledger.engine.train.parallel.data_parallel import ShardedUpdate, replicate, shard
from trainledger.engine.train.parallel.expert import finish_expert_gradients, spread_experts
from trainledger.engine.train.parallel.mesh import expert_mesh, local, put
from trainledger.engine.train.parallel.pipeline import Pipeline, Stage, stages_of
from trainledger.engine.train.parallel.tensor import finish_gradients, refuse_to_split, split
from trainledger.engine.train.precision import add_reference, build_model
from trainledger.engine.train.step import Batch, Clock, derive
from trainledger.spec.layout import Layout
from trainledger.spec.precision import Precision
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run


# A step of two CPU ranks with FSDP2 takes 1.02 to 1.06 times a bare loop: of 391 ms three agreements take 3 ms, the
# norm of sharded gradients 2 ms, records 1.4 ms.
@dataclass(frozen=True)
class RanksTogether:
    """A step of one rank of a layout (`trainledger.engine.train.step.Together`).

    ``replicas`` is the model inside DDP, ``update`` what ranks with whole parameters share of their update (ZeRO-1, 2).
    """

    layout: Layout
    mesh: DeviceMesh
    replicas: nn.parallel.DistributedDataParallel | None = None
    update: ShardedUpdate | None = None
    pipeline: Pipeline | None = None

    def around(self) -> AbstractContextManager[object]:
        """With tensor ranks each has its rows of the logits, and the loss is taken of those."""
        return loss_parallel() if self.layout.tensor > 1 else nullcontext()

    def called(self, model: nn.Module) -> nn.Module:
        return model if self.replicas is None else self.replicas

    def own(self, batch: Batch) -> Batch:
        """Context ranks have each a part of every sequence."""
        if self.layout.context == 1:
            return batch
        return own_part(self.layout, self.mesh.get_local_rank("context"), batch)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Replicas sum their gradients once a step."""
        if self.update is not None:
            return self.update.micro_batch()
        return nullcontext() if self.replicas is None or last else self.replicas.no_sync()

    def finish_gradients(self, model: nn.Module, clock: Clock) -> None:
        if self.layout.tensor > 1:
            with clock("backward"):
                finish_gradients(model)
        if self.layout.expert > 1:
            with clock("backward"):
                finish_expert_gradients(model, self.layout, self.mesh)
        if self.update is not None:
            with clock("backward"):
                self.update.finish_gradients()

    @torch.no_grad()
    def clip(self, parameters: list[nn.Parameter], most: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, but each rank scales its own parts."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        foreach = gradients[0].device.type != "cpu"
        by_mesh: dict[Any, list[Tensor]] = {}  # experts may be on ranks of their own
        for gradient in gradients:
            by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
        norms = [joint_norm(mesh, some, foreach=foreach) for mesh, some in by_mesh.items()]
        whole = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
        if self.pipeline is not None:
            whole = _root_of_sum(_squares(whole), self.pipeline.group)
        smaller = (most / (whole + 1e-6)).clamp(max=1.0)
        own = [local(gradient) for gradient in gradients]
        if foreach:
            torch._foreach_mul_(own, smaller)
        else:
            for tensor in own:
                tensor.mul_(smaller)
        return whole


# The norm of sharded gradients takes 2 ms of a step of 380 ms on two CPU ranks; by DTensor's dispatch it took longer
# than all norms of a small model.
def joint_norm(mesh: DeviceMesh | None, gradients: list[Tensor], *, foreach: bool) -> Tensor:
    """The L2 norm of gradients that are whole (mesh None), or of which the ranks of a mesh have parts.

    As `torch.nn.utils.get_total_norm` of DTensors, whose dispatch takes longer than the norms of a small model.
    """
    own = [local(gradient) for gradient in gradients]
    norms = torch.stack(torch._foreach_norm(own) if foreach else [torch.linalg.vector_norm(tensor) for tensor in own])
    axes = [] if mesh is None else [(mesh.get_group(dim), mesh.size(dim)) for dim in range(mesh.ndim)]
    for dim, (group, ranks) in enumerate(axes):
        whole = [isinstance(gradient, DTensor) and gradient.placements[dim].is_replicate() for gradient in gradients]
        if all(whole):
            continue
        squares = _squares(norms)
        if any(whole):  # each rank has them, and the sum counts them once
            squares /= squares.new_tensor([ranks if each else 1 for each in whole])
        norms = _root_of_sum(squares, group)
    joint: Tensor = torch.linalg.vector_norm(norms)
    return joint


def _squares(norms: Tensor) -> Tensor:
    """In fp32: a sum in bf16 over a thousand ranks would lose half of it."""
    return norms.float().square()


def _root_of_sum(squares: Tensor, group: Any) -> Tensor:
    """The norms over a group, of the squares on each of its ranks."""
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


Cut = Callable[[], Sequence[nn.Module]]


def spread(model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """The model as this rank holds it: divided, then replicated.

    A model that is only replicated comes back wrapped in DDP. Raises `InvalidInput` for what cannot be applied yet.
    """
    if layout.pipeline > 1:
        raise InvalidInput([Problem("layout.pipeline", layout.pipeline, "leaves a rank with several models", 1)])
    divide(model, layout, mesh, precision)
    return replicate(model, mesh) if layout.shard_ranks == 1 and layout.replicate > 1 else model


def divide(
    model: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    precision: Precision,
    cut: Cut | None = None,
    *,
    on_host: bool = False,
) -> Sequence[nn.Module]:
    """Split a model over ``tensor``, then shard it over ``shard``, in place; its parameters may be without memory.

    With a ``pipeline`` the model is ``cut`` between the two. The modules that are called: the model, or its stages.

    Raises `InvalidInput` for what cannot be applied yet.
    """
    applied = {"gather": "block", "sequence_gather": "kept"}
    problems = [
        Problem(f"layout.{name}", getattr(layout, name), "is accounted for, but not applied to a model yet", one)
        for name, one in applied.items()
        if getattr(layout, name) != one
    ]
    if layout.overlap != ("gradients",):  # what DDP and FSDP2 do
        problems.append(
            Problem("layout.overlap", layout.overlap, "is accounted for, but not applied to a model yet", "gradients")
        )
    if layout.shard_ranks > 1 and layout.zero != 3 and (layout.tensor > 1 or layout.pipeline > 1):
        split_over = "tensor ranks" if layout.tensor > 1 else "stages"
        rule = f"is accounted for, but not applied to a model yet that is split over {split_over}"
        problems.append(Problem("layout.zero", layout.zero, rule, 3))
    if layout.zero == 0 and layout.shard * layout.context > 1:
        rule = "is accounted for, but not applied to a model yet; layout.replicate trains copies of the whole model"
        problems.append(Problem("layout.zero", 0, rule, 3))
    if problems:
        raise InvalidInput(problems)
    if layout.tensor > 1:
        refuse_to_split(model, precision)
        split(model, mesh["tensor"], sequence_parallel=layout.sequence_parallel)
    experts = None
    if layout.expert > 1:
        experts = expert_mesh(layout, mesh)
        spread_experts(model, experts["expert"])
    parts: Sequence[nn.Module] = [model] if cut is None else cut()
    if layout.shard_ranks > 1 and layout.zero == 3:
        for part in parts:
            shard(part, layout, mesh, precision, experts, on_host=on_host)
    elif layout.replicate > 1 and layout.tensor > 1 and layout.shard_ranks == 1:
        rule = "with layout.tensor is applied to a model only where layout.shard is above 1"
        raise InvalidInput([Problem("layout.replicate", layout.replicate, rule, 1)])
    return parts


def model_on_rank(
    run: Run, mesh: DeviceMesh, device: torch.device, *, seed: int | None
) -> tuple[Transformer, RanksTogether]:
    """This rank's part of the initialized model, and what it does together with others in a step.

    A whole matrix exists for the moment in which its values are drawn, on the CPU; they are those of one process.
    Without a seed none are drawn: a checkpoint has them. Of runs that `refuse_on_ranks` takes.
    """
    with device, _parameters_on_meta():
        model = build_model(run.model, run.recipe, sharded=run.layout.shard_ranks > 1 and run.layout.zero == 3)
    if run.layout.context > 1:
        spread_tokens(model, run.layout, mesh, run.recipe.seq_len)
    cut = None
    if run.layout.pipeline > 1:
        cut = partial(stages_of, model, run, mesh.get_local_rank("pipeline"))
    on_host = run.recipe.offload == "parameters"
    parts = divide(model, run.layout, mesh, run.recipe.precision, cut, on_host=on_host)
    for part in parts:
        _give_memory(part, device)
    if seed is not None:
        initialize(model, seed=seed, put=put, width_factor=run.width_factor)
        draw(model, seed=derive(run.recipe.seed, "adapters"), put=put)
    if stages := [stage for stage in parts if isinstance(stage, Stage)]:
        return model, RanksTogether(run.layout, mesh, pipeline=Pipeline(run, stages, mesh, device))
    replicas = update = None
    if run.layout.shard_ranks == 1:
        replicas = replicate(model, mesh) if run.layout.replicate > 1 else None
    elif run.layout.zero < 3:
        update = ShardedUpdate(model, run.layout, mesh)
    return model, RanksTogether(run.layout, mesh, replicas, update=update)


def reference_on_rank(run: Run, model: Transformer, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """Put the frozen model of a reference's run beside this rank's part of a model, divided as that is, with the values
    of a new run."""
    sharded = run.layout.shard_ranks > 1 and run.layout.zero == 3
    with device, _parameters_on_meta():
        reference = add_reference(model, run, sharded=sharded)
    if sharded:
        shard(reference, run.layout, mesh, run.recipe.precision, frozen=True)
    _give_memory(reference, device)
    initialize(reference, seed=derive(run.recipe.seed, "init"), put=put, width_factor=run.width_factor)
    if sharded:
        # The root of FSDP2 is what runs first (torch 2.13, ``FSDPState._lazy_init``), and the reference does so before
        # the model, of which it is a part.
        state: Any = fully_shard.state(model)  # type: ignore[attr-defined]
        state._lazy_init()
        # Backward gathers ahead what ran before a block: for the first that would be the end of the reference
        # (``FSDPParamGroup._backward_prefetch``).
        reference.register_forward_hook(lambda *_: state._comm_ctx.post_forward_order.clear())
    return reference


def optimizer_on_rank(
    model: nn.Module, recipe: Recipe, together: RanksTogether, *, width_factor: float = 1.0
) -> torch.optim.Optimizer:
    """The recipe's optimizer over what this rank updates of the model."""
    if together.update is None:
        return build_optimizer(model, recipe, width_factor=width_factor)
    return together.update.optimizer(lambda pieces: build_optimizer(pieces, recipe, width_factor=width_factor))


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Memory for the parameters that have none; what was one parameter under two names stays one."""
    before = [
        (module, name, id(parameter)) for module in model.modules() for name, parameter in module._parameters.items()
    ]
    apply: Any = model._apply
    apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)
    made: dict[int, Any] = {}
    for module, name, was in before:
        module._parameters[name] = made.setdefault(was, module._parameters[name])


# Not `torch.device("meta")` around the model: buffers (angles, masks) have values that no checkpoint holds.
@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters made inside are without memory as soon as a module has them; buffers are as they are."""
    module: Any = nn.Module
    register = module.register_parameter

    def on_meta(self: nn.Module, name: str, param: Any) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    module.register_parameter = on_meta
    try:
        yield
    finally:
        module.register_parameter = register
