"""Models with mixers: the parameters that their published config.json gives are those of transformers' modules."""

import os
import re

import pytest
from hybrid_configs import HYBRIDS

os.environ["HF_HUB_OFFLINE"] = "1"

from trainledger.ledger.model.parameters import parameters
from trainledger.spec.block import Experts
from trainledger.spec.convert.huggingface import from_config, left_out, to_config
from trainledger.spec.problem import InvalidInput

COUNTS = {
    "llama-4-scout": 107_769_861_120, "llama-4-maverick": 400_711_848_960,
    "qwen3-next-80b-a3b": 79_674_391_296, "qwen3.5-35b-a3b": 34_660_610_688,
    "nemotron-3-nano-30b-a3b": 31_577_937_344, "nemotron-h-56b": 56_324_350_464,
    "nemotron-3-ultra-550b-a55b": 549_308_968_960,
    "granite-4.0-h-small": 32_207_337_984, "falcon-h1-7b": 7_585_513_568, "lfm2-350m": 354_483_968,
    "lfm2-8b-a1b": 8_339_929_856, "kimi-linear-48b-a3b": 49_122_675_072,
}  # fmt: skip


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
