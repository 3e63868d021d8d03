"""Import and export, with transformers as the witness: equal logits, equal bits, and sentences for the rest."""

import json
import os
import subprocess
import sys

from models import GPT2 as GPT2_FIELDS
from models import sizes

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from trainledger.engine.nn.huggingface import WRITTEN, TokenizerText, export_model, import_model
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.problem import InvalidInput

FEW = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
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
    scaling = draw(st.sampled_from([{}, {"positions.scaling.factor": 8.0, "positions.scaling.original_seq_len": 16}]))
    return from_fields(
        ModelSpec,
        {
            "vocab_size": draw(st.integers(5, 70)),
            "d_model": width,
            "n_layers": draw(st.integers(1, 3)),
            "attention.n_heads": heads,
            "attention.n_kv_heads": kv_heads,
            "attention.head_dim": draw(st.sampled_from([4, 8, 14])),
            "feed_forward.d_ff": draw(st.integers(3, 50)),
            "max_seq_len": draw(st.sampled_from([17, 64])),
            "norm.eps": draw(st.sampled_from([1e-5, 1e-6, 1e-3])),
            "feed_forward.activation": draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
            "positions.theta": draw(st.sampled_from([10000.0, 500000.0, 100.0])),
            "attention.bias": draw(st.booleans()),
            "feed_forward.bias": draw(st.booleans()),
            "tie_embeddings": draw(st.booleans()),
            **scaling,
        },
    )


@st.composite
def gpt2_specs(draw):
    heads = draw(st.integers(1, 5))
    return from_fields(
        ModelSpec,
        {
            **sizes(
                V=draw(st.integers(5, 70)),
                D=heads * draw(st.integers(10, 14)),
                L=draw(st.integers(1, 3)),
                H=heads,
                F=draw(st.integers(3, 50)),
                T=draw(st.sampled_from([17, 32])),
            ),
            "norm": "layernorm",
            "norm.eps": draw(st.sampled_from([1e-5, 1e-3])),
            "norm.bias": True,
            "feed_forward.activation": draw(st.sampled_from(["gelu_tanh", "gelu", "silu"])),
            "feed_forward.gated": False,
            "positions": "learned",
            "attention.bias": True,
            "feed_forward.bias": True,
            "tie_embeddings": draw(st.booleans()),
        },
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
    torch.manual_seed(seed)  # transformers initializes from the global generator
    model = model_class(config_class(**fields)).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape) * (1 / 3 if each.ndim == 1 else max(each.shape) ** -0.5))
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
    if spec.positions.kind == "rope":
        rope = {"rope_theta": spec.rope.theta, "rope_type": "default"}
        if spec.rope.scaling:
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope["original_max_position_embeddings"] = spec.rope.scaling.original_seq_len
        theirs = theirs_from(
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            seed,
            vocab_size=spec.vocab_size,
            hidden_size=spec.d_model,
            intermediate_size=spec.feed_forward.d_ff,
            num_hidden_layers=spec.n_layers,
            num_attention_heads=spec.attention.n_heads,
            num_key_value_heads=spec.kv_heads,
            max_position_embeddings=spec.max_seq_len,
            rms_norm_eps=spec.norm.eps,
            rope_parameters=rope,
            tie_word_embeddings=spec.tie_embeddings,
            head_dim=spec.head_size,
            attention_bias=spec.attention.bias,
            mlp_bias=spec.feed_forward.bias,
        )
    else:
        theirs = theirs_from(
            transformers.GPT2Config, transformers.GPT2LMHeadModel, seed,
            vocab_size=spec.vocab_size, n_embd=spec.d_model, n_inner=spec.feed_forward.d_ff, n_layer=spec.n_layers,
            n_head=spec.attention.n_heads, n_positions=spec.max_seq_len, layer_norm_epsilon=spec.norm.eps,
            tie_word_embeddings=spec.tie_embeddings,
        )  # fmt: skip
    theirs.save_pretrained(directory / "in")
    ours = import_model(directory / "in").eval()
    assert_equal_logits(ours, theirs, ids_for(spec, seed))
    export_model(ours, directory / "out")
    before, after = load_file(directory / "in/model.safetensors"), load_file(directory / "out/model.safetensors")
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


LLAMA = from_fields(ModelSpec, sizes(V=20, D=8, L=2, H=4, KV=2, F=12, T=16))
GPT2 = from_fields(ModelSpec, sizes(V=20, D=8, L=2, H=2, F=12, T=16, **GPT2_FIELDS))


