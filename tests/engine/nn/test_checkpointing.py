"""What is made again in backward changes no bit of loss or gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import GPT2 as GPT2_FIELDS
from models import sizes
from trainledger.engine.nn import checkpointing
from trainledger.engine.nn.checkpointing import offloading, run_layers, to_host
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.transformer import build
from trainledger.spec.layers import kind_of, layer_runs, segment_size
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.savings import FromStart

torch.set_num_threads(1)

LLAMA = sizes(V=50, D=24, L=5, H=4, KV=2, F=40, T=16)
GPT2 = {**LLAMA, "attention.n_kv_heads": None, **GPT2_FIELDS}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "activation_checkpointing.every": 2},
    {"activation_checkpointing": "full", "activation_checkpointing.every": 9},
    {"activation_checkpointing": "segments"},
    {"activation_checkpointing": "segments", "activation_checkpointing.n_blocks": 3},
    {"activation_checkpointing": "segments", "activation_checkpointing.n_blocks": 99},
    {"activation_checkpointing": "from-start"},
    {"activation_checkpointing": "selective"},
    {
        "activation_checkpointing": "selective",
        "activation_checkpointing.keep": ("attention",),
        "activation_checkpointing.every": 2,
    },
    {
        "activation_checkpointing": "selective",
        "activation_checkpointing.keep": ("mm", "addmm", "bmm", "_softmax", "native_dropout"),
    },
    {"activation_checkpointing": "attention"},
    {"activation_checkpointing": "offload"},
)


def run_of(model: dict[str, Any], **recipe: Any) -> Run:
    batch = {"seq_len": 15, "global_batch": 2, "steps": 3}
    return Run(model=from_fields(ModelSpec, model), recipe=from_fields(Recipe, {**batch, **recipe}))


def trained(run: Run) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of one batch and all gradients."""
    model = build(run.model, run.recipe).train()
    initialize(model, seed=0)
    ids = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=run.recipe.precision.kind == "bf16-mixed"):
        loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
    loss.backward()
    return loss, {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: " ".join(map(str, each.values())))
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "recipe",
    [
        {"dropout": 0.2},
        {"attention": "math", "dropout": 0.2, "attention_dropout": 0.2},
        {"attention": "math", "precision": "bf16-mixed"},
    ],
    ids=["sdpa", "math", "bf16"],
)
def test_no_bit_of_a_gradient_changes(variant: dict[str, Any], model: dict[str, Any], recipe: dict[str, Any]) -> None:
    run = run_of(model, **recipe, **variant)
    if list(run_problems(run)):
        assert variant["activation_checkpointing"] == "from-start"
        return
    plain, wanted = trained(run_of(model, **recipe))
    loss, found = trained(run)
    assert torch.equal(loss, plain)
    for name, gradient in wanted.items():
        assert gradient is not None
        assert found[name] is not None
        assert torch.equal(gradient, found[name]), name
    assert all(each.abs().sum() > 0 for name, each in wanted.items() if not name.endswith("k_proj.bias"))


