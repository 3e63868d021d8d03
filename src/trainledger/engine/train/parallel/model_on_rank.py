"""The model of a run as one rank holds it: built without memory for parameters, divided, then filled.

A layout is applied from outside: tensor parallelism by DTensor, sharding by FSDP2, replicas by DDP; stages of a
pipeline are cut in between, the tokens of context ranks spread before (`context`). Where whole parameters are kept and
their update is shared (ZeRO-1 and 2), nothing is done to the model (`zero`). `ledger.parallel` accounts for the same;
the tests run both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.parallel.context import refuse_context, spread_tokens
from trainledger.engine.train.parallel.data_parallel import replicate, shard
from trainledger.engine.train.parallel.expert import refuse_experts, spread_experts
from trainledger.engine.train.parallel.mesh import expert_mesh, put
from trainledger.engine.train.parallel.pipeline import Pipeline, Stage, refuse_pipeline, stages_of
from trainledger.engine.train.parallel.tensor import refuse_to_split, split
from trainledger.engine.train.parallel.together import RanksTogether
from trainledger.engine.train.parallel.zero import ShardedUpdate
from trainledger.engine.train.precision import build_model
from trainledger.spec.layout import Layout
from trainledger.spec.precision import Precision
from trainledger.spec.problem import InvalidInput, Problem, refuse_given
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

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
    model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: Precision, cut: Cut | None = None
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
        for each in parts:
            shard(each, layout, mesh, precision, experts)
    elif layout.replicate > 1 and layout.tensor > 1 and layout.shard_ranks == 1:
        rule = "with layout.tensor is applied to a model only where layout.shard is above 1"
        raise InvalidInput([Problem("layout.replicate", layout.replicate, rule, 1)])
    return parts


_OF_OTHER_SHAPES = ("adafactor", "adam-8bit", "adamw-8bit")  # whose states are not divided as weights are
_FUSED_OF_PARTS = ("adamw", "adam", "muon")  # whose fused kernel takes parts of parameters (DTensors)
_OF_MATRICES = "would take parts of tensor ranks for matrices"
_OF_WHOLE = "is a kernel that PyTorch has for whole parameters of this optimizer"
_OF_PARTS = "is not taken of logits of which each tensor rank has a part"


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
    parts = divide(model, run.layout, mesh, run.recipe.precision, cut)
    for part in parts:
        _give_memory(part, device)
    if seed is not None:
        initialize(model, seed=seed, put=put, width_factor=run.width_factor)
    if stages := [each for each in parts if isinstance(each, Stage)]:
        return model, RanksTogether(run.layout, mesh, pipeline=Pipeline(run, stages, mesh, device))
    replicas = update = None
    if run.layout.shard_ranks == 1:
        replicas = replicate(model, mesh) if run.layout.replicate > 1 else None
    elif run.layout.zero < 3:
        update = ShardedUpdate(model, run.layout, mesh)
    return model, RanksTogether(run.layout, mesh, replicas, update=update)


def optimizer_on_rank(
    model: nn.Module, recipe: Recipe, together: RanksTogether, *, width_factor: float = 1.0
) -> torch.optim.Optimizer:
    """The recipe's optimizer over what this rank updates of the model."""
    if together.update is None:
        return build_optimizer(model, recipe, width_factor=width_factor)
    return together.update.optimizer(lambda pieces: build_optimizer(pieces, recipe, width_factor=width_factor))


def refuse_on_ranks(run: Run) -> None:
    """Raise `InvalidInput` for what of a run the engine does not train in its layout."""
    recipe, layout = run.recipe, run.layout
    alone = "is trained in one process only so far"
    divided, tensor = layout.shard_ranks > 1 or layout.tensor > 1, layout.tensor > 1
    precision, optimizer, dropout = recipe.precision, recipe.optimizer.kind, recipe.dropout or recipe.attention_dropout
    fused = optimizer not in _FUSED_OF_PARTS and recipe.optimizer.implementation == "fused"
    rules = (
        ("recipe.lora", recipe.lora is not None, alone, "none"),
        ("recipe.initial_weights", recipe.initial_weights, alone, "none"),
        ("recipe.precision", precision.loss_scaling and precision.kind, alone, "bf16-mixed"),
        ("recipe.precision", divided and precision.master and precision.kind, alone, "bf16-sharded"),
        ("recipe.optimizer", divided and optimizer in _OF_OTHER_SHAPES and optimizer, alone, "adamw"),
        ("recipe.optimizer.implementation", divided and fused and "fused", _OF_WHOLE, "foreach"),
        ("recipe.optimizer", tensor and optimizer == "muon" and "muon", _OF_MATRICES, "adamw"),
        ("recipe.dropout", tensor and dropout, "would not be the same on all tensor ranks", 0),
        ("recipe.loss", tensor and recipe.loss.kind != "full" and recipe.loss.kind, _OF_PARTS, "full"),
    )
    refuse_given(rules)
    refuse_pipeline(run)
    refuse_context(run)
    refuse_experts(run)


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Memory for the parameters that have none; what was one parameter under two names stays one."""
    before = [(module, name, id(each)) for module in model.modules() for name, each in module._parameters.items()]
    apply: Any = model._apply
    apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)
    made: dict[int, Any] = {}
    for module, name, was in before:
        module._parameters[name] = made.setdefault(was, module._parameters[name])


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
