"""The model of a run as one rank holds it: built without memory for parameters, divided, then filled."""

from __future__ import annotations

from collections.abc import Iterator
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
from trainledger.engine.train.parallel.expert import refuse_experts
from trainledger.engine.train.parallel.parts import put
from trainledger.engine.train.parallel.pipeline import Pipeline, refuse_pipeline
from trainledger.engine.train.parallel.replicated import replicate
from trainledger.engine.train.parallel.spread import divide
from trainledger.engine.train.parallel.stages import Stage, stages_of
from trainledger.engine.train.parallel.together import RanksTogether
from trainledger.engine.train.parallel.zero import ShardedUpdate
from trainledger.engine.train.precision import build_model
from trainledger.spec.problem import refuse_given
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

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
