"""Hooks run in a traced step as in a real one, parameters are themselves there, and unused ones have no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.nn.modules import module as global_hooks

import trainledger as tl

pytestmark = pytest.mark.torch
Call = Callable[..., None]


def of_saved(net: nn.Linear, call: Call) -> None:
    def forward(x_BD: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda saved: (call(), saved)[1], lambda saved: saved):
            return nn.functional.linear(x_BD, net.weight, net.bias)

    net.forward = forward  # type: ignore[method-assign]


def of_output(net: nn.Linear, call: Call) -> None:
    net.register_forward_hook(lambda module, args, output: (output.register_hook(call), None)[1])


# Each registers a hook and returns what must live for it.
KINDS: dict[str, Callable[[nn.Linear, Call], object]] = {
    "tensor": lambda net, call: net.weight.register_hook(call),
    "post accumulate": lambda net, call: net.weight.register_post_accumulate_grad_hook(call),
    "node": lambda net, call: ((node := get_gradient_edge(net.weight).node).register_hook(call), node),
    "node, before": lambda net, call: ((node := get_gradient_edge(net.weight).node).register_prehook(call), node),
    "several": lambda net, call: register_multi_grad_hook([net.weight, net.bias], call),
    "any of several": lambda net, call: register_multi_grad_hook([net.weight, net.bias], call, mode="any"),
    "output": of_output,
    "saved": of_saved,
    "forward": lambda net, call: net.register_forward_hook(call),
    "forward, before": lambda net, call: net.register_forward_pre_hook(call, with_kwargs=True),
    "backward": lambda net, call: net.register_full_backward_hook(call),
    "backward, before": lambda net, call: net.register_full_backward_pre_hook(call),
    "all modules": lambda net, call: global_hooks.register_module_forward_hook(call),
    "all modules, backward": lambda net, call: global_hooks.register_module_full_backward_hook(call),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_is_called_as_often_as_in_a_real_step_and_stays_registered(kind: str) -> None:
    net = nn.Linear(8, 8)
    calls: list[str] = []
    kept = KINDS[kind](net, lambda *args, **options: calls.append(kind))
    try:
        counts = []
        for trace in (False, True, False):
            calls.clear()
            if trace:
                ledger = tl.trace(net, torch.zeros(4, 8), loss=torch.mean, optimizer=torch.optim.SGD(net.parameters()))
                assert (ledger.partial, ledger.notes) == ("", ())
            else:
                net(torch.zeros(4, 8)).mean().backward()
            counts.append(len(calls))
        assert counts[0] > 0
        assert counts == [counts[0]] * 3
    finally:
        if hasattr(kept, "remove"):
            kept.remove()


@pytest.mark.parametrize("known", [True, False])
def test_an_optimizer_in_hooks_frees_each_gradient_at_once(known: bool) -> None:
    width, layers = 64, 6
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizers = {each: torch.optim.Adam([each], foreach=False) for each in net.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    step, x_BD = (lambda x_BD: net(x_BD).mean().backward()), torch.zeros(4, width)
    ledger = tl.trace_step(step, net, (x_BD,), optimizers=list(optimizers.values()) if known else ())
    assert sum(entry.name == "addcdiv_" for entry in ledger) == layers
    if known:
        matrix, step_counts = 4 * width * width, 4 * layers
        beyond = ledger.peak().nbytes - 3 * layers * matrix - step_counts - 4 * 4 * width
        assert 2 * matrix < beyond < 4 * matrix, "one gradient and the temporaries of one update"
    assert all(not optimizer.state for optimizer in optimizers.values())
    step(x_BD)
    assert all(type(state["exp_avg"]) is Tensor for each in optimizers.values() for state in each.state.values())


def test_parameters_are_fake_wherever_the_program_refers_to_them_and_keep_their_attributes() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parameters, decayed = list(net.parameters()), {each: each.dim() > 1 for each in net.parameters()}
    for parameter in parameters:
        parameter.decays = decayed[parameter]  # type: ignore[attr-defined]
    before = [each.detach().clone() for each in parameters]

    def step(x_BD: Tensor) -> None:
        net(x_BD).mean().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for parameter in net.parameters():
            assert parameter.decays == decayed[parameter]
            parameter.data.sub_(parameter.grad)

    ledger = tl.trace_step(step, net, torch.zeros(4, 8))
    assert (ledger.partial, ledger.notes) == ("", ())
    assert [entry.name for entry in ledger].count("_foreach_norm") == 1
    assert all(type(each) is nn.Parameter and each.grad is None for each in parameters)
    assert all(map(torch.equal, before, parameters))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(8, 8), nn.Linear(32, 32)

    def forward(self, x_BD: Tensor) -> Any:
        return self.used(x_BD)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_parameter_without_a_gradient_has_no_state_and_is_named(options: dict[str, bool]) -> None:
    model = Unused()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    ledger = tl.trace(model, torch.zeros(4, 8), loss=torch.mean, optimizer=optimizer)
    model(torch.zeros(4, 8)).mean().backward()
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    assert dict(ledger.resident)["optimizer state"] == sum(value.nbytes for value in states)
    (note,) = ledger.notes
    assert note == (
        "2 trained parameters got no gradient in this step: other.weight, other.bias; no optimizer state is counted "
        "for them"
    )
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    there = tl.trace(model, torch.zeros(4, 8), loss=torch.mean, optimizer=optimizer)
    assert dict(there.resident)["optimizer state"] == sum(
        value.nbytes for state in optimizer.state.values() for value in state.values()
    ), "what an optimizer has already is counted"
