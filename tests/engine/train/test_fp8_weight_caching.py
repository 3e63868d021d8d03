"""Weights that are cast to 8 bits once a step: against layers written by hand that keep them, traced and run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_precision import CPU, ROWS, batches_of, made
from tiny_run import CountingFeed, tiny_run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainledger as tl
from trainledger.engine.nn.float8 import Float8Linear
from trainledger.engine.train.evaluation import evaluate
from trainledger.engine.train.precision import autocast
from trainledger.engine.train.step import optimizer_step
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse, rehearse_really
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

SCALINGS = ["tensorwise", pytest.param("rowwise", marks=ROWS)]
CACHED = {"precision.weight_caching": True, "micro_batch": 1}


# By hand: a layer that casts its weight when it is told that a micro-batch is the first, and keeps both copies


def eight_bits(x: Tensor, dtype: torch.dtype, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """x over what it must be multiplied with again, with its rows one after the other."""
    most = (x.abs().amax(1, keepdim=True) if by_row else x.abs().amax()).float().clamp(min=1e-12)
    limit = torch.finfo(dtype).max
    return (x.float() * (limit / most)).clamp(-limit, limit).to(dtype).contiguous(), most / limit


class Kept(nn.Module):
    def __init__(self, of: Float8Linear) -> None:
        super().__init__()
        self.weight, self.by_row = of.weight, of.float8.scaling == "rowwise"
        self.of_gradient = torch.float8_e5m2 if of.float8.backward == "e5m2" else torch.float8_e4m3fn
        self.first, self.casts = True, 0
        self.cache: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            w = self.weight.detach()
            self.cache = [eight_bits(each, torch.float8_e4m3fn, by_row=self.by_row) for each in (w, w.t())]
            self.first, self.casts = False, self.casts + 1
        y: Tensor = _Kept.apply(x.bfloat16().flatten(0, -2), self.weight, self)  # type: ignore[no-untyped-call]
        return y.unflatten(0, x.shape[:-1])

    def product(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        scale = b[1].t() if self.by_row else b[1]
        return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=scale, out_dtype=torch.bfloat16)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layer: Kept) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer.product(eight_bits(x, torch.float8_e4m3fn, by_row=layer.by_row), layer.cache[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,), layer = ctx.saved_tensors, ctx.layer
        of = layer.of_gradient
        dx = layer.product(eight_bits(g, of, by_row=layer.by_row), layer.cache[1])
        x8 = eight_bits(x.t(), torch.float8_e4m3fn, by_row=layer.by_row)
        return dx, layer.product(eight_bits(g.t(), of, by_row=layer.by_row), x8).float(), None


def by_hand(model: nn.Module) -> list[Kept]:
    """Let layers written by hand stand in for those of a model."""
    found = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Float8Linear):
                found.append(Kept(child))
                setattr(module, name, found[-1])
    return found


class Counted(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def times(ledger: Ledger, name: str) -> int:
    return sum(each.times for each in ledger.entries if each.name == name)


def stepped(run: Run, *, hand: bool = False) -> tuple[nn.Module, list[Kept], Counter[str]]:
    """A model after one step, what stands in for its layers, and what ran."""
    model, optimizer = made(run)
    layers = by_hand(model) if hand else []
    with Counted() as counted:
        optimizer_step(model, optimizer, batches_of(run), run.recipe)
    return model, layers, counted.names


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_step_with_kept_weights_ends_in_the_bits_of_one_without_and_of_one_by_hand(scaling: str) -> None:
    run = tiny_run(precision=f"fp8-{scaling}", micro_batch=1)
    plain, *_ = stepped(run)
    cached, *_ = stepped(replace(run, recipe=with_fields(run.recipe, {"precision.weight_caching": True})))
    hand, layers, _ = stepped(run, hand=True)
    assert [each.casts for each in layers] == [1] * 14  # of four micro-batches
    for one, *others in zip(plain.parameters(), cached.parameters(), hand.parameters(), strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_closed_form_scales_as_often_as_layers_by_hand(scaling: str) -> None:
    run = tiny_run(precision=f"fp8-{scaling}", **CACHED)
    _, layers, ran = stepped(run, hand=True)
    assert ran["_scaled_mm"] == times(account(run), "_scaled_mm") == 3 * 14 * 4
    # One scale serves both copies of a weight that is scaled as a whole; by hand it is looked for twice.
    twice = len(layers) if scaling == "tensorwise" else 0
    assert ran["amax"] - twice == times(account(run), "aminmax") == 4 * 14 * 4 + (28 - twice)
    without = account(replace(run, recipe=with_fields(run.recipe, {"precision.weight_caching": False})))
    assert times(without, "aminmax") == 6 * 14 * 4
    kept = {id(each): each.nbytes for layer in layers for copy in layer.cache for each in copy}
    more = dict(account(run).resident)["buffers"] - dict(without.resident)["buffers"]
    assert more == sum(kept.values()) - 4 * twice


@pytest.mark.agreement
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("again", ["none", "full", "selective"])
def test_account_trace_and_measurement_agree(scaling: str, again: str) -> None:
    run = tiny_run(precision=f"fp8-{scaling}", activation_checkpointing=again, **CACHED)
    told, traced, measured = account(run), rehearse(run), rehearse_really(run)
    for other in (traced, measured):
        assert dict(told.resident) == dict(other.resident)
        assert (told.flops, told.matmul_flops, told.kept_nbytes) == (other.flops, other.matmul_flops, other.kept_nbytes)
        assert told.total("read") == other.total("read")
        assert told.peak().nbytes == pytest.approx(other.peak().nbytes, abs=8)


def test_what_is_kept_is_cast_anew_in_each_step_and_not_used_between_steps() -> None:
    run = tiny_run(precision="fp8-tensorwise", **CACHED)
    model, optimizer = made(run)
    for _ in range(2):
        optimizer_step(model, optimizer, batches_of(run), run.recipe)
    plain, _ = made(tiny_run(precision="fp8-tensorwise"))
    assert set(model.state_dict()) == set(plain.state_dict())  # a checkpoint has no copies
    plain.load_state_dict(model.state_dict())
    held_out = CountingFeed(run, CPU).validation()
    assert evaluate(model, held_out, run.recipe) == evaluate(plain, held_out, run.recipe)
    inputs, _ = batches_of(run)[0]
    with autocast(run.recipe.precision, CPU):
        assert torch.equal(model.train()(inputs), plain.train()(inputs))


# The closed form alone


@st.composite
def spread(draw: st.DrawFn) -> Run:
    """Runs over tensor ranks, stages and ranks that share states, all with whole parameters."""
    tensor, pipeline = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    shard, zero = draw(st.sampled_from([(1, 3), (4, 1), (4, 2)]))
    interleaved = pipeline > 1 and draw(st.booleans())
    spec = from_fields(
        ModelSpec,
        {
            "vocab_size": 64,
            "d_model": 64,
            "n_layers": 8,
            "attention.n_heads": 4,
            "attention.n_kv_heads": 2,
            "feed_forward.d_ff": 96,
            "max_seq_len": 32,
            **draw(st.sampled_from([{}, {"feed_forward": "experts", "feed_forward.n_experts": 4}])),
        },
    )
    layout = Layout(
        tensor=tensor, pipeline=pipeline, shard=shard, zero=zero,
        schedule="interleaved" if interleaved else "1f1b", virtual_stages=2 if interleaved else 1,
    )  # fmt: skip
    recipe = from_fields(Recipe, {
        "seq_len": 32, "micro_batch": 1, "global_batch": shard * pipeline * draw(st.sampled_from([1, 4])), "steps": 1,
        "precision": draw(st.sampled_from(["fp8-tensorwise", "fp8-rowwise", "fp8-block"])),
        "precision.master_weights": draw(st.booleans()), "precision.weight_caching": True,
    })  # fmt: skip
    return Run(model=spec, recipe=recipe, layout=layout, cluster=Cluster(count=layout.devices))


@settings(max_examples=12, deadline=None)
@given(spread())
@pytest.mark.long
def test_ranks_hold_two_bytes_for_each_weight_of_a_linear_layer_and_cast_it_once(run: Run) -> None:
    assert not list(run_problems(run))
    plain = replace(run, recipe=with_fields(run.recipe, {"precision.weight_caching": False}))
    spec, layout, block = run.model, run.layout, run.recipe.precision.kind == "fp8-block"
    mlp = 3 * spec.d_model * spec.feed_forward.d_ff
    mlp = (
        mlp if spec.experts is None else spec.experts.n_experts * mlp if block else 0
    )  # else products of experts in bf16
    weights = (2 * spec.d_model**2 + 2 * spec.d_model * spec.kv_heads * spec.head_size + mlp) // layout.tensor
    layers = spec.n_layers // layout.pipeline
    for one, other in zip(accounts(run), accounts(plain), strict=True):
        copies = dict(one.ledger.resident)["buffers"] - dict(other.ledger.resident)["buffers"]
        scales = copies - 2 * weights * layers
        assert 0 < scales < 0.15 * copies
        rest = [(name, nbytes) for name, nbytes in one.ledger.resident if name != "buffers"]
        assert rest == [(name, nbytes) for name, nbytes in other.ledger.resident if name != "buffers"]
        assert one.ledger.model_flops == other.ledger.model_flops
        assert one.ledger.kept_nbytes <= other.ledger.kept_nbytes
        casts = [each for each in one.ledger.entries if each.name == "copy_" or (block and _is_cast_of_weights(each))]
        assert {each.phase for each in casts} == {"optimizer"}
        assert all(name == "layers" for each in casts for name, _ in each.loop)


def _is_cast_of_weights(entry: Any) -> bool:
    return entry.name == "cast_by_block" and not entry.allocated


def test_more_micro_batches_cast_no_weight_again() -> None:
    def scaled(micro_batches: int, *, caching: bool) -> int:
        run = tiny_run(
            precision="fp8-rowwise", micro_batch=1, global_batch=micro_batches,
            **{"precision.weight_caching": caching},
        )  # fmt: skip
        return times(account(run), "aminmax")

    assert scaled(8, caching=False) == 2 * scaled(4, caching=False)
    assert scaled(8, caching=True) == 2 * scaled(4, caching=True) - 2 * 14


# What is refused


@contextmanager
def saying(sentence: str) -> Iterator[None]:
    with pytest.raises(tl.InvalidInput) as told:
        yield
    assert sentence in str(told.value)


def loaded(layout: dict[str, Any] | None = None, sets: Sequence[str] = (), **recipe: Any) -> Run:
    given = {"seq_len": 32, "global_batch": 8, "micro_batch": 1, "steps": 1, "precision.weight_caching": True, **recipe}
    count = (layout or {}).get("shard", 1)
    table = {"model": {"preset": "gpt2"}, "recipe": given, "layout": layout or {}, "cluster": {"count": count}}
    return tl.load(table, list(sets))


def test_kept_weights_need_a_precision_in_8_bits() -> None:
    for precision in ("bf16-mixed", "fp8-rowwise-sharded"):  # the second casts the copies that it gathers
        with saying(
            "recipe.precision.weight_caching = true: belongs to fp8-tensorwise, fp8-rowwise, fp8-block, mxfp8 and "
            f"nvfp4, and recipe.precision is {precision}; nearest that works: recipe.precision = fp8-tensorwise"
        ):
            loaded(precision=precision)
    assert loaded(precision="fp8-rowwise").recipe.precision.weight_caching


def test_sharded_parameters_are_not_kept_whole_in_8_bits() -> None:
    with saying(
        "recipe.precision.weight_caching = true: keeps whole weights in 8 bits, and parameters sharded at zero = 3 "
        "are gathered for each use and freed (Transformer Engine keeps none with FSDP2 either); zero = 1 and 2 have "
        "them "
        "whole"
    ):
        loaded({"shard": 2}, precision="fp8-tensorwise")
    for zero in (1, 2):
        assert loaded({"shard": 2, "zero": zero}, precision="fp8-tensorwise").layout.zero == zero
