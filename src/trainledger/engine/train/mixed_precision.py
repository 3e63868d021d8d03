"""Mixed precision around the optimizer: fp32 master weights, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
        self.inner = make(Named({name: stand_ins[each] for each, name in names.items()}))
        outer = {id(stand_in): each for each, stand_in in stand_ins.items()}
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
        for each, stand_in in self.stand_ins.items():
            if stand_in in self.inner.state:
                self.state[each] = self.inner.state[stand_in]


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
        names = {each: name for name, each in model.named_parameters() if each.requires_grad}
        self.masters = {each: nn.Parameter(each.detach().float()) for each in names}
        super().__init__(names, self.masters, make)
        self.buffers = buffers
        if buffers:
            for each, master in self.masters.items():
                master.grad = torch.zeros_like(master)
                each.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Copy the parameters anew: they were given other values after this was made."""
        with torch.no_grad():
            for each, master in self.masters.items():
                master.copy_(each)

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
        for each, master in self.masters.items():
            if each.grad is None:
                continue
            if self.buffers:
                self._add(each)
            else:
                master.grad = each.grad.float()
                each.grad = None

    def gradients(self) -> list[Tensor]:
        """The fp32 gradients that there are."""
        return [each.grad for each in self.masters.values() if each.grad is not None]

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
                rest = {name: each for name, each in states.items() if name != MASTER}
                if rest:
                    inner_states[index] = rest
        super().load_state_dict({"state": inner_states})

    def show_state(self) -> None:
        """The inner optimizer's states, and the copy."""
        for each, master in self.masters.items():
            self.state[each] = {MASTER: master, **self.inner.state.get(master, {})}

    def _add(self, parameter: Tensor) -> None:
        buffer = self.masters[parameter].grad  # type: ignore[index]
        assert buffer is not None
        assert parameter.grad is not None
        buffer.add_(parameter.grad)
        parameter.grad = None


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the optimizer steps, in the model's order: the parameters, or what stands in for them."""
    if isinstance(optimizer, StandIns):
        return [optimizer.stand_ins[each] for each in model.parameters() if each in optimizer.stand_ins]
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
