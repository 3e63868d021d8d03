"""Heads and inner widths split over tensor ranks by DTensor (Megatron-LM's tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainledger.engine.nn.lora import AdaptedLinear, magnified, row_norms
from trainledger.engine.nn.norm import compute_dtype
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import Precision
from trainledger.spec.problem import InvalidInput, Problem


def refuse_to_split(model: nn.Module, precision: Precision) -> None:
    """Raise `InvalidInput` for parts of a model that are accounted for over tensor ranks, but not split here yet."""
    spec: ModelSpec = model.spec  # type: ignore[assignment]
    attention: nn.Module = model.layers[0].self_attn  # type: ignore[index, union-attr]
    parts = (
        ("attention", spec.attention.kind, "multi-head"),
        ("feed_forward", spec.feed_forward.kind, "dense"),
        *((f"attention.{name}", True, False) for name, _ in attention.named_parameters(recurse=False)),
        ("n_mtp_layers", spec.n_mtp_layers, 0),
        ("attention.in_global", None if spec.attention.in_global is None else "a table", None),
        ("attention.keys_as_values", spec.attention.keys_as_values, False),
        ("positions", "alibi" if spec.positions.kind == "alibi" else "rope", "rope"),
    )
    problems = [
        Problem(f"model.{name}", given, "is not split over tensor ranks yet", plain)
        for name, given, plain in parts
        if given != plain
    ]
    if precision.cached is not None:
        problems.append(Problem("recipe.precision.weight_caching", True, "is not split over tensor ranks yet", False))
    if problems:
        raise InvalidInput(problems)


def split(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Megatron's tensor parallelism (Shoeybi et al. 2019; with sequence parallelism Korthikanti et al. 2022).

    Heads and inner widths go over the ranks, and the rows of embedding and head. The input of each branch becomes
    one DTensor for all its projections, so that its gradient is summed over the ranks once, not once for each.
    """
    whole = Shard(1) if sequence_parallel else Replicate()
    stream: ParallelStyle = SequenceParallel(use_local_output=True) if sequence_parallel else _Replicated()
    learned = getattr(model, "embed_positions", None) is not None
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": _VocabParallel(Replicate() if learned else whole, use_local_output=not learned),
        "embed_positions": _Replicated(),
        "norm": stream,
        "lm_head": ColwiseParallel(input_layouts=whole, output_layouts=Shard(-1), use_local_output=False),
    }
    for index, block in enumerate(model.layers):  # type: ignore[arg-type]
        for name, module in block.named_children():
            path = f"layers.{index}.{name}"
            if "norm" in name:
                plan[path] = stream
            elif name in ("self_attn", "mlp"):
                plan[path] = PrepareModuleInput(
                    input_layouts=_first(module, whole), desired_input_layouts=_first(module, Replicate())
                )
                for child in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                    plan[f"{path}.{child}"] = _Columns()
                for child in ("q_norm", "k_norm"):  # heads go over the ranks, so each has a part of the gradient
                    plan[f"{path}.{child}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
                plan[f"{path}.o_proj"] = plan[f"{path}.down_proj"] = _Rows(output_layouts=whole)
    if learned:  # the rows of the table are added to all tokens, which then go over the ranks
        plan["layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(whole, None), use_local_output=True
        )
    here = {name: style for name, style in plan.items() if _there(model, name)}
    tied = model.lm_head.weight is model.embed_tokens.weight  # type: ignore[union-attr]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model, mesh, here)
    for name, parameter in model.named_parameters():  # torch 2.13 lets all learn that it makes replicated
        parameter.requires_grad_(name not in frozen)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight  # type: ignore[union-attr]


def _first(module: nn.Module, placement: Any) -> tuple[Any, ...]:
    """Placements of a branch's arguments: the stream, and for attention what all layers share, which stays as it is."""
    return (placement, None) if hasattr(module, "q_proj") else (placement,)


def _there(model: nn.Module, path: str) -> bool:
    try:
        return model.get_submodule(path) is not None
    except AttributeError:
        return False


class _Columns(ColwiseParallel):
    """Linear layers by columns, also those with adapters: B and magnitudes go over the ranks, A is whole on each."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, AdaptedLinear):
            return super()._apply(module, device_mesh)
        _distribute(module, device_mesh, {"weight": 0, "bias": 0, "lora_b": 0, "lora_magnitude": 0})

        def forward(x: DTensor) -> Tensor:
            return _adapted(module, x.to_local(grad_placements=(Partial(),)), module.bias, whole=("lora_a",))

        vars(module)["forward"] = forward
        return module


class _Rows(RowwiseParallel):
    """Linear layers by rows, also those with adapters: A goes over the ranks, B and magnitudes are whole on each."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, AdaptedLinear):
            return super()._apply(module, device_mesh)
        _distribute(module, device_mesh, {"weight": 1, "lora_a": 1})

        def forward(x: Tensor) -> Tensor:
            bias = None if module.bias is None else module.bias / device_mesh.size()
            whole = ("lora_b", "lora_magnitude")
            y = _adapted(module, x, bias, whole=whole, norms_of=partial(_joint_norms, device_mesh.get_group()))
            total: Any = DTensor.from_local(y, device_mesh, (Partial(),)).redistribute(placements=self.output_layouts)
            out: Tensor = total.to_local()
            return out

        vars(module)["forward"] = forward
        return module


def _distribute(module: AdaptedLinear, mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """Split parameters along these dims; the others are whole on each rank."""
    for name, parameter in list(module.named_parameters()):
        placement = Shard(dims[name]) if name in dims else Replicate()
        values = distribute_tensor(parameter.detach(), mesh, (placement,))
        module.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))


