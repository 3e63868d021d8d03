"""The number formats of a recipe: put into a model, autocast around it, fp32 master weights, the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.engine.nn.float8 import use_float8
from trainledger.engine.nn.lora import adapt
from trainledger.engine.nn.transformer import Transformer, build
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import Precision
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(spec: ModelSpec, recipe: Recipe, *, adapted: bool = True, sharded: bool = False) -> Transformer:
    """The model of a run on torch's current default device, each parameter in the format of the recipe.

    With ``adapted`` its weights are frozen and have adapters where the recipe asks for them. Of a ``sharded`` model
    FSDP2 makes the copies in the format of the compute.

    Raises `InvalidInput` where the engine cannot train in this precision.
    """
    precision = recipe.precision
    refuse(precision, recipe)
    model = build(spec, recipe)
    hold_in(model, TORCH[precision.parameters])
    if adapted:
        adapt(model, recipe.lora)
    if precision.float8 is not None:
        use_float8(model, precision.float8)
    if precision.copies == "gathered" and not sharded:  # last: copies go into the modules that multiply
        gather_copies(model, TORCH[precision.compute])
    return model


def add_reference(model: Transformer, run: Run, *, sharded: bool = False) -> Transformer:
    """Put the frozen model of a reference's run, not yet initialized, beside another on torch's current default device,
    and give it."""
    model.reference = build_model(run.model, run.recipe, sharded=sharded).requires_grad_(False)
    return model.reference


def refuse_matmuls(precision: Precision, device: str) -> None:
    """Raise `InvalidInput` where this torch has no such matmul in 8 bits on a device."""
    rowwise = precision.float8 is not None and precision.float8.scaling == "rowwise"
    if rowwise and device == "cpu" and torch.__version__ < "2.12":
        rule = f"torch {torch.__version__} multiplies with a scale per row on GPUs only; torch 2.12 does so on CPUs too"
        nearest = precision.kind.replace("rowwise", "tensorwise")
        raise InvalidInput([Problem("recipe.precision", precision.kind, rule, nearest)])


def refuse(precision: Precision, recipe: Recipe) -> None:
    """Raise `InvalidInput` for what the ledger accounts for and the engine does not run."""
    problems: list[Problem] = []
    if recipe.of_megatron or recipe.of_xla:
        rule = "is accounted for; the engine trains PyTorch's modules"
        problems.append(Problem("recipe.framework", recipe.framework, rule, "torch"))
    if precision.float8 is not None and precision.float8.blocked:
        rule = "is accounted for, but no matmul with scales by block is built here; the engine does not train it"
        nearest = "fp8-rowwise" + "-sharded" * precision.kind.endswith("-sharded")
        problems.append(Problem("recipe.precision", precision.kind, rule, nearest))
    for field in ("first_in_16_bits", "last_in_16_bits"):
        if count := getattr(precision, field):
            problems.append(
                Problem(f"recipe.precision.{field}", count, "is accounted for; the engine has all alike", 0)
            )
    if precision.moments != precision.updated:
        rule = f"is accounted for, but torch.optim keeps its states in the format of the weights: {precision.updated}"
        problems.append(Problem("recipe.precision.moment_dtype", precision.moments, rule, precision.updated))
    if recipe.compile and (precision.copies == "gathered" or precision.float8 is not None):
        rule = f"is not built for precision {precision.kind}, which puts other tensors or matmuls into the blocks"
        problems.append(Problem("recipe.compile", True, rule, False))
    if precision.copies == "gathered" and recipe.loss.chunks is not None:
        rule = f"is not built for precision {precision.kind}: the head's copy is gone when its logits are made again"
        problems.append(Problem("recipe.loss", recipe.loss.kind, rule, "full"))
    if problems:
        raise InvalidInput(problems)


# `module.to(dtype)` would narrow buffers as well: the cosines of rotary positions and the slopes of ALiBi.
def hold_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Put parameters in ``dtype`` in the place of a model's; a tied one stays tied, and buffers stay as they are."""
    changed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dtype == dtype:
                continue
            if id(parameter) not in changed:
                changed[id(parameter)] = nn.Parameter(
                    parameter.detach().to(dtype), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = changed[id(parameter)]


# Autocast's cache of low-precision copies (`cache_enabled`) stays on: each weight is cast once for a forward, not once
# for each use of a tied matrix.
def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """The context of a forward pass: autocast where the precision has it, else nothing.

    matmuls then run in the low format; parameters, gradients, optimizer states, norms and the loss do not.
    """
    if precision.copies == "autocast":
        return torch.autocast(device.type, dtype=TORCH[precision.compute])
    return nullcontext()


def gather_copies(model: Transformer, dtype: torch.dtype) -> None:
    """Let every block, and the model for what is outside of blocks, compute with copies in ``dtype``."""
    inside = {id(module) for layer in model.layers for module in layer.modules()}
    _Copies(model, [module for module in model.modules() if id(module) not in inside], dtype)
    for layer in model.layers:
        _Copies(layer, list(layer.modules()), dtype)


class _Copies:
    """Swaps the parameters of some modules for copies while one module's forward runs."""

    def __init__(self, around: nn.Module, modules: list[nn.Module], dtype: torch.dtype) -> None:
        self.modules = modules
        self.dtype = dtype
        self.swapped: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        around.register_forward_pre_hook(self._swap)
        around.register_forward_hook(self._restore, always_call=True)

    def _swap(self, module: nn.Module, args: Any) -> None:
        copies: dict[int, Tensor] = {}
        for each in self.modules:
            slots: dict[str, Any] = each._parameters
            for name, parameter in slots.items():
                if parameter is None:
                    continue
                if id(parameter) not in copies:
                    copies[id(parameter)] = parameter.to(self.dtype)
                self.swapped.append((slots, name, parameter))
        for slots, name, parameter in self.swapped:
            slots[name] = copies[id(parameter)]

    def _restore(self, module: nn.Module, args: Any, output: Any) -> None:
        for slots, name, parameter in self.swapped:
            slots[name] = parameter
        self.swapped.clear()


MASTER = "master"
FIRST_SCALE = 2.0**16
GROWTH, BACKOFF, STEPS_TO_GROW = 2.0, 0.5, 2000


class Named:
    """Parameters by name: what an optimizer is made from, where it is not a module that has them."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters in the model's order."""
        return iter(self._parameters.items())


# `state` of a parameter is that of its stand-in, so that checkpoints, averages and the tracer read any optimizer alike.
class StandIns(torch.optim.Optimizer):
    """Steps an optimizer over other tensors in the place of a model's parameters.

    To the outside it is an optimizer of the parameters themselves: ``state`` of one is that of its stand-in.
    ``names`` are the parameters' names, and ``make`` builds the inner optimizer from the stand-ins by name.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        stand_ins: dict[nn.Parameter, nn.Parameter],
        make: Callable[[Named], torch.optim.Optimizer],
    ) -> None:
        self.stand_ins = stand_ins
        self.inner = make(Named({name: stand_ins[parameter] for parameter, name in names.items()}))
        outer = {id(stand_in): parameter for parameter, stand_in in stand_ins.items()}
        groups = [
            {**group, "params": [outer[id(each)] for each in group["params"]]} for group in self.inner.param_groups
        ]
        super().__init__(groups, dict(self.inner.defaults))
        self.show_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """No gradients."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad(set_to_none)

    def step_inner(self) -> None:
        """The inner optimizer's step, at the learning rates that were set from outside."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = outer["lr"]
        self.inner.step()
        self.show_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inner states from what `torch.optim.Optimizer.state_dict` of this class gives."""
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": state_dict["state"], "param_groups": groups})
        self.show_state()

    def like(self, parameter: nn.Parameter) -> Tensor:
        """Of the shape of what this rank stores of a state that is as large as the parameter."""
        return parameter

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What this rank stores of a parameter's states; all ranks must ask in the same order."""
        return dict(self.state.get(parameter, {}))

    def show_state(self) -> None:
        """Say of each parameter what the inner optimizer says of its stand-in."""
        for parameter, stand_in in self.stand_ins.items():
            if stand_in in self.inner.state:
                self.state[parameter] = self.inner.state[stand_in]


# bf16 has 8 bits of significand: an update below 2**-9 of its weight is rounded away, so that small rates need an fp32
# copy (Micikevicius et al. 2018, section 3.1, has the figures of fp16).
class MasterWeights(StandIns):
    """Steps an optimizer over fp32 copies of a model's trained parameters and rounds the result back into them (ZeRO,
    section 3.1; Megatron-LM).

    ``state`` of a parameter holds its copy as ``master`` and the inner optimizer's states. With ``buffers``
    each gradient is added to an fp32 buffer as soon as backward has it (Megatron-LM's main_grad); without,
    `take_gradients` widens them all before the step.
    """

    def __init__(
        self, model: nn.Module | Named, make: Callable[[Named], torch.optim.Optimizer], *, buffers: bool
    ) -> None:
        names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.masters = {name: nn.Parameter(name.detach().float()) for name in names}
        super().__init__(names, self.masters, make)
        self.buffers = buffers
        if buffers:
            for parameter, master in self.masters.items():
                master.grad = torch.zeros_like(master)
                parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Copy the parameters anew: they were given other values after this was made."""
        with torch.no_grad():
            for parameter, master in self.masters.items():
                master.copy_(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """No gradients; buffers are set to zero."""
        if self.buffers:
            torch.optim.Optimizer.zero_grad(self, set_to_none)
            torch._foreach_zero_(self.gradients())
        else:
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Widen every gradient to fp32; the low-precision one is freed. Buffers have been filled by then."""
        for parameter, master in self.masters.items():
            if parameter.grad is None:
                continue
            if self.buffers:
                self._add(parameter)
            else:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The fp32 gradients that there are."""
        return [master.grad for master in self.masters.values() if master.grad is not None]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """The inner optimizer's step over the copies, which are then rounded into the parameters."""
        self.take_gradients()
        self.step_inner()
        torch._foreach_copy_(list(self.masters), list(self.masters.values()))
        if not self.buffers:
            self.inner.zero_grad(set_to_none=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Masters and inner states from what `torch.optim.Optimizer.state_dict` of this class gives."""
        inner_states: dict[int, dict[str, Any]] = {}
        in_order = [each for group in self.param_groups for each in group["params"]]
        with torch.no_grad():
            for index, states in state_dict["state"].items():
                self.masters[in_order[index]].copy_(states[MASTER])
                rest = {name: state for name, state in states.items() if name != MASTER}
                if rest:
                    inner_states[index] = rest
        super().load_state_dict({"state": inner_states})

    def show_state(self) -> None:
        """The inner optimizer's states, and the copy."""
        for parameter, master in self.masters.items():
            self.state[parameter] = {MASTER: master, **self.inner.state.get(master, {})}

    def _add(self, parameter: Tensor) -> None:
        buffer = self.masters[parameter].grad  # type: ignore[index]
        assert buffer is not None
        assert parameter.grad is not None
        buffer.add_(parameter.grad)
        parameter.grad = None


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the optimizer steps, in the model's order: the parameters, or what stands in for them."""
    if isinstance(optimizer, StandIns):
        return [optimizer.stand_ins[parameter] for parameter in model.parameters() if parameter in optimizer.stand_ins]
    return list(model.parameters())


def gradient_buffers(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """The gradients that exist between steps as well."""
    return optimizer.gradients() if isinstance(optimizer, MasterWeights) and optimizer.buffers else []


class LossScaler:
    """Scales the loss so that small gradients do not vanish in fp16; a step whose gradients overflow is left out
    (Micikevicius et al. 2018, Mixed Precision Training, section 3.2).

    The same passes and numbers as `torch.amp.GradScaler`: the scale halves after an overflow and doubles after 2000
    good steps. ``first`` is the scale to begin with, ``read`` brings the overflow flag to the host.
    """

    def __init__(
        self, device: torch.device, *, first: float = FIRST_SCALE, read: Callable[[Tensor], float] = Tensor.item
    ) -> None:
        self.scale = torch.full((), first, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._read = read
        self._found: Tensor | None = None

    # Not `GradScaler` itself (torch 2.13): it copies flag and inverse scale for each device, even the one where they
    # are (`_MultiDeviceReplicator`), so that a step has two copies of 4 bytes which the account lacks; it makes the
    # scale with the first loss, and a fused loss is weighed by it before; and its `step` leaves no place for a judge.

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that backward starts from."""
        return loss * self.scale

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Take the scale off all gradients in place, and note whether one of them is not finite."""
        inverse = self.scale.double().reciprocal().float()
        self._found = torch.full((), 0.0, dtype=torch.float32, device=self.scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self._found, inverse)

    def overflowed(self) -> bool:
        """Whether the step must be left out; waits for the device."""
        assert self._found is not None, "unscale comes first"
        return bool(self._read(self._found))

    def adapt(self) -> None:
        """Let the scale fall after an overflow, or grow after enough good steps."""
        assert self._found is not None, "unscale comes first"
        torch._amp_update_scale_(self.scale, self.good_steps, self._found, GROWTH, BACKOFF, STEPS_TO_GROW)
        self._found = None

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; JSON holds both numbers exactly."""
        return {"scale": self.scale.item(), "good_steps": self.good_steps.item()}

    def restore(self, facts: dict[str, Any]) -> None:
        """Go on from what `facts` gave."""
        self.scale.fill_(facts["scale"])
        self.good_steps.fill_(facts["good_steps"])
