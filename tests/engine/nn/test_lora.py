"""Adapters beside frozen weights: what they compute, what learns, and what a run of them leaves."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import GPT2 as GPT2_FIELDS
from models import sizes as model_fields
from trainledger.engine.nn.init import draw, initialize
from trainledger.engine.nn.lora import NF4, AdaptedLinear, adapt, codes_of, dequantize, merge
from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.transformer import Transformer, build
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.savings import Lora

torch.set_num_threads(1)

LLAMA = model_fields(V=50, D=24, L=2, H=4, KV=2, F=40, T=16)
GPT2 = {**LLAMA, "attention.n_kv_heads": None, **GPT2_FIELDS}
EXPERTS = {
    "feed_forward": "experts",
    "feed_forward.n_experts": 4,
    "feed_forward.expert_d_ff": 12,
    "feed_forward.per_token": 2,
}
IDS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def run_of(model: dict[str, Any], **recipe: Any) -> Run:
    batch = {"seq_len": 15, "global_batch": 2, "steps": 3, "lora.rank": 3}
    return Run(model=from_fields(ModelSpec, model), recipe=from_fields(Recipe, {**batch, **recipe}))


def adapted(run: Run) -> Transformer:
    model = build(run.model, run.recipe)
    initialize(model, seed=0)
    adapt(model, run.recipe.lora)
    draw(model, seed=1)
    return model


def stir(model: nn.Module) -> None:
    """Give the adapters' second halves and magnitudes other values, as training would."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith(("lora_b", "lora_magnitude")):
                each.add_(torch.randn(each.shape, generator=generator) * 0.1)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_at_first_adapters_add_nothing(model: dict[str, Any]) -> None:
    run = run_of(model)
    plain = build(run.model, run.recipe)
    initialize(plain, seed=0)
    with torch.no_grad():
        assert torch.equal(plain(IDS), adapted(run)(IDS))
        torch.testing.assert_close(plain(IDS), adapted(run_of(model, **{"lora.dora": True}))(IDS))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base_format", [None, "bf16", "int8", "nf4"])
