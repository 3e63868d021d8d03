"""Models with mixers: the parameters that their published config.json gives are those of transformers' modules."""

import os
import re

import pytest
from published_configs import HYBRIDS

os.environ["HF_HUB_OFFLINE"] = "1"

from trainledger.ledger.model.parameters import parameters
from trainledger.spec.block import Experts
from trainledger.spec.convert.huggingface import from_config, left_out, to_config
from trainledger.spec.problem import InvalidInput

COUNTS = {
    "gemma-4-31b": 30_697_345_280, "gemma-4-26b-a4b": 25_233_141_760, "mimo-v2-flash": 308_778_768_832,
    "llama-4-scout": 107_769_861_120, "llama-4-maverick": 400_711_848_960,
    "qwen3-next-80b-a3b": 79_674_391_296, "qwen3.5-35b-a3b": 34_660_610_688,
    "nemotron-3-nano-30b-a3b": 31_577_937_344, "nemotron-h-56b": 56_324_350_464,
    "nemotron-3-ultra-550b-a55b": 549_308_968_960,
    "granite-4.0-h-small": 32_207_337_984, "falcon-h1-7b": 7_585_513_568, "lfm2-350m": 354_483_968,
    "lfm2-8b-a1b": 8_339_929_856, "kimi-linear-48b-a3b": 49_122_675_072,
}  # fmt: skip

GEMMA_4 = HYBRIDS["gemma-4-31b"]["text_config"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_parameters_are_those_of_transformers(name):
    import torch
    import transformers

    assert parameters(from_config(HYBRIDS[name])).total == COUNTS[name]
    config = dict(HYBRIDS[name].get("text_config", HYBRIDS[name]))
    with torch.device("meta"):
        kind = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        model = transformers.AutoModelForCausalLM.from_config(kind)
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == COUNTS[name]


def test_their_layers_and_what_a_token_passes_through():
    specs = {name: from_config(config) for name, config in HYBRIDS.items()}
    assert specs["qwen3-next-80b-a3b"].layers == "RRRA"
    assert specs["granite-4.0-h-small"].layers == "RRRRRARRRR"
    assert specs["falcon-h1-7b"].layers == "B"
    assert isinstance(specs["nemotron-3-nano-30b-a3b"].feed_forward, Experts)
    assert specs["nemotron-h-56b"].experts is None
    active = {name: round(parameters(spec).active / 1e9, 1) for name, spec in specs.items()}
    assert active["qwen3-next-80b-a3b"] == 3.9
    assert active["nemotron-3-nano-30b-a3b"] == 3.6
    assert active["kimi-linear-48b-a3b"] == 3.5


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("nemotron-3-nano-30b-a3b", {"moe_latent_size": 0}, "moe_latent_size = 0: must be at least 1"),
        ("nemotron-3-ultra-550b-a55b", {"layers_block_type": None}, "num_hidden_layers: is missing"),
        ("llama-4-scout", {"text_config": HYBRIDS["llama-4-scout"]["text_config"] | {"moe_layers": [3]}}, "every n-th"),
        ("gemma-4-31b", {"text_config": GEMMA_4 | {"num_hidden_layers": 59, "layer_types": None}}, "must end with a"),
        ("gemma-4-31b", {"text_config": GEMMA_4 | {"num_kv_shared_layers": 18}}, "keys and values of an earlier one"),
        ("gemma-4-31b", {"text_config": GEMMA_4 | {"enable_moe_block": True}}, "num_experts: is missing, and enable"),
        (
            "mimo-v2-flash",
            {"swa_head_dim": 128},
            "local layers have those of global ones here; nearest that works: 192",
        ),
        ("mimo-v2-flash", {"moe_layer_freq": [1] * 47 + [0]}, "must be 0 in the first of the 48 layers"),
        ("nemotron-h-56b", {"hybrid_override_pattern": "M*X"}, "layer_types = 'M*X': must be 118 of"),
        ("granite-4.0-h-small", {"mamba_d_head": 60}, "times mamba_n_heads = 128 must be 8192; nearest that works: 64"),
        ("granite-4.0-h-small", {"position_embedding_type": "alibi"}, "must be rope or nope"),
        ("falcon-h1-7b", {"projectors_bias": True}, "projectors_bias = true: changes what the model costs"),
        ("lfm2-350m", {"layer_types": ["conv", "ring"] * 8}, "must be 16 of conv, short_conv, full_attention"),
        ("kimi-linear-48b-a3b", {"mla_use_nope": False}, "mla_use_nope = false: changes what the model costs"),
    ],
)
def test_what_is_refused_by_name(name, changes, problem):
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        from_config(HYBRIDS[name] | changes)


def test_layers_of_llama_4():
    """Chunks of 8,192 in three of four layers, which alone have positions; experts in all layers or every second."""
    scout, maverick = (from_config(HYBRIDS[name]) for name in ("llama-4-scout", "llama-4-maverick"))
    for spec in (scout, maverick):
        assert (spec.attention.window, spec.attention.global_every, spec.rope.skip_every) == (8192, 4, 4)
        assert spec.attention.chunked
    assert (scout.attention.qk_norm, maverick.attention.qk_norm) == ("turned", None)
    assert (scout.experts.every, maverick.experts.every, maverick.feed_forward.d_ff) == (1, 2, 16384)
    assert any("its score multiplies what experts read" in note for note in left_out(HYBRIDS["llama-4-scout"]))


def test_global_layers_with_other_heads():
    """Of Gemma 4 wider heads with keys as values, of MiMo-V2 half the key-value heads and no sinks."""
    gemma, mimo = (from_config(HYBRIDS[name]) for name in ("gemma-4-31b", "mimo-v2-flash"))
    assert (gemma.head_size, gemma.kv_heads, gemma.attention.keys_as_values) == (256, 16, False)
    wide = gemma.of_layers(None)
    assert (wide.head_size, wide.kv_heads, wide.attention.keys_as_values) == (512, 4, True)
    assert (wide.rope.theta, wide.rope.scaling.turned) == (1e6, 0.25)
    assert (gemma.of_layers(1024).rope.theta, gemma.of_layers(1024).rope.scaling) == (1e4, None)
    assert mimo.layers.startswith("GAAAAGAAAAAG")
    assert (mimo.kv_heads, mimo.value_size, mimo.attention.window, mimo.rotary_size) == (8, 128, 129, 64)
    assert (mimo.of_layers(None).kv_heads, mimo.of_layers(None).attention.sinks) == (4, False)


def test_a_hybrid_without_any_mixer_is_a_plain_model():
    """Granite 4.0 micro lists attention in all of its layers."""
    plain = HYBRIDS["granite-4.0-h-small"] | {"layer_types": ["attention"] * 40, "num_local_experts": 0}
    spec = from_config(plain)
    assert spec.mixer is spec.layers is None
    assert spec.feed_forward.d_ff == 1536


def test_weights_and_files_of_hybrids_are_refused():
    with pytest.raises(InvalidInput, match="its weights are not read or written here"):
        from_config(HYBRIDS["lfm2-350m"], for_weights=True)
    with pytest.raises(InvalidInput):
        to_config(from_config(HYBRIDS["lfm2-350m"]))