def test_from_start_is_the_loop_by_hand() -> None:
    """A few layers without autograd's help: each input is made from the first one, and its layer's gradients taken."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(5)]
    count = 0

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return layer(x)  # type: ignore[no-any-return]

    x0 = torch.randn(4, 6)
    with torch.no_grad():
        y = x0
        for layer in layers:
            y = run(layer, y)
    gradient = torch.ones_like(y)
    for number in reversed(range(len(layers))):
        with torch.no_grad():
            x = x0
            for layer in layers[:number]:
                x = run(layer, x)
        x.requires_grad_()
        run(layers[number], x).backward(gradient)
        assert x.grad is not None
        gradient = x.grad
    assert count == 5 + 5 * 6 // 2
    by_hand = [each.grad for layer in layers for each in layer.parameters()]
    for layer in layers:
        layer.zero_grad()

    count = 0
    recipe = Recipe(seq_len=1, global_batch=1, steps=1, activation_checkpointing=FromStart())
    counted = [lambda x, _, layer=layer: run(layer, x) for layer in layers]
    run_layers(counted, [None] * 5, x0.clone().requires_grad_(), from_fields(ModelSpec, LLAMA), recipe).sum().backward()
    assert count == 5 + 5 * 6 // 2
    for mine, each in zip(by_hand, (each for layer in layers for each in layer.parameters()), strict=True):
        assert torch.equal(mine, each.grad)  # type: ignore[arg-type]


def test_layer_runs_are_the_groups_of_every_layer() -> None:
    """The runs, written out, are what a loop over all layers finds."""
    for n_layers in range(1, 15):
        for window in (
            {},
            {"attention.window": 4, "attention.global_every": 3},
            {"feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.n_dense_layers": min(3, n_layers)},
        ):
            spec = from_fields(ModelSpec, {**LLAMA, "n_layers": n_layers, **window})
            for variant in VARIANTS:
                recipe = from_fields(Recipe, {"seq_len": 1, "global_batch": 1, "steps": 1, **variant})
                runs = layer_runs(spec, recipe)
                kinds = [kind for each in runs for kind in each.kinds * each.count]
                assert kinds == [kind_of(spec, each) for each in range(n_layers)]
                groups = [group for each in runs for group in each.groups * each.count]
                assert sum(each.size for each in groups) == n_layers
                again = [each.again for each in groups for _ in range(each.size)]
                match recipe.activation_checkpointing.kind:
                    case "full" | "selective":
                        assert again == [
                            (each + 1) % recipe.activation_checkpointing.every == 0 for each in range(n_layers)
                        ]
                    case "segments":
                        size = segment_size(n_layers, recipe)
                        assert all(again)
                        assert [each.size for each in groups[:-1]] == [size] * (len(groups) - 1)
                    case _:
                        assert not any(again)


def test_a_thousand_layers_are_few_runs() -> None:
    spec = from_fields(ModelSpec, {**LLAMA, "n_layers": 10_000})
    for variant in VARIANTS:
        runs = layer_runs(spec, from_fields(Recipe, {"seq_len": 1, "global_batch": 1, "steps": 1, **variant}))
        assert sum(len(each.kinds) for each in runs) <= 201


def test_offloading_moves_what_blocks_keep_and_nothing_that_is_there_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, ...]] = []

    def noted(x: Tensor) -> Tensor:
        moved.append(tuple(x.shape))
        return to_host(x)

    monkeypatch.setattr(checkpointing, "to_host", noted)
    weight, shared = nn.Parameter(torch.randn(8, 9)), torch.randn(8)
    x = torch.randn(4, 8, requires_grad=True)
    with offloading([shared]), torch.autocast("cpu", torch.bfloat16):
        y = (x.exp() * shared) @ weight
    # exp keeps its output, the matmul with ``shared`` only what is there anyway, the last its low-precision input.
    assert moved == [(4, 8), (4, 8)]
    y.sum().backward()
    assert weight.grad is not None
    assert x.grad is not None


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (
            {"activation_checkpointing": "selective", "activation_checkpointing.keep": ("matmul",)},
            "recipe.activation_checkpointing.keep = 'matmul': must be of matmuls, attention, mm, addmm, bmm, "
            "_scaled_mm, grouped_mm, _scaled_grouped_mm, all_to_all, silu, gelu, _softmax, native_layer_norm, "
            "native_dropout; nearest that works: matmuls",
        ),
        (
            {"activation_checkpointing": "from-start", "precision": "bf16-mixed"},
            "recipe.activation_checkpointing = 'from-start': recomputation of the blocks before would leave "
            "low-precision copies (precision bf16-mixed); nearest that works: full",
        ),
    ],
)
def test_what_does_not_work_is_reported(recipe: dict[str, Any], sentence: str) -> None:
    assert [str(each) for each in run_problems(run_of(LLAMA, **recipe))] == [sentence]