def _joint_norms(group: Any, part: Tensor) -> Tensor:
    """The norms of rows of which each rank has a part."""
    squares = row_norms(part).float().square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt().to(part.dtype)


# What the factor that is whole adds on a rank is that rank's share alone, by its columns or its part of the sum: so is
# its gradient, which `finish_gradients` sums once a step. Nothing else goes over the ranks than without adapters, but
# the squares of DoRA's norms.
def _adapted(
    module: AdaptedLinear,
    x: Tensor,
    bias: Any,
    *,
    whole: tuple[str, ...],
    norms_of: Callable[[Tensor], Tensor] = row_norms,
) -> Tensor:
    """This rank's part of a frozen layer's output and of what its adapter adds."""
    own: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        part: Any = parameter
        own[name] = part.to_local(grad_placements=(Partial(),)) if name in whole else part.to_local()
    x, bias = x.to(compute_dtype(x)), bias.to_local() if isinstance(bias, DTensor) else bias
    y, a, b = F.linear(x, own["weight"], bias), own.get("lora_a"), own.get("lora_b")
    if a is None or b is None or module.off:
        return y
    # All tensor ranks draw the same numbers: one mask where each has whole rows, equal ones of their parts of a row.
    z = torch.native_dropout(x, module.dropout, True)[0] if module.training and module.dropout else x
    if "lora_magnitude" in own:
        parts, dropped = (a, b, own["lora_magnitude"]), z is not x
        weight = partial(own["weight"].to, a.dtype)
        return (y + magnified(z, y, weight, bias, *parts, module.scale, dropped=dropped, norms_of=norms_of)).to(y.dtype)
    return y + F.linear(F.linear(z, a), b) * module.scale


# torch's `RowwiseParallel` on an embedding gives each rank a gradient of the whole vocabulary (2.13).
class _VocabParallel(ParallelStyle):
    """An embedding whose rows go over the ranks; torch's own `RowwiseParallel` gives every rank all rows' gradient."""

    def __init__(self, output_layout: Any, *, use_local_output: bool) -> None:
        super().__init__()
        self.output_layout = output_layout
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, (Shard(0),)))

        def forward(ids: Tensor) -> Tensor:
            weight: Any = module.weight
            table = weight.to_local()
            own = ids - mesh.get_local_rank() * table.shape[0]
            elsewhere = (own < 0) | (own >= table.shape[0])
            x = F.embedding(own.clamp(0, table.shape[0] - 1), table).masked_fill(elsewhere.unsqueeze(-1), 0.0)
            whole = DTensor.from_local(x, mesh, (Partial(),)).redistribute(placements=(self.output_layout,))
            out: Tensor = whole.to_local() if self.use_local_output else whole
            return out

        vars(module)["forward"] = forward
        return module


class _Replicated(ParallelStyle):
    """A module whose parameters every tensor rank holds and uses alike; as DTensors, like all others."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def replicated(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return tuple(DTensor.from_local(x, mesh, (Replicate(),)) if isinstance(x, Tensor) else x for x in inputs)

        def local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(module, mesh, None, replicated, local)  # type: ignore[arg-type]


# Norms see a part of the tokens on each rank under sequence parallelism (Korthikanti et al. 2022), so their gradients
# are partial sums; Megatron-LM adds them once a step as well.
def finish_gradients(model: nn.Module) -> None:
    """Sum over the tensor ranks what each has only its tokens' share of: gradients of norms and of biases added last.

    Once after the last backward of a step. FSDP2 has done it already where it shards such a parameter.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if (
            isinstance(gradient, DTensor)
            and isinstance(parameter, DTensor)
            and gradient.placements != parameter.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
