"""Code that fake tensors cannot follow: what is unknown is told with its line, and a trace that ends says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainledger as tl
from trainledger.answers.pages.traced import uncounted
from trainledger.ledger.ledger import from_json, to_json
from trainledger.spec.problem import shown
from trainledger.trace import step

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """A linear layer, and then whatever a function does."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(self.inner(x))
        return out.sum()


X = torch.zeros(3, 4)


def line_of(function: Any, offset: int) -> str:
    return f"test_partial_traces.py:{function.__code__.co_firstlineno + offset}"


def test_a_value_that_decides_is_taken_for_zero_and_told() -> None:
    def gated(x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            x = x * 2
        return x

    ledger = tl.trace(Net(gated), X)
    assert ledger.partial == ""
    (note,) = ledger.notes
    assert line_of(gated, 1) in note
    assert "1 value read at" in note
    assert "code that depends on it may take another path" in note


def test_a_loop_that_waits_for_a_value_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MOST_ASSUMED", 1_000)

    def waits(x: Tensor) -> Tensor:
        while x.sum().item() < 1:
            x = x.detach()
        return x

    with pytest.warns(RuntimeWarning, match="the trace is partial"):
        ledger = tl.trace(Net(waits), X)
    assert "has read more than 1,000 unknown values" in ledger.partial
    assert ledger.entries[0].name == "addmm"


def test_a_size_that_depends_on_values_ends_the_trace() -> None:
    def picks(x: Tensor) -> Tensor:
        return x.repeat_interleave(x.long().flatten().abs())

    with pytest.warns(RuntimeWarning):
        ledger = tl.trace(Net(picks), X)
    assert (
        ledger.partial.startswith(f"forward ended at tests/trace/{line_of(picks, 1)}")
        or line_of(picks, 1) in ledger.partial
    )
    assert "how large its result is depends on values" in ledger.partial
    assert "partial" in repr(ledger)
    assert from_json(to_json(ledger)) == ledger


def test_an_error_of_the_code_itself_is_told_with_its_line() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x @ torch.zeros(5, 5)

    with pytest.warns(RuntimeWarning):
        ledger = tl.trace(Net(wrong), X)
    assert "RuntimeError" in ledger.partial
    assert line_of(wrong, 1) in ledger.partial


def test_a_backward_hook_that_breaks_leaves_the_forward() -> None:
    net = Net(lambda x: x)

    def hook(*_: Any) -> None:
        raise KeyError("lost")

    net.inner.register_full_backward_hook(hook)
    with pytest.warns(RuntimeWarning):
        ledger = tl.trace(net, X)
    assert ledger.partial.startswith("backward ended at ")
    assert line_of(hook, 1) in ledger.partial
    assert ledger.by("phase")["forward"] > 0


def test_an_error_before_anything_ran_is_raised() -> None:
    with pytest.raises(TypeError):
        tl.trace(Net(lambda x: x), (X, X))


def test_operators_without_rule_are_listed_with_their_line() -> None:
    @torch.library.custom_op("trainledger_tests::strange", mutates_args=())
    def strange(x: Tensor) -> Tensor:
        return x.clone()

    strange.register_fake(lambda x: torch.empty_like(x))
    strange.register_autograd(lambda ctx, grad: grad)

    def runs(x: Tensor) -> Tensor:
        return strange(strange(x))

    ledger = tl.trace(Net(runs), X)
    assert dict(ledger.uncounted) == {"trainledger_tests::strange": 2}
    (told,) = uncounted(ledger)
    assert told.startswith("uncounted: 2 x trainledger_tests::strange at ")
    assert told.endswith(line_of(runs, 1))

    @tl.cost_rule("trainledger_tests::strange")
    def flops(x: Tensor, *, out: Tensor) -> int:
        return 7 * x.numel() + out.numel()

    counted = tl.trace(Net(runs), X)
    assert counted.uncounted == ()
    assert counted.flops - ledger.flops == counted.model_flops - ledger.model_flops == 2 * 8 * 12
    assert {each.source for each in counted if each.name.endswith("strange")} == {f"cost_rule {flops.__qualname__}"}


def test_formulas_that_torchs_own_counter_was_given_count() -> None:
    from torch.utils.flop_counter import register_flop_formula

    @torch.library.custom_op("trainledger_tests::known", mutates_args=())
    def known(x: Tensor) -> Tensor:
        return x.clone()

    known.register_fake(lambda x: torch.empty_like(x))
    known.register_autograd(lambda ctx, grad: grad)
    register_flop_formula(torch.ops.trainledger_tests.known)(lambda x, **_: 5 * x[0])
    plain, ledger = tl.trace(Net(lambda x: x), X), tl.trace(Net(known), X)
    assert ledger.uncounted == ()
    assert ledger.flops - plain.flops == 5 * 3


@pytest.mark.parametrize(("name", "kind", "rule"), [("op", "matmul", "such as 'my_lib::op'"), ("a::b", "heat", "kind")])
def test_rules_that_are_none(name: str, kind: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        tl.cost_rule(name, kind=kind)


def test_lines_of_forward_and_backward() -> None:
    def steps(x: Tensor) -> Tensor:
        x = x @ x.T
        return torch.tanh(x)

    ledger = tl.trace(Net(steps), X)
    lines = {(each.phase, each.name): each.line.rpartition("/")[2] for each in ledger}
    assert lines["forward", "mm"] == line_of(steps, 1)
    assert lines["forward", "tanh"] == lines["backward", "tanh_backward"] == line_of(steps, 2)
    assert lines["forward", "addmm"] == line_of(Net.forward, 1)
    of_linear = [each for each in ledger if each.phase == "backward" and each.path == "inner" and each.kind == "matmul"]
    assert {each.line.rpartition("/")[2] for each in of_linear} == {line_of(Net.forward, 1)}


def test_lines_of_a_function_with_a_backward_of_its_own() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    ledger = tl.trace(Net(Square.apply), X)
    products = {each.line.rpartition("/")[2] for each in ledger if each.name == "mul" and each.phase == "backward"}
    assert products == {line_of(Square.backward, 3)}


def test_tensors_of_a_trace_are_its_live_bytes() -> None:
    from trainledger.ledger.memory.timeline import timeline

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    ledger = tl.trace(model, X, loss=lambda x: x.sum(), optimizer=torch.optim.AdamW(model.parameters()))
    for moment in timeline(ledger):
        live = [each for each in ledger.tensors if each.lives(moment.index)]
        assert sum(each.nbytes for each in live) == moment.nbytes
    weight = next(each for each in ledger.tensors if each.name == "0.weight")
    assert (weight.category, weight.shape, weight.dtype, weight.born, weight.died) == (
        "parameters",
        (8, 4),
        "fp32",
        -1,
        None,
    )
    assert {each.name for each in ledger.tensors if each.category == "optimizer state"} >= {
        "0.weight.exp_avg",
        "2.bias.step",
    }
    assert from_json(to_json(ledger)) == ledger


@pytest.mark.parametrize("gave", [-5, 1.5, float("nan"), 2.0, None, "12", [3], torch.ones(())])
def test_a_rule_that_gives_no_flops_is_named_with_what_it_gave(gave: Any) -> None:
    if not hasattr(torch.ops.trainledger_tests, "wrong_rule"):
        op = torch.library.custom_op("trainledger_tests::wrong_rule", lambda x: x.clone(), mutates_args=(),
                                     schema="(Tensor x) -> Tensor")  # fmt: skip
        op.register_fake(torch.empty_like)
        op.register_autograd(lambda ctx, grad: grad)

    @tl.cost_rule("trainledger_tests::wrong_rule")
    def flops(x: Tensor, *, out: Tensor) -> Any:
        return gave

    with pytest.warns(RuntimeWarning, match="the trace is partial"):
        ledger = tl.trace(Net(lambda x: torch.ops.trainledger_tests.wrong_rule(x)), X)
    assert "ValueError: the rule of trainledger_tests::wrong_rule (cost_rule " in ledger.partial
    assert ledger.partial.endswith(" gave " + shown(gave) + ": FLOPs must be a whole number from zero on")


@pytest.mark.parametrize("operator", [3, None, torch.mm, "::", "a::", "::b"])
def test_rules_of_what_is_no_operator(operator: Any) -> None:
    with pytest.raises(ValueError, match=r"operator|named with its library"):
        tl.cost_rule(operator)


def test_a_rule_that_is_no_function() -> None:
    with pytest.raises(ValueError, match="the rule of a::b must be a function, not 3"):
        tl.cost_rule("a::b")(3)  # type: ignore[type-var]


def test_the_peak_is_a_lower_bound_where_an_operator_has_no_rule() -> None:
    @torch.library.custom_op("trainledger_tests::closed", mutates_args=())
    def closed(x: Tensor) -> Tensor:
        return x.clone()

    closed.register_fake(lambda x: torch.empty_like(x))
    closed.register_autograd(lambda ctx, grad: grad)
    (note,) = tl.trace(Net(closed), X).notes
    assert note.startswith("the peak is a lower bound: ")
    assert note.endswith("(trainledger_tests::closed)")
    assert tl.trace(Net(torch.relu), X).notes == ()