def exported(spec, directory, **options):
    model = made(spec)
    export_model(model, directory, **options)
    return model


def change_tensors(directory, change, metadata=None):
    """Rewrite the weights of a directory with ``change`` applied to the dict of tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata=metadata)


def change_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def refusal(directory):
    with pytest.raises(InvalidInput) as caught:
        import_model(directory)
    return str(caught.value)


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_bf16_is_fp32_rounded_to_nearest_and_comes_back_exactly(spec, tmp_path):
    ours = exported(spec, tmp_path / "out", dtype="bf16")
    assert opened(tmp_path / "out").dtype == torch.bfloat16
    again = import_model(tmp_path / "out")
    for name, value in ours.state_dict().items():
        assert again.state_dict()[name].dtype == torch.float32
        assert torch.equal(again.state_dict()[name], value.bfloat16().float())
    export_model(again, tmp_path / "twice", "bf16")
    files = [(tmp_path / each / "model.safetensors").read_bytes() for each in ("out", "twice")]
    assert files[0] == files[1]


def test_an_imported_model_is_ready_to_train(tmp_path):
    exported(GPT2, tmp_path / "out")
    model = import_model(tmp_path / "out")
    assert all(each.requires_grad and each.is_contiguous() for each in model.parameters())
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in Transformer(GPT2).named_parameters()]
    model(ids_for(GPT2)).sum().backward()
    assert model.embed_tokens.weight.grad is model.lm_head.weight.grad is not None


def test_importing_does_not_hold_on_to_the_file(tmp_path):
    exported(LLAMA, tmp_path / "out")
    model = import_model(tmp_path / "out")
    before = model.norm.weight.clone()
    with (tmp_path / "out/model.safetensors").open("r+b") as file:
        file.write(b"\0" * (tmp_path / "out/model.safetensors").stat().st_size)
    assert torch.equal(model.norm.weight, before)


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_shards_are_read(spec, tmp_path):
    ours = exported(spec, tmp_path / "out")
    opened(tmp_path / "out").save_pretrained(tmp_path / "shards", max_shard_size="1KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    again = import_model(tmp_path / "shards").state_dict()
    assert all(torch.equal(again[name], value) for name, value in ours.state_dict().items())


def test_names_without_prefix_and_computed_tables_are_read(tmp_path):
    # As in the first published files of GPT-2.
    ours = exported(GPT2, tmp_path / "out")

    def older(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    change_tensors(tmp_path / "out", older)
    again = import_model(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], value) for name, value in ours.state_dict().items())


def test_a_tied_head_that_differs_is_refused(tmp_path):
    exported(GPT2, tmp_path / "out")
    change_tensors(tmp_path / "out", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(20, 8)}))
    assert "lm_head.weight: differs from the input embedding" in refusal(tmp_path / "out")


def test_tensors_that_do_not_fit_are_named_with_both_shapes(tmp_path):
    exported(LLAMA, tmp_path / "out")

    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(8, 8)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(12, 8, dtype=torch.int8)
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(2)

    change_tensors(tmp_path / "out", spoil)
    said = refusal(tmp_path / "out")
    assert "norm.weight: is missing; the model needs it with shape [8]" in said
    assert "layers.1.self_attn.k_proj.weight: has shape [8, 8]; the model needs [4, 8]" in said
    assert "layers.0.mlp.up_proj.weight: is stored as I8; F32, BF16, F16 are read" in said
    assert "q_norm.weight': has no place in this model" in said


def test_joined_gpt2_matrices_are_checked_whole(tmp_path):
    exported(GPT2, tmp_path / "out")
    name = "transformer.h.0.attn.c_attn.weight"
    change_tensors(tmp_path / "out", lambda tensors: tensors.update({name: torch.zeros(8, 25)}))
    assert "h.0.attn.c_attn.weight: has shape [8, 25]; the model needs [8, 24]" in refusal(tmp_path / "out")


def test_more_layers_than_tensors_is_said_before_they_are_built(tmp_path):
    exported(LLAMA, tmp_path / "out")
    change_config(tmp_path / "out", num_hidden_layers=100000)
    assert "number of layers = 100000: is more than the 21 tensors" in refusal(tmp_path / "out")


def test_sizes_that_are_not_the_files_are_refused(tmp_path):
    exported(LLAMA, tmp_path / "out")
    change_config(tmp_path / "out", hidden_size=10**6, max_position_embeddings=10**9)
    assert "embed_tokens.weight: has shape [20, 8]; the model needs [20, 1000000]" in refusal(tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_a_truncated_file_is_refused(keep, tmp_path):
    exported(LLAMA, tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors: cannot be read as safetensors" in refusal(tmp_path / "out")


def test_pickles_are_never_opened(tmp_path):
    exported(LLAMA, tmp_path / "out")
    (tmp_path / "out/model.safetensors").rename(tmp_path / "out/pytorch_model.bin")
    assert "pytorch_model.bin: is a pickle, which can run code and is never opened; convert it" in refusal(
        tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({"a": "../model.safetensors"}, "must be the name of a .safetensors file in the same directory"),
        ({"a": "/etc/passwd"}, "must be the name of a .safetensors file in the same directory"),
        ({"a": "gone.safetensors"}, "gone.safetensors: is a file of the index and is not there"),
        ({"a": 3}, "must hold file names"),
        ([], "must say in which file each tensor is"),
        ({}, "must say in which file each tensor is"),
    ],
)
def test_a_wrong_index_is_refused(weight_map, sentence, tmp_path):
    exported(LLAMA, tmp_path / "out")
    (tmp_path / "out/model.safetensors").unlink()
    (tmp_path / "out/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert sentence in refusal(tmp_path / "out")


def test_a_directory_without_weights_or_that_is_none_is_refused(tmp_path):
    assert "is not a directory with config.json" in refusal(tmp_path / "gone")
    assert "config.json: is not a file" in refusal(tmp_path)
    exported(LLAMA, tmp_path / "out")
    (tmp_path / "out/model.safetensors").unlink()
    assert "model.safetensors: is not there" in refusal(tmp_path / "out")


def test_an_export_never_costs_anybody_a_file(tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty directory is free
    exported(LLAMA, out)
    before = {each.name: each.read_bytes() for each in out.iterdir()}
    with pytest.raises(InvalidInput, match="exists and is not empty; --force replaces it"):
        exported(GPT2, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match=r"holds 'notes\.txt', which this command did not write"):
        exported(GPT2, out, force=True)
    (out / "notes.txt").unlink()
    assert {each.name: each.read_bytes() for each in out.iterdir()} == before
    exported(GPT2, out, force=True)
    assert import_model(out).spec.positions.kind == "learned"
    with pytest.raises(InvalidInput, match="exists and is not a directory"):
        exported(GPT2, out / "config.json", force=True)
    assert [each.name for each in tmp_path.iterdir()] == ["out"], "nothing else is left behind"


def test_a_failed_export_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        exported(LLAMA, tmp_path / "out", tokenizer=TokenizerText("\ud800", 0, "a"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInput, match="every llama has 'rope'"):
        exported(from_fields(ModelSpec, {**vars(LLAMA), "positions": "learned"}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


EXPORTER = """
import sys
from pathlib import Path
from trainledger.engine.nn.huggingface import export_model
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
fields = {"vocab_size": 2000, "d_model": 64, "n_layers": 2, "attention.n_heads": 2, "feed_forward.d_ff": 64}
model = Transformer(from_fields(ModelSpec, fields | {"max_seq_len": 8}))
for number in range(100000):
    export_model(model, Path(sys.argv[1]) / str(number))
    print(number, flush=True)
"""


@pytest.mark.process
def test_an_export_that_is_killed_is_there_whole_or_not_at_all(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", EXPORTER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    for _ in range(30):
        assert process.stdout.readline()
    process.kill()
    process.communicate()
    whole = [each for each in tmp_path.iterdir() if not each.name.startswith(".")]
    assert len(whole) >= 30
    first = import_model(tmp_path / "0").state_dict()
    for each in whole:
        again = import_model(each).state_dict()
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_tokenizer_goes_along(spec, tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    exported(spec, tmp_path / "out", tokenizer=TokenizerText(words.to_str(), 2, "</s>"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert (tokenizer.encode("b"), tokenizer.eos_token_id, tokenizer.model_max_length) == ([1], 2, 16)
    assert opened(tmp_path / "out").generation_config.eos_token_id == 2
    assert {each.name for each in (tmp_path / "out").iterdir()} == WRITTEN


def test_transformers_generates_past_the_ids_that_end_other_vocabularies(tmp_path):
    exported(LLAMA, tmp_path / "out")
    written = opened(tmp_path / "out").generate(torch.tensor([[1]]), max_new_tokens=12, do_sample=False)
    assert written.shape == (1, 13)
