"""Import and export, with transformers as the witness: equal logits, equal bits, and sentences for the rest."""

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from trainledger.nn.huggingface import export_model, import_model
from trainledger.nn.init import initialize
from trainledger.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput

FEW = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def llama_specs(draw):
    kv_heads, ratio = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * ratio
    width = heads * draw(st.sampled_from([2, 4, 6, 10]))
    scaling = draw(st.sampled_from([{}, {"rope_factor": 8.0, "rope_original_seq_len": 16}]))
    return ModelSpec(
        vocab_size=draw(st.integers(5, 70)),
        d_model=width,
        n_layers=draw(st.integers(1, 3)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8, 14])),
        d_ff=draw(st.integers(3, 50)),
        max_seq_len=draw(st.sampled_from([17, 64])),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6, 1e-3])),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        rope_theta=draw(st.sampled_from([10000.0, 500000.0, 100.0])),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        **scaling,
    )


@st.composite
def gpt2_specs(draw):
    heads = draw(st.integers(1, 5))
    return ModelSpec(
        vocab_size=draw(st.integers(5, 70)),
        d_model=heads * draw(st.integers(1, 9)),
        n_layers=draw(st.integers(1, 3)),
        n_heads=heads,
        d_ff=draw(st.integers(3, 50)),
        max_seq_len=draw(st.sampled_from([17, 32])),
        norm="layernorm",
        norm_eps=draw(st.sampled_from([1e-5, 1e-3])),
        norm_bias=True,
        activation=draw(st.sampled_from(["gelu_tanh", "gelu", "silu"])),
        gated=False,
        positions="learned",
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=draw(st.booleans()),
    )


specs = st.one_of(llama_specs(), gpt2_specs())


def made(spec, seed=0):
    """A model whose every parameter, norms and biases too, is random."""
    model = Transformer(spec).eval()
    initialize(model, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim == 1:
                each.add_(torch.randn(each.shape, generator=generator) / 3)
    return model


def ids_for(spec, seed=0):
    return torch.randint(spec.vocab_size, (2, spec.max_seq_len), generator=torch.Generator().manual_seed(seed))


def theirs_from(config_class, model_class, seed=0, **fields):
    """A model of transformers with random weights in every parameter."""
    model = model_class(config_class(**fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            scale = 1 / 3 if each.ndim == 1 else each.shape[-1] ** -0.5
            each.add_(torch.randn(each.shape, generator=generator) * scale)
    return model


def opened(directory):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@torch.no_grad()
def assert_equal_logits(ours, theirs, ids):
    torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits, atol=1e-5, rtol=0)


@given(spec=specs, seed=st.integers(0, 99))
@FEW
def test_transformers_opens_an_export_with_equal_logits(spec, seed, tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "out"
    ours = made(spec, seed)
    export_model(ours, directory)
    theirs = opened(directory)
    assert theirs.dtype == torch.float32
    assert_equal_logits(ours, theirs, ids_for(spec, seed))
    # and back, bit for bit
    again = import_model(directory)
    assert list(again.state_dict()) == list(ours.state_dict())
    assert all(torch.equal(again.state_dict()[name], value) for name, value in ours.state_dict().items())
    assert (again.lm_head.weight is again.embed_tokens.weight) == spec.tie_embeddings


@given(spec=specs, seed=st.integers(0, 99))
@FEW
def test_what_transformers_saved_is_imported_with_equal_logits_and_exported_with_equal_bits(
    spec, seed, tmp_path_factory
):
    directory = tmp_path_factory.mktemp("import")
    if spec.positions == "rope":
        rope = {"rope_theta": spec.rope_theta, "rope_type": "default"}
        if spec.rope_factor:
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope["original_max_position_embeddings"] = spec.rope_original_seq_len
        theirs = theirs_from(
            transformers.LlamaConfig, transformers.LlamaForCausalLM, seed,
            vocab_size=spec.vocab_size, hidden_size=spec.d_model, intermediate_size=spec.d_ff,
            num_hidden_layers=spec.n_layers, num_attention_heads=spec.n_heads, num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_size, max_position_embeddings=spec.max_seq_len, rms_norm_eps=spec.norm_eps,
            rope_parameters=rope, attention_bias=spec.attention_bias, mlp_bias=spec.mlp_bias,
            tie_word_embeddings=spec.tie_embeddings,
        )  # fmt: skip
    else:
        theirs = theirs_from(
            transformers.GPT2Config, transformers.GPT2LMHeadModel, seed,
            vocab_size=spec.vocab_size, n_embd=spec.d_model, n_inner=spec.d_ff, n_layer=spec.n_layers,
            n_head=spec.n_heads, n_positions=spec.max_seq_len, layer_norm_epsilon=spec.norm_eps,
            tie_word_embeddings=spec.tie_embeddings,
        )  # fmt: skip
    theirs.save_pretrained(directory / "in")
    ours = import_model(directory / "in").eval()
    assert_equal_logits(ours, theirs, ids_for(spec, seed))
    export_model(ours, directory / "out")
    before, after = load_file(directory / "in/model.safetensors"), load_file(directory / "out/model.safetensors")
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