def test_merged_weights_do_what_weights_and_adapters_do(base_format: str | None, dora: bool) -> None:
    model = adapted(run_of(GPT2, **{"lora.base_format": base_format, "lora.dora": dora})).eval()
    stir(model)
    with torch.no_grad():
        before = model(IDS)
        merge(model)
        torch.testing.assert_close(model(IDS), before, atol=2e-5, rtol=1e-4)
    assert not any(isinstance(each, AdaptedLinear) for each in model.modules())
    assert set(model.state_dict()) == set(build(run_of(GPT2).model, run_of(GPT2).recipe).state_dict())


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("linear",), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (("attention",), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (("q_proj", "mlp"), {"q_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_adapters_learn_and_nothing_else(targets: tuple[str, ...], names: set[str]) -> None:
    model = adapted(run_of(LLAMA, **{"lora.targets": targets}))
    stir(model)
    next_token_loss(model(IDS[:, :-1]), IDS[:, 1:]).backward()
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name.split(".")[3] for name in trained} == names
    assert len(trained) == 2 * 2 * len(names)
    for name, each in model.named_parameters():
        assert (each.grad is not None and bool(each.grad.abs().sum() > 0)) == (name in trained), name


def test_gradients_are_those_of_the_whole_weight_through_the_adapter() -> None:
    """With W + s B A as one weight, dA = s B^T dW and dB = s dW A^T."""
    torch.manual_seed(0)
    frozen, x, towards = nn.Linear(6, 5), torch.randn(7, 6), torch.randn(7, 5)
    layer = AdaptedLinear(frozen, Lora(rank=3, alpha=6.0), adapted=True)
    assert layer.lora_a is not None
    assert layer.lora_b is not None
    with torch.no_grad():
        layer.lora_a.copy_(torch.randn(3, 6))
        layer.lora_b.copy_(torch.randn(5, 3))
    (layer(x) * towards).sum().backward()
    whole = towards.T @ x
    torch.testing.assert_close(layer.lora_a.grad, 2.0 * layer.lora_b.detach().T @ whole)
    torch.testing.assert_close(layer.lora_b.grad, 2.0 * whole @ layer.lora_a.detach().T)


STACKS = ("gate_up_proj", "down_proj")
OF_PEFT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dora": (GPT2, {"lora.dora": True}, {"target_modules": "all-linear", "use_dora": True}),
    "dora with dropout": (
        GPT2, {"lora.dora": True, "lora.dropout": 0.2},
        {"target_modules": "all-linear", "use_dora": True, "lora_dropout": 0.2},
    ),
    "experts": (
        LLAMA | EXPERTS, {"lora.targets": ["attention", "experts"]},
        {"target_modules": r".*_proj", "target_parameters": [f"experts.{stack}" for stack in STACKS]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_PEFT)
def test_adapters_learn_as_in_peft(case: str) -> None:
    """The same losses from the same start, kept bytes and matmuls of PEFT's own layers."""
    peft = pytest.importorskip("peft")
    from trainledger.trace.step import trace

    sizes, recipe, theirs_of = OF_PEFT[case]
    run = run_of(sizes, **recipe)
    ours, theirs = adapted(run).train(), build(run.model, run.recipe).train()
    initialize(theirs, seed=0)
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=16, **theirs_of), theirs.layers)
    letters = {"lora_A.default.weight": "lora_a", "lora_B.default.weight": "lora_b"}
    own = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        for theirs_part, part in letters.items():
            if name.endswith(theirs_part) and ".experts." in name:
                stack = STACKS["base_layer" not in name]
                value = own[f"{name.partition('.experts.')[0]}.experts.{part}_{stack}"].data
                parameter.data.copy_(value.flatten(0, 1) if part == "lora_a" else value.permute(1, 2, 0).flatten(1))
            elif name.endswith(theirs_part):
                parameter.data.copy_(own[name.replace(theirs_part, part)].data)
        parameter.requires_grad_(".lora_" in name)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    losses: dict[str, list[float]] = {}
    ledgers = []
    for name, model in (("ours", ours), ("theirs", theirs)):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-5)
        torch.manual_seed(0)
        for _ in range(4):
            loss = next_token_loss(model(IDS[:, :-1]), IDS[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.setdefault(name, []).append(loss.item())
        ledgers.append(trace(model, IDS[:, :-1], loss=lambda x: next_token_loss(x, IDS[:, 1:]), kernels="cuda"))
    assert losses["ours"][0] > losses["ours"][-1] + 0.1
    assert losses["ours"] == pytest.approx(losses["theirs"], rel=1e-5)
    mine, other = ledgers
    # To register what it adds to a weight PEFT computes it once more in each forward (torch's check of its shape).
    folds = sum(entry.flops for entry in mine if entry.name == "baddbmm")
    assert (mine.matmul_flops + folds, mine.kept_nbytes) == (other.matmul_flops, other.kept_nbytes)
    assert bool(folds) == (case == "experts")


@settings(max_examples=40, deadline=None)
@given(
    d_out=st.integers(1, 70), d_in=st.integers(1, 70), scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_quantized_weight_comes_back_to_within_a_step(d_out: int, d_in: int, scale: float, seed: int) -> None:
    weight = scale * torch.randn(d_out, d_in, generator=torch.Generator().manual_seed(seed))
    blocks = {"int8": 2048, "nf4": 64}
    # Half a step of the codes, and what an 8-bit scale itself is off.
    steps = {"bf16": 2**-8, "int8": 0.5 / 127, "nf4": max(b - a for a, b in pairwise(NF4)) / 2}
    for name, step in steps.items():
        again = dequantize(list(codes_of(weight, name)), name, d_out, d_in, torch.float32)
        assert again.shape == weight.shape
        flat, found = weight.flatten(), again.flatten()
        if name == "bf16":
            assert ((found - flat).abs() <= step * flat.abs()).all()
            continue
        for first in range(0, flat.numel(), blocks[name]):
            block = slice(first, first + blocks[name])
            largest = flat[block].abs().max()
            off = largest * (step + (0.08 if name == "nf4" else 0)) + 1e-6 * scale
            assert ((found[block] - flat[block]).abs() <= off).all(), name


def test_zeros_stay_zeros() -> None:
    for name in ("int8", "nf4"):
        assert dequantize(list(codes_of(torch.zeros(3, 5), name)), name, 3, 5, torch.float32).abs().sum() == 0


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"lora.base_format": "nf4", "lora.dropout": 0.2},
        {"precision": "bf16-mixed"},
        {"lora.dora": True},
        {"lora.whole": ["embed_tokens", "lm_head"]},
        {"lora.targets": ["q_proj", "experts"]},
        {"lora.targets": ["linear", "experts"], "lora.experts": "rows", "lora.dropout": 0.2, "lora.base_format": "nf4"},
    ],
)
def test_a_run_goes_on_where_it_was_stopped(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Trained in one go or stopped and resumed: the same bits; the adapters moved and the base did not."""
    from safetensors.torch import load_file

    from trainledger.answers.load import load
    from trainledger.engine.train.engine import train
    from trainledger.engine.train.trained import load_trained

    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    table = {
        "model": {
            **{k: v for k, v in LLAMA.items() if v is not None}, "vocab_size": 257,
            **(EXPERTS if "experts" in recipe.get("lora.targets", ()) else {}),
        },
        "recipe": {
            "seq_len": 16, "global_batch": 4, "micro_batch": 2, "steps": 4, "checkpoints.every": 2, "lora.rank": 2,
            "schedule.warmup_steps": 1, "evaluation.sequences": 2, "checkpoints.keep_last": 4, "learning_rate": 0.01,
            **recipe,
        },
        "data": {"path": str(text), "tokenizer": "bytes", "validation_fraction": 0.2, "cache": str(tmp_path / "cache")},
        "cluster": {"backend": "cpu"},
    }  # fmt: skip
    run = load(table)
    quiet = lambda sentence: None  # noqa: E731
    whole = train(run, tmp_path / "whole", say=quiet).checkpoint
    train(run, tmp_path / "cut", say=quiet)
    import shutil

    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000004")
    resumed = train(run, tmp_path / "cut", resume=True, say=quiet).checkpoint
    first, last, again = (
        load_file(each / "model.safetensors") for each in (whole.parent / "step-00000002", whole, resumed)
    )
    assert last.keys() == again.keys()
    for name, value in last.items():
        assert torch.equal(value, again[name]), name
        beside = name.startswith(tuple(recipe.get("lora.whole", ["none"])))
        assert torch.equal(value, first[name]) == (".lora_" not in name and not beside), name
    states = load_file(whole / "optimizer.safetensors")
    assert all(".lora_" in name for name in states) == ("lora.whole" not in recipe)
    model = load_trained(tmp_path / "whole", quiet).model
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert all(each.dtype == torch.float32 for each in model.parameters())


@pytest.mark.parametrize(
    ("model", "recipe", "sentence"),
    [
        (
            {},
            {"lora.targets": ("q_prj",)},
            "recipe.lora.targets = 'q_prj': must be of linear, attention, mlp, experts, q_proj, k_proj, v_proj, "
            "o_proj, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, gate_proj, up_proj, down_proj, "
            "shared_expert_gate, latent_in, latent_out; nearest that works: q_proj",
        ),
        (
            {},
            {"precision": "fp16"},
            "recipe.precision = 'fp16': is not accounted for with frozen weights; nearest that works: fp16-mixed",
        ),
        (
            {},
            {"lora.targets": ("experts",)},
            "recipe.lora.targets = ['experts']: the model has no experts (model.feed_forward); "
            "nearest that works: linear",
        ),
        (
            EXPERTS,
            {"lora.targets": ("experts",), "lora.dropout": 0.1},
            "recipe.lora.dropout = 0.1: is of an adapter's input, which what is added to weights has not (but "
            "recipe.lora.experts = rows); nearest that works: 0.0",
        ),
        (
            EXPERTS,
            {"lora.targets": ("mlp",)},
            "recipe.lora.targets = ['mlp']: names no linear layer of this model: q_proj, k_proj, v_proj, o_proj; "
            "nearest that works: experts",
        ),
        (
            {"feed_forward": "experts", "feed_forward.n_experts": 4, "n_mtp_layers": 1},
            {},
            "model.n_mtp_layers = 1: have no adapters (recipe.lora): fine-tuning leaves them out; nearest that works: "
            "0",
        ),
        (
            {"feed_forward.gated": False, "feed_forward.activation": "gelu"},
            {"lora.targets": ("gate_proj",)},
            "recipe.lora.targets = ['gate_proj']: names no linear layer of this model: q_proj, k_proj, v_proj, o_proj, "
            "up_proj, down_proj; nearest that works: linear",
        ),
    ],
)
def test_what_does_not_work_is_reported(model: dict[str, Any], recipe: dict[str, Any], sentence: str) -> None:
    assert sentence in [str(each) for each in run_problems(run_of({**LLAMA, **model}, **recipe))]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"lora.dora": True},
        {"lora.whole": ["embed_tokens", "lm_head"]},
        {"lora.targets": ["q_proj", "experts"]},
        {"lora.targets": ["experts"], "lora.experts": "rows"},
    ],
)
def test_exported_adapters_are_those_that_peft_loads(
    more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from trainledger.answers.load import load
    from trainledger.cli import main
    from trainledger.engine.nn.huggingface import export_model
    from trainledger.engine.train.engine import train
    from trainledger.engine.train.step import derive
    from trainledger.engine.train.trained import load_trained

    text, quiet = tmp_path / "text.txt", lambda sentence: None
    text.write_text("to be or not to be, that is the question. " * 100)
    recipe = {"seq_len": 16, "global_batch": 4, "steps": 3, "lora.rank": 2, "lora.targets": ["q_proj", "mlp"]}
    sizes = {k: v for k, v in LLAMA.items() if v is not None} | {"vocab_size": 257, "attention.head_dim": 6}
    if "lora.targets" in more:
        sizes |= EXPERTS | {"attention.qk_norm": "head"}
    data = {"path": str(text), "tokenizer": "bytes", "validation_fraction": 0.2, "cache": str(tmp_path / "cache")}
    more = {**more, "schedule.warmup_steps": 1, "learning_rate": 0.05}
    run = load({"model": sizes, "recipe": recipe | more, "data": data, "cluster": {"backend": "cpu"}})
    train(run, tmp_path / "run", say=quiet)
    base = build(run.model, run.recipe)
    initialize(base, seed=derive(run.recipe.seed, "init"))
    export_model(base, tmp_path / "base")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapters"), "--adapters"]) == 0
    assert "PeftModel" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters").eval()
    ours = load_trained(tmp_path / "run", quiet).model.eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, ours(IDS), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(theirs.base_model.model(IDS).logits, base(IDS), atol=1e-3)
    assert main(["export", str(tmp_path / "base"), str(tmp_path / "none"), "--adapters"]) == 2
