"""What a forward keeps for its backward: everything, the inputs of some blocks only, or copies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainledger.spec.layers import groups_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import Selective, keeper

Layer = Callable[..., Tensor]  # x, and what all layers of a kind share (angles, a mask), to x


def run_layers(
    layers: Sequence[Layer],
    shared: Sequence[Any],
    x_BTD: Tensor,
    spec: ModelSpec,
    recipe: Recipe | None,
    *,
    before: int = 0,
) -> Tensor:
    """The output of all layers one after the other, each with what layers of its kind share.

    They may be some of a model's in a row, with so many ``before`` them.

    full: a block is recomputed in backward. segments: several are together (Chen et al. 2016, section 4.1). selective:
    but for the operations whose outputs are kept. from-start: every block's input is made from the first one again.
    Without a recipe, or without gradients, nothing does.
    """
    if recipe is None or not torch.is_grad_enabled() or inside_of_blocks(recipe):
        for layer, each in zip(layers, shared, strict=True):  # here, where no caller keeps the first input alive
            x_BTD = layer(x_BTD, each)
        return x_BTD
    random = _draws(recipe)
    kind = recipe.activation_checkpointing
    if kind.kind == "from-start":
        return _from_start(x_BTD, layers, shared, random)
    options = _options(recipe)
    with offloading(shared) if kind.kind == "offload" else nullcontext():
        for first, group in groups_of(spec, recipe):
            own = slice(max(0, first - before), max(0, first + group.size - before))
            some, theirs = layers[own], shared[own]
            if group.again and some:
                x_BTD = checkpoint(_in_turn, x_BTD, some, theirs, **options)
            else:
                x_BTD = _in_turn(x_BTD, some, theirs)
    return x_BTD


def inside_of_blocks(recipe: Recipe) -> bool:
    """Whether blocks have separate checkpoints: a compiler that is to keep what a policy says must see it.

    So torchtitan has it. From outside a compiled block is one operation, and there is nothing to choose from.
    """
    return recipe.compile and recipe.activation_checkpointing.kind == "selective"


def own_checkpoints(spec: ModelSpec, recipe: Recipe | None) -> list[dict[str, Any] | None]:
    """For each block of a model the options of its own checkpoint, None where it has none."""
    if recipe is None or not inside_of_blocks(recipe):
        return [None] * spec.n_layers
    options = _options(recipe)
    return [options if group.again else None for _, group in groups_of(spec, recipe)]


def _options(recipe: Recipe) -> dict[str, Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": _draws(recipe)}
    if isinstance(recipe.activation_checkpointing, Selective):
        contexts: Callable[..., Any] = create_selective_checkpoint_contexts
        keep = recipe.activation_checkpointing.keep or ()
        options["context_fn"] = lambda: contexts(policy(keep))  # a policy counts, so each forward has its own
    return options


def _draws(recipe: Recipe) -> bool:
    """Whether blocks read the generator's state: without dropout there is nothing to keep for the second run."""
    return recipe.dropout > 0 or recipe.attention_dropout > 0 or recipe.adapter_dropout > 0


def _in_turn(x_BTD: Tensor, layers: Sequence[Layer], shared: Sequence[Any]) -> Tensor:
    for layer, each in zip(layers, shared, strict=True):
        x_BTD = layer(x_BTD, each)
    return x_BTD


# Memory of one block against time that grows with the square of the depth: the first layer runs n times.
def _from_start(x_BTD: Tensor, layers: Sequence[Layer], shared: Sequence[Any], random: bool) -> Tensor:
    """Layers that keep only the first one's input: the last is recomputed after all before it, and so on."""
    if not layers:
        return x_BTD

    def up_to_last(x_BTD: Tensor) -> Tensor:
        return layers[-1](_from_start(x_BTD, layers[:-1], shared[:-1], random), shared[-1])

    y_BTD: Tensor = checkpoint(up_to_last, x_BTD, use_reentrant=False, preserve_rng_state=random)
    return y_BTD


def policy(keep: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """torch's policy that keeps the outputs of these operations, as `spec.savings.keeper` says."""
    counts = {False: keeper(keep), True: keeper(keep)}  # matmuls are counted apart in each of the two runs

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = counts[context.is_recompute](operator._schema.name.split("::")[1])
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def again(run: Callable[..., Tensor], *inputs: Tensor, random: bool) -> Tensor:
    """``run(*inputs)``, of which only the inputs are kept; ``random`` says that it reads the generator's state."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    y: Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=random)
    return y


# Offloading


@torch.library.custom_op("trainledger::to_host", mutates_args=())
def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, where an accelerator can read it while it computes."""
    copy = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    return copy.copy_(x, non_blocking=True)


@torch.library.custom_op("trainledger::to_device", mutates_args=())
def to_device(x: Tensor, device: str) -> Tensor:
    """A copy on a device of a tensor in host memory."""
    return torch.empty_like(x, device=device).copy_(x, non_blocking=True)


@to_host.register_fake
def _fake_to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


@to_device.register_fake
def _fake_to_device(x: Tensor, device: str) -> Tensor:
    return torch.empty_like(x, device=device)


def offloading(shared: Any) -> AbstractContextManager[Any]:
    """Tensors that autograd saves inside go to host memory and come back in backward, each as often as it is saved.

    Parameters, their low-precision copies, buffers and the tensors in ``shared`` stay: they are there anyway.
    """
    held = {tensor.untyped_storage()._cdata for tensor in _tensors_in(shared)}

    def pack(x: Tensor) -> Tensor | _OnHost:
        if x.untyped_storage()._cdata in held or _is_parameter(x):
            return x
        with torch.no_grad():
            return _OnHost(to_host(x), x.device)

    def unpack(packed: Tensor | _OnHost) -> Tensor:
        return to_device(packed.copy, str(packed.device)) if isinstance(packed, _OnHost) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class _OnHost:
    """What became of a saved tensor."""

    copy: Tensor
    device: torch.device


# Autocast's copy of a weight is no leaf, and a view of a parameter is none: both would go to the host in each forward,
# though the parameter stays on the device anyway.
def _is_parameter(x: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one, or of one that learns a copy in another format."""
    if isinstance(x if x._base is None else x._base, nn.Parameter):
        return True
    node = x.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
