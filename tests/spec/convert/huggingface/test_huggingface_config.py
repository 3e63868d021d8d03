"""config.json to ModelSpec and back: what is understood, what is ignored, and what is refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import CONFIGS

import trainledger as tl
from models import GPT2 as GPT2_FIELDS
from models import sizes as model_fields
from trainledger.spec.convert.huggingface import LARGEST_NBYTES, from_config, left_out, read_json, to_config
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.rules.model import model_problems

# As published (llama 3.2 1B; gpt2).
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def refusal(config):
    with pytest.raises(InvalidInput) as caught:
        from_config(config)
    return str(caught.value)


def test_a_published_llama_config():
    assert from_config(LLAMA_32_1B) == from_fields(
        ModelSpec,
        {
            **model_fields(V=128256, D=2048, L=16, H=32, KV=8, F=8192, T=131072),
            "name": "llama",
            "positions.theta": 500000.0,
            "positions.scaling.factor": 32.0,
            "tie_embeddings": True,
        },
    )


def test_the_published_gpt2_config():
    assert from_config(GPT2) == from_fields(
        ModelSpec, model_fields(V=50257, D=768, L=12, H=12, F=3072, T=1024, name="gpt2", **GPT2_FIELDS)
    )
    assert left_out(GPT2) == [
        f"{key} = 0.1 is left out: dropout is recipe.dropout here"
        for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop")
    ]


def test_absent_keys_are_what_transformers_takes():
    spec = from_config(LLAMA)
    assert (spec.norm.eps, spec.feed_forward.activation, spec.rope.theta, spec.tie_embeddings) == (
        1e-6,
        "silu",
        10000.0,
        False,
    )
    assert (spec.kv_heads, spec.head_size) == (4, 4)
    nulls = {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None}
    assert from_config(LLAMA | nulls) == spec


def test_both_forms_of_rotary_parameters_are_one():
    old = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
    }
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **old["rope_scaling"]}}
    del new["rope_parameters"]["type"]
    spec = from_config(LLAMA | old)
    assert spec == from_config(LLAMA | new)
    assert (spec.rope.scaling.factor, spec.rope.scaling.original_seq_len, spec.rope.theta) == (8.0, 64, 5e5)
    assert from_config(LLAMA | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}).rope.theta == 7.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.rope_type = 'mrope': must be one of default, linear"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type = ['yarn']: must be one of"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: must be a number (factor by which"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor = 0.5: must be at least 1"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.short_factor: must be a list of numbers"),
        ({"rope_parameters": {"full_attention": {}}}, "differs by layer, which no llama does"),
        (
            {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
            "rope_scaling.factor = 2.0: is no key of the rope type",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor: must be a number"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5},
            "rope_theta = 500000.0: contradicts rope_parameters.rope_theta = 10000.0",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5: every llama rotates whole heads",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: every llama rotates whole heads"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor = 'half': must be a number above 0 and at most 1"),
        ({"rope_scaling": ["linear"]}, "rope_scaling = ['linear']: must be a JSON object"),
        ({"sliding_window": 4096}, "sliding_window = 4096: changes what the model costs"),
        ({"layer_types": ["sliding_attention"] * 2}, "only full_attention are accounted for in llama"),
        ({"layer_types": ["full_attention"]}, "layer_types = ['full_attention']: has 1 entries for 2 layers"),
        ({"layer_types": {"a": 1}}, "layer_types = a table: only full_attention"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not accounted for; llama here is LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM': must be a list of names"),
        ({"qk_norm": True}, "qk_norm = true: is no key that is known here for llama; it may change the model"),
        ({"n_embd": 16}, "n_embd = 16: is no key that is known here for llama"),
        ({"hidden_act": "xielu"}, "hidden_act = 'xielu': must be one of silu, swish, gelu"),
        ({"hidden_act": ["silu"]}, "hidden_act = ['silu']: must be one of silu, swish, gelu"),
        ({"hidden_size": "16"}, "hidden_size = '16': must be a number"),
        ({"hidden_size": True}, "hidden_size = true: must be a whole number"),
        ({"hidden_size": 16.5}, "hidden_size = 16.5: must be a whole number"),
        ({"hidden_size": 0}, "hidden_size = 0: must be at least 1"),
        ({"hidden_size": 10**40}, "hidden_size = "),
        ({"hidden_size": [16]}, "hidden_size = [16]: must be a whole number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf: must be a finite number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05: must be above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings = 'true': must be true or false"),
        ({"num_attention_heads": 3}, "num_attention_heads = 3: must divide d_model = 16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide n_heads = 4"),
        ({"head_dim": 5}, "head_dim = 5: rotary positions turn pairs"),
        ({"num_hidden_layers": None}, "num_hidden_layers: is missing (Transformer blocks)"),
        ({"model_type": "mamba"}, "model_type = 'mamba': must be one of the model types that are known here: llama, "),
        ({"model_type": "qwen3_moee"}, "`trace module:build` any other model; nearest that works: qwen3_moe"),
        ({"model_type": ""}, "kimi_linear. `trainledger trace --hf FILE` traces a class of transformers"),
        ({"model_type": ["llama"]}, "model_type = ['llama']: must be one of"),
        ({"model_type": None}, "model_type: must be one of"),
    ],
)
def test_what_is_not_built_here_is_refused_by_name(changes, sentence):
    assert sentence in refusal(LLAMA | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"scale_attn_weights": False},
        {"add_cross_attention": True},
        {"rope_theta": 10000.0},
    ],
)
def test_gpt2_variants_are_refused_by_name(changes):
    assert f"{next(iter(changes))} = " in refusal(GPT2 | changes)


def test_gpt2_keys_by_their_other_names():
    other = {key: value for key, value in GPT2.items() if key != "n_embd"} | {"hidden_size": 768}
    assert from_config(other) == from_config(GPT2)
    assert "hidden_size = 769: is n_embd by another name, which is 768" in refusal(GPT2 | {"hidden_size": 769})


def test_all_problems_come_at_once_but_not_without_end():
    said = refusal(LLAMA | {"hidden_size": -1, "hidden_act": 3, "sliding_window": 1})
    assert all(key in said for key in ("hidden_size", "hidden_act", "sliding_window"))
    said = refusal(LLAMA | {f"key{number}": "x" * 10000 for number in range(10000)} | {"\x1b[31m": 1})
    assert len(said.splitlines()) <= 22
    assert len(said) < 5000
    assert "\x1b" not in said


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
rope_tables = st.dictionaries(
    st.sampled_from(["rope_type", "type", "rope_theta", "factor", "short_factor", "long_factor", "beta_fast", "mscale",
                     "original_max_position_embeddings", "full_attention", "sliding_attention", "mscale_all_dim"]),
    st.sampled_from(["yarn", "longrope", "llama3", "linear", "su"]) | st.integers(-1, 99) | st.floats() | json_values,
    max_size=6,
)  # fmt: skip
known_keys = st.sampled_from(sorted({key for each in [LLAMA_32_1B, GPT2, *CONFIGS.values()] for key in each}))
given_values = (
    json_values | st.integers(-1, 70) | rope_tables | st.lists(st.sampled_from(["full_attention", "x", 0, 1]))
)


@given(
    base=st.sampled_from([LLAMA_32_1B, GPT2, {}, *CONFIGS.values()]),
    changes=st.dictionaries(known_keys | st.text() | st.sampled_from(["rope_parameters", "layer_types"]), given_values),
    without=st.sets(known_keys, max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_any_json_is_a_spec_or_a_sentence(base, changes, without):
    config = {key: value for key, value in {**base, **changes}.items() if key not in without}
    try:
        spec = from_config(config)
        left_out(config)
    except InvalidInput as error:
        said = error
    else:
        assert list(model_problems(spec)) == []
        return
    assert said.problems
    assert all(line.isprintable() for line in str(said).split("\n"))


@given(
    kv_heads=st.integers(1, 4), ratio=st.integers(1, 4), half_width=st.integers(1, 8), own=st.integers(1, 9),
    gpt2=st.booleans(), flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    activation=st.sampled_from(["silu", "gelu", "gelu_tanh"]), factor=st.sampled_from([None, 1.0, 8.0]),
)  # fmt: skip
def test_a_spec_survives_its_config(kv_heads, ratio, half_width, own, gpt2, flags, activation, factor):
    heads = kv_heads * ratio
    sizes = {
        "vocab_size": 99, "d_model": 2 * half_width * heads, "n_layers": 2, "attention.n_heads": heads,
        "feed_forward.d_ff": 7, "max_seq_len": 64, "feed_forward.activation": activation, "tie_embeddings": flags[0],
    }  # fmt: skip
    if gpt2:
        spec = from_fields(
            ModelSpec,
            {
                "name": "gpt2",
                **sizes,
                "norm": "layernorm",
                "norm.bias": True,
                "feed_forward.gated": False,
                "positions": "learned",
                "attention.bias": True,
                "feed_forward.bias": True,
            },
        )
    else:
        spec = from_fields(
            ModelSpec,
            {
                "name": "llama",
                **sizes,
                "attention.n_kv_heads": None if ratio == 1 else kv_heads,
                "attention.head_dim": None if own == half_width else 2 * own,
                "attention.bias": flags[1],
                "feed_forward.bias": flags[2],
                **({} if factor is None else {"positions.scaling.factor": factor}),
                "positions.theta": 123.0,
            },
        )
    config = json.loads(json.dumps(to_config(spec)))
    assert config["model_type"] == spec.name
    assert from_config(config) == spec


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"positions": "learned"}, ["nearest is llama", "model.positions = 'learned': every llama has 'rope'"]),
        ({"norm": "layernorm"}, ["model.norm = 'layernorm': every llama has 'rmsnorm'"]),
        ({"logit_softcap": 5.0}, ["model.logit_softcap = 5.0: here a llama has none"]),
    ],
)
def test_what_no_family_expresses_is_said(changes, sentences):
    spec = with_fields(from_config(LLAMA), changes)
    with pytest.raises(InvalidInput) as caught:
        to_config(spec)
    for each in sentences:
        assert each in str(caught.value)


def test_a_family_that_is_asked_for_says_which_fields_stand_in_the_way():
    spec = with_fields(from_config(GPT2), {"attention.n_kv_heads": 4, "attention.head_dim": 32, "norm.bias": False})
    with pytest.raises(InvalidInput) as caught:
        to_config(spec, model_type="gpt2")
    assert "gpt2 is no such model" in str(caught.value)
    assert {each.field for each in caught.value.problems} == {
        "model.norm.bias",
        "model.attention.head_dim",
        "model.attention.n_kv_heads",
    }
    with pytest.raises(InvalidInput, match="model type = 'gpt3': must be one of llama, "):
        to_config(spec, model_type="gpt3")


def test_heads_that_transformers_wants_to_divide_the_width():
    spec = with_fields(
        from_config(LLAMA), {"attention.n_heads": 3, "attention.head_dim": 4, "attention.n_kv_heads": None}
    )
    assert to_config(spec)["model_type"] == "mistral"
    with pytest.raises(
        InvalidInput, match=r"model\.attention\.n_heads = 3: transformers requires a divisor of d_model = 16"
    ):
        to_config(spec, model_type="llama")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "config.json: is not JSON"),
        (b"{", "config.json: is not JSON"),
        (b"\xff\xfe\x00", "config.json: is not JSON"),
        (b"[1, 2]", "config.json = [1, 2]: must be a JSON object"),
        (b"[" * 500_000, "config.json: is nested too deeply"),
        (b'{"a":' * 500_000, "config.json: is nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 6000 + b"}", "config.json: is not JSON"),
    ],
    ids=["empty", "cut", "binary", "list", "brackets", "braces", "digits"],
)
def test_files_that_are_no_config(content, sentence, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        read_json(tmp_path / "config.json")
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_of_this_directory_is_reported_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=rf"^config\.json: is not a file of {tmp_path}$"):
        read_json(Path("config.json"))
    Path("config.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"^config\.json: is not JSON: "):
        read_json(Path("config.json"))


def test_a_file_too_large_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(5 * LARGEST_NBYTES)
    with pytest.raises(InvalidInput, match=r"has 50 MB; more than 10 MB is no config\.json"):
        read_json(tmp_path / "config.json")
    with pytest.raises(InvalidInput, match="is not a file"):
        read_json(tmp_path)


def test_configs_are_read_without_torch():
    code = "import sys, trainledger.spec.convert.huggingface; assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


OTHERS = {  # files of the hub that are no config.json of transformers: what they are, and what works instead
    '{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.21.0"}': (
        "a model of diffusers",
        "trace file:build",
    ),
    '{"_class_name": "FluxTransformer2DModel", "num_layers": 19}': ("a model of diffusers", "trace file:build"),
    '{"_class_name": "AutoencoderKL"}': ("a model of diffusers", "AutoencoderKL.from_config("),
    '{"_class_name": "FluxPipeline", "transformer": ["diffusers", "x"]}': ("a pipeline", "transformer/config.json"),
    '{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "x"]}': ("a pipeline", "unet/config.json"),
    '{"_class_name": "DDPMScheduler"}': ("a scheduler", "has no weights"),
    '{"architecture": "resnet50", "num_classes": 1000}': ("a model of timm", "timm.create_model('resnet50')"),
    '{"peft_type": "LORA", "r": 8, "base_model_name_or_path": "a/b"}': (
        "an adapter",
        "plan a/b --set recipe.lora.rank=8",
    ),
    '{"tokenizer_class": "LlamaTokenizer"}': ("setting of a tokenizer", "the config.json beside it"),
}


@pytest.mark.parametrize("text", OTHERS)
def test_a_file_of_another_kind_is_named_with_what_works_instead(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for refused in (lambda: tl.load(str(path)), lambda: tl.model_from_hf(str(path))):
        with pytest.raises(InvalidInput) as caught:
            refused()
        assert all(said in str(caught.value) for said in OTHERS[text])
        assert "llama, mistral" not in str(caught.value)


@pytest.mark.torch
def test_so_it_is_where_a_class_of_transformers_is_traced(tmp_path: Path) -> None:
    model_of_config = pytest.importorskip("trainledger.trace.command").model_of_config
    pytest.importorskip("transformers")
    for text, said in OTHERS.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidInput) as caught:
            model_of_config(str(tmp_path))
        assert said[0] in str(caught.value)
