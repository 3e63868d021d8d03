"""Initialization: variances that do not depend on depth or width, a first loss near ln(V), and nothing by accident."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainledger as tl
from models import GPT2 as GPT2_FIELDS
from models import sizes
from trainledger.cli import main
from trainledger.engine.nn.init import fill, initialize
from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.initialization import TRUNCATION
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.rules.model import model_problems

LLAMA = from_fields(ModelSpec, sizes(V=512, D=128, L=4, H=4, KV=2, F=344, T=64))
GPT2 = from_fields(ModelSpec, {**sizes(V=512, D=128, L=4, H=4, F=512, T=64), **GPT2_FIELDS, "tie_embeddings": False})
FAMILIES = pytest.mark.parametrize("family", [LLAMA, GPT2], ids=["llama", "gpt2"])
TIES = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def made(spec, seed=0):
    model = Transformer(spec).eval()
    initialize(model, seed=seed)
    return model


def ids_for(spec, batch=8):
    return torch.randint(spec.vocab_size, (batch, spec.max_seq_len), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def stream_variances(model):
    """The variance of the residual stream before the first block and after each."""
    found = []

    def note(_, inputs, output):
        if not found:
            found.append(float(inputs[0].var()))
        found.append(float(output.var()))

    handles = [layer.register_forward_hook(note) for layer in model.layers]
    model(ids_for(model.spec))
    for each in handles:
        each.remove()
    return found


@FAMILIES
def test_the_stream_has_variance_near_one_at_every_depth(family):
    ends = []
    for n_layers in (2, 8, 32):
        variances = stream_variances(made(replace(family, n_layers=n_layers)))
        assert variances[0] == pytest.approx(1, rel=0.05)
        assert all(0.9 < each < 1.7 for each in variances)
        ends.append(variances[-1])
    assert max(ends) / min(ends) < 1.05, "the end does not depend on the number of blocks"


@FAMILIES
def test_a_tied_stream_starts_small_and_ends_the_same_at_every_depth(family):
    ends = []
    for n_layers in (8, 16, 48):
        of_seeds = []
        for seed in range(3):  # one model of this width is 10 % off by chance
            variances = stream_variances(made(replace(family, n_layers=n_layers, tie_embeddings=True), seed))
            assert variances[0] == pytest.approx((2 if family is GPT2 else 1) / 128, rel=0.05)
            assert 0.3 < variances[-1] < 0.6
            of_seeds.append(variances[-1])
        ends.append(sum(of_seeds) / len(of_seeds))
    assert max(ends) / min(ends) < 1.3


@FAMILIES
def test_without_the_division_by_depth_the_stream_would_grow(family):
    model = made(replace(family, n_layers=32))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj.weight" in name or "down_proj.weight" in name:
                weight.mul_(math.sqrt(2 * 32))
    assert stream_variances(model)[-1] > 8


@FAMILIES
@pytest.mark.parametrize("d_model", [64, 256])
@torch.no_grad()
def test_projections_of_a_block_have_unit_variance_at_every_depth_and_width(family, d_model):
    model = made(with_fields(family, {"d_model": d_model, "n_layers": 12, "feed_forward.d_ff": 3 * d_model}))
    found = {}

    def note(name):
        return lambda module, inputs, output: found.update({name: float(output.var())})

    for name, module in model.named_modules():
        if name.split(".")[-1] in ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"):
            module.register_forward_hook(note(name))
    model(ids_for(model.spec))
    assert len(found) == 12 * (5 if family is LLAMA else 4)
    assert all(0.75 < each < 1.25 for each in found.values()), found


@FAMILIES
@TIES
@pytest.mark.parametrize("d_model", [64, 256])
@torch.no_grad()
def test_the_first_loss_is_near_that_of_guessing(family, tied, d_model):
    spec = replace(family, tie_embeddings=tied, d_model=d_model, vocab_size=2000)
    model, ids = made(spec), ids_for(spec)
    excess = float(next_token_loss(model(ids)[:, :-1], ids[:, 1:])) - math.log(2000)
    assert -0.05 < excess < (0.65 if tied else 0.2)


@FAMILIES
@TIES
@torch.no_grad()
def test_every_gradient_is_of_use_at_the_start(family, tied):
    spec = replace(family, tie_embeddings=tied, n_layers=16)
    model, ids = made(spec), ids_for(spec)
    with torch.enable_grad():
        next_token_loss(model(ids)[:, :-1], ids[:, 1:]).backward()
    for matrix in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        norms = [float(layer.get_submodule(matrix).weight.grad.norm()) for layer in model.layers]
        assert max(norms) / min(norms) < (12 if tied else 5), f"{matrix}: neither vanishing nor exploding in depth"


@FAMILIES
@TIES
def test_every_parameter_is_written_and_depends_on_the_seed_alone(family, tied):
    spec = replace(family, tie_embeddings=tied)
    torch.manual_seed(1)
    model = Transformer(spec)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(float("nan"))
    state = torch.get_rng_state()
    initialize(model, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    again, other = made(spec, seed=5).state_dict(), made(spec, seed=6).state_dict()
    for name, each in model.named_parameters():
        assert torch.equal(each, again[name])
        if each.ndim == 2:
            assert not torch.equal(each, other[name])
        else:
            assert torch.equal(each, torch.zeros_like(each) if name.endswith("bias") else torch.ones_like(each))


EVERYTHING = [
    with_fields(
        LLAMA,
        {
            "norm.plus_one": True,
            "norm_place": "sandwich",
            "attention.sinks": True,
            "attention.qk_norm": "head",
            "head_bias": True,
        },
    ),
    with_fields(GPT2, {"block": "parallel-two-norms", "embedding_norm": True, "norm.weight": True}),
    with_fields(
        LLAMA,
        {
            "attention.n_kv_heads": None,
            "attention": "latent",
            "attention.kv_rank": 32,
            "attention.q_rank": 48,
            "attention.nope_head_dim": 16,
            "attention.rope_head_dim": 8,
            "attention.v_head_dim": 16,
            "feed_forward": "experts",
            "feed_forward.n_experts": 4,
            "feed_forward.n_shared": 1,
            "feed_forward.n_dense_layers": 1,
            "feed_forward.bias": True,
            "feed_forward.router.bias": True,
            "norm.plus_one": True,
            "n_mtp_layers": 1,
        },
    ),
]


@pytest.mark.parametrize("spec", EVERYTHING, ids=["sandwich", "parallel", "latent experts"])
def test_every_kind_of_parameter_has_its_start(spec):
    assert not list(model_problems(spec))
    model = Transformer(spec)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(float("nan"))
    initialize(model, seed=0)
    ordinary = {"q_a_layernorm", "kv_a_layernorm"}  # norms inside latent attention multiply by their weight alone
    for name, each in model.named_parameters():
        module = name.split(".")[-2]
        if name.endswith(("bias", "sinks")):
            wanted = 0.0
        elif "norm" in module:
            wanted = 0.0 if spec.norm.plus_one and module not in ordinary else 1.0
        else:
            into_stream = any(part in name for part in ("o_proj", "down_proj"))
            by_rule = each.shape[-1] ** -0.5 / (math.sqrt(2 * spec.n_layers) if into_stream else 1)
            if module not in ("embed_tokens", "embed_positions", "lm_head"):
                assert float(each.std()) == pytest.approx(by_rule, rel=0.2 if each.numel() < 4096 else 0.05), name
            continue
        assert torch.equal(each, torch.full_like(each, wanted)), name


@torch.no_grad()
def test_scales_of_embedding_and_logits_are_taken_off():
    scaled = replace(LLAMA, embedding_scale=11.3, logit_scale=0.0625, vocab_size=2000)
    model, ids = made(scaled), ids_for(scaled)
    assert stream_variances(model)[0] == pytest.approx(1, rel=0.05)
    excess = float(next_token_loss(model(ids)[:, :-1], ids[:, 1:])) - math.log(2000)
    assert -0.05 < excess < 0.2


@given(fan_in=st.integers(200, 600), deviation=st.floats(1e-3, 10), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_a_filled_matrix_has_its_deviation_after_the_cut(fan_in, deviation, seed):
    weight = nn.Parameter(torch.empty(300, fan_in), requires_grad=False)
    fill(weight, deviation, torch.Generator().manual_seed(seed))
    assert float(weight.std()) == pytest.approx(deviation, rel=0.015)
    assert abs(float(weight.mean())) < 0.03 * deviation
    # A standard normal cut at 3 keeps 0.98658 of its deviation.
    assert float(weight.abs().max()) <= TRUNCATION / 0.9865 * deviation


def test_a_copy_of_lower_precision_is_the_rounded_one():
    full, half = made(LLAMA), Transformer(LLAMA).bfloat16()
    initialize(half, seed=0)
    assert torch.equal(half.lm_head.weight, full.lm_head.weight.bfloat16())


def test_a_seed_begins_with_the_same_weights_in_every_torch():
    weight = torch.empty(40, 50)
    fill(weight, 0.5, torch.Generator().manual_seed(3))
    assert weight[0, :4].tolist() == pytest.approx([-0.0388435, 0.1823887, -0.3963278, 0.0362504], rel=1e-5)
    if torch.__version__ >= (2, 12):  # 2.11 goes by the inverse of the distribution, from other random numbers
        wide = {"std": 1.0, "a": -TRUNCATION, "b": TRUNCATION}
        theirs = nn.init.trunc_normal_(torch.empty(40, 50), **wide, generator=torch.Generator().manual_seed(3))
        assert torch.allclose(weight / weight.std(), theirs / theirs.std(), rtol=1e-4)


@FAMILIES
@TIES
def test_explain_init_says_how_tensors_begin(family, tied):
    spec = replace(family, tie_embeddings=tied)
    tensors = tl.explain("init", spec).document().data()["tensors"]
    seen = set()
    for name, weight in made(spec).named_parameters():
        kind = ".".join(part for part in name.split(".")[name.startswith("layers.") :] if not part.isdigit())
        if weight.ndim > 1:
            seen.add(kind)
            assert tensors[kind]["shape"] == list(weight.shape)
            # A sample's deviation is 1 / sqrt(2 n) off: five of these.
            assert float(weight.std()) == pytest.approx(tensors[kind]["deviation"], rel=5 / (2 * weight.numel()) ** 0.5)
        else:
            assert kind not in tensors
    assert seen == set(tensors)


@FAMILIES
@TIES
@pytest.mark.parametrize("n_layers", [4, 16])
def test_the_predicted_variance_of_the_stream_is_that_of_the_model(family, tied, n_layers):
    spec = replace(family, n_layers=n_layers, tie_embeddings=tied, vocab_size=4096)
    data = tl.explain("init", spec, {"recipe.seq_len": spec.max_seq_len}).document().data()
    measured = torch.tensor([stream_variances(made(spec, seed)) for seed in range(3)]).mean(0)
    error = measured / torch.tensor(data["stream_variances"]) - 1
    # Of one model of this width each branch is some 10 % off by chance, beside a stream of variance 1 some 2 %; the
    # mean of three is nearer. A tied stream is made of branches alone, and what its tokens share is put into one mean
    # over all pairs, though the first tokens have more in common: it is predicted too low.
    least, most = (-0.06, 0.25) if tied else (-0.03, 0.03)
    assert least < error.min() <= error.max() < most


def test_what_is_not_predicted_is_said(capsys):
    assert main(["explain", "init", "mixtral-8x7b"]) == 0
    assert "is not predicted: of experts" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", "init", "gpt2", "--top", "3"]) == 2
    assert capsys.readouterr().err == "--top = 3: is no option of init\n"
