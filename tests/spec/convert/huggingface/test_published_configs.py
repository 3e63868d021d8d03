"""Published config.json files of every family: the parameters they give, what they mean, and what is left out."""

import os
from dataclasses import fields, replace

import pytest
from published_configs import CONFIGS

os.environ["HF_HUB_OFFLINE"] = "1"

from trainledger.ledger.model.parameters import parameters
from trainledger.spec.block import Linear
from trainledger.spec.convert.huggingface import FAMILIES, family_of, from_config, left_out, to_config
from trainledger.spec.layers import kind_of
from trainledger.spec.problem import InvalidInput

# The parameters of transformers' modules (built below). Those of gpt-j-6b, bloom, phi-2, gemma-3-1b and others are the
# counts that the models' pages print; corrections of routers are not among them: they have no gradient.
COUNTS = {
    "gpt-j-6b": 6_050_882_784, "gpt-neox-20b": 20_554_567_680, "opt-125m": 125_239_296, "bloom": 176_247_271_424,
    "falcon-7b": 6_921_720_704, "falcon-40b": 41_303_293_952, "falcon-rw-1b": 1_311_625_216,
    "mpt-7b": 6_649_286_656, "phi-2": 2_779_683_840, "phi-3-mini-4k": 3_821_079_552, "starcoder2-3b": 3_030_371_328,
    "mistral-7b-v0.1": 7_241_732_096, "mixtral-8x7b": 46_702_792_704, "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360, "qwen3-30b-a3b": 30_532_122_624, "qwen1.5-moe-a2.7b": 14_315_784_192,
    "gemma-2b": 2_506_172_416, "gemma-2-27b": 27_227_128_320, "gemma-3-1b": 999_885_952,
    "gemma-3-12b": 11_766_034_176, "olmo-7b": 6_888_095_744, "olmo-2-7b": 7_298_617_344,
    "smollm3-3b": 3_075_098_624, "deepseek-v2-lite": 15_706_484_224, "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216, "glm-5": 743_911_199_232,
    "kimi-k2": 1_026_408_209_408, "gpt-oss-20b": 20_914_757_184,
    "glm-4.6": 352_797_814_784, "minimax-m2": 228_689_748_992, "hunyuan-a13b": 80_393_183_232,
    "ernie-4.5-0.3b": 360_748_032, "ernie-4.5-21b-a3b": 21_825_436_160, "exaone-4.0-1.2b": 1_279_391_488,
    "exaone-4.0-32b": 32_003_216_384, "olmo-3-7b": 7_298_011_136, "seed-oss-36b": 36_151_104_512,
    "qwen3-coder-30b": 30_532_122_624,
}  # fmt: skip


def fields_that_differ(one, other):
    return [each.name for each in fields(one) if getattr(one, each.name) != getattr(other, each.name)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_gives_the_published_count(name):
    count = parameters(from_config(CONFIGS[name]))
    assert count.total - count.by_component.get("multi-token prediction", 0) == COUNTS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_their_modules_have_as_many(name):
    import torch
    import transformers

    config = dict(CONFIGS[name].get("text_config", CONFIGS[name]))
    kind = config.pop("model_type").replace("kimi_k2", "deepseek_v3")
    config.pop("quantization_config", None)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == COUNTS[name]


def test_the_prediction_module_of_deepseek_v3_is_counted_apart():
    """README_WEIGHTS.md of DeepSeek-V3 counts 11.5 B parameters of its own in one module, beside 671 B."""
    spec = from_config(CONFIGS["deepseek-v3"])
    assert parameters(spec).by_component["multi-token prediction"] == pytest.approx(11.5e9, rel=0.01)
    plain = {key: value for key, value in CONFIGS["deepseek-v3"].items() if key != "quantization_config"}
    assert from_config(plain, for_weights=True).n_mtp_layers == 0


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"falcon-rw-1b", "hunyuan-a13b"}))
def test_a_published_config_can_be_written_again(name):
    spec = from_config(CONFIGS[name])
    kind = CONFIGS[name]["model_type"]
    again = to_config(spec, model_type=FAMILIES.get(kind, FAMILIES["gemma3_text"]).model_type)
    assert fields_that_differ(from_config(again), spec) in ([], ["name"])
    assert from_config(to_config(spec)) == replace(spec, name=family_of(spec).model_type)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_it_alike(name):
    """transformers turns the published form of version 4 into that of version 5: both must mean the same."""
    import transformers

    config = dict(CONFIGS[name])
    kind = config.pop("model_type").replace("kimi_k2", "deepseek_v3")
    theirs = transformers.AutoConfig.for_model(kind, **config).to_dict()
    assert "rope_theta" not in theirs
    assert fields_that_differ(from_config(theirs), from_config(CONFIGS[name])) in ([], ["name"])


# Keys whose defaults in transformers make no model: one expert, none chosen, or heads that the width is no multiple of.
NO_MODEL = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_moe": {"num_experts": 4},
}


WRITTEN = {kind for kind, family in FAMILIES.items() if not family.reads_only}


@pytest.mark.parametrize("kind", sorted(WRITTEN - {"kimi_k2"}))
def test_the_defaults_are_those_of_transformers(kind):
    """A config with all its defaults written out, and one with none but the sizes that are never absent."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **NO_MODEL.get(kind, {}))
    whole = {key: value for key, value in config.to_dict().items() if value is not None}
    family = FAMILIES[kind]
    needed = {key for name, key in family.keys.items() if name not in family.defaults}
    bare = {key: value for key, value in whole.items() if key in needed} | NO_MODEL.get(kind, {}) | {"model_type": kind}
    differ = fields_that_differ(from_config(bare), from_config(whole))
    assert differ in ([], ["n_mtp_layers"] if kind == "deepseek_v3" else [])


def test_what_is_left_out_is_reported():
    assert left_out(CONFIGS["gpt-oss-20b"]) == [
        "left out: quantization_config = a table: says how the weights are stored; formats are the recipe's here"
    ]
    assert left_out(CONFIGS["gemma-3-12b"]) == [
        "text_config alone is read: other inputs of a gemma3 than text are left out",
        "left out: model_type = 'gemma3': only its language model (gemma3_text) has weights here",
    ]
    assert left_out(CONFIGS["mpt-7b"]) == [
        "auto_map is left out: the code it names is not read, and the model type is built in"
    ]
    assert left_out(CONFIGS["ernie-4.5-21b-a3b"]) == [
        "num_nextn_predict_layers = 1 is left out: transformers builds no such module"
    ]
    stretched = CONFIGS["qwen2.5-7b"] | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert left_out(stretched) == ["rope_scaling is left out: dynamic scaling acts beyond the longest sequence only"]
    assert fields_that_differ(from_config(stretched), from_config(CONFIGS["qwen2.5-7b"])) == []


LONGROPE = {
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("phi-3-mini-4k", LONGROPE, "rope_scaling.short_factor = [1.0, "),
        ("gpt-oss-20b", {}, "quantization_config = a table: says how the weights are stored"),
        ("gpt-oss-20b", {"quantization_config": None, "swiglu_limit": 5.0}, "swiglu_limit = 5.0: changes what the"),
        ("gemma-3-12b", {}, "model_type = 'gemma3': only its language model"),
        ("falcon-rw-1b", {}, "alibi = true: falcon's slopes are rounded to bf16"),
        ("mpt-7b", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = 0.015625: transformers builds it otherwise"),
        (
            "mpt-7b",
            {"no_bias": False},
            "no_bias = false: transformers builds it otherwise; accounted for as llm-foundry",
        ),
        ("mpt-7b", {"expansion_ratio": 3}, "expansion_ratio = 3: transformers builds it otherwise"),
        ("mpt-7b", {"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max = 16: the slopes start at"),
        ("hunyuan-a13b", {}, "model_type = 'hunyuan_v1_moe': its query-key norms follow the rotation"),
        ("ernie-4.5-21b-a3b", {"moe_norm_min": 0.1}, "moe_norm_min = 0.1: changes what the model computes, not"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob = true: changes what the model computes, not"),
    ],
)
def test_what_changes_values_only_hinders_weights_but_no_account(name, changes, sentence):
    config = CONFIGS[name] | changes
    parameters(from_config(config))
    assert any(sentence in each for each in left_out(config))
    with pytest.raises(InvalidInput) as caught:
        from_config(config, for_weights=True)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            "opt-125m",
            {"word_embed_proj_dim": 512},
            "word_embed_proj_dim = 512: narrower embeddings with a separate projection",
        ),
        ("opt-125m", {"layerdrop": 0.1}, "layerdrop = 0.1: changes what the model costs"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "changes what the model costs"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2: must be 1 without new"),
        ("falcon-7b", {"num_ln_in_parallel_attn": True}, "num_ln_in_parallel_attn = true: must be a whole number"),
        ("falcon-40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3: must be 1 or 2"),
        ("falcon-40b", {"parallel_attn": False}, "parallel_attn = false: is true in every new_decoder_architecture"),
        ("mpt-7b", {"attn_config": {"alibi": 1}}, "attn_config.alibi = 1: must be true or false"),
        ("falcon-7b", {"n_head": 71}, "n_head = 71: is no key that is known here for falcon"),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln = true: changes what the model costs"),
        ("mpt-7b", {"attn_config": {"kv_n_heads": 8}}, "attn_config.kv_n_heads = 8: is no key that is known here"),
        ("mpt-7b", {"attn_config": [1]}, "attn_config = [1]: must be a JSON object"),
        ("mpt-7b", {"expansion_ratio": "4"}, "expansion_ratio = '4': must be a whole number from 1"),
        ("olmo-7b", {"clip_qkv": 8.0}, "clip_qkv = 8.0: changes what the model costs"),
        ("mixtral-8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: changes what the model costs"),
        ("mixtral-8x7b", {"num_local_experts": 1}, "num_local_experts = 1: must be at least 2"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [3]}, "mlp_only_layers = [3]: only the first layers may be dense here"),
        ("qwen3-30b-a3b", {"mlp_only_layers": "no"}, "mlp_only_layers = 'no': must be a list of layer numbers"),
        ("qwen2.5-7b", {"use_sliding_window": True, "max_window_layers": 9}, "only a window in all layers, or in all"),
        ("qwen2.5-7b", {"use_sliding_window": 1}, "use_sliding_window = 1: must be true or false"),
        ("gemma-2-27b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0: must be a number above 0"),
        ("gemma-2-27b", {"use_bidirectional_attention": True}, "changes what the model costs"),
        ("gemma-3-12b", {"text_config": None}, "text_config: must be the JSON object of a gemma3's language model"),
        ("gemma-3-12b", {"text_config": {}}, "hidden_size: is missing (hidden size)"),
        ("smollm3-3b", {"no_rope_layers": [0, 1, 1] * 12}, "only every n-th layer without positions is accounted for"),
        ("smollm3-3b", {"no_rope_layers": [True] * 36}, "must be a list of 0 and 1 for each of the 36 layers"),
        ("deepseek-v2-lite", {"topk_method": "best"}, "topk_method = 'best': must be greedy or group_limited_greedy"),
        ("deepseek-v2-lite", {"moe_layer_freq": 2}, "moe_layer_freq = 2: changes what the model costs"),
        ("minimax-m2", {"attn_type_list": [1, 0] * 31}, "attn_type_list = ["),
        ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias = false: changes what the model costs"),
        ("minimax-m2", {"use_qk_norm": False}, "use_qk_norm = false: is no key that is known here for minimax_m2"),
        ("minimax-m2", {"rotary_dim": 63}, "rotary_dim = 63: rotary positions turn pairs"),
        ("glm-4.6", {"n_group": 7}, "n_group = 7: must divide n_experts = 160"),
        ("hunyuan-a13b", {"moe_topk": [8] * 31 + [4]}, "must be a whole number, the same in all layers"),
        ("hunyuan-a13b", {"num_shared_expert": 2}, "num_shared_expert = 2: must be 1, the same in all layers"),
        ("hunyuan-a13b", {"moe_intermediate_size": [3072, 64]}, "must be 3072, the same in all layers"),
        ("hunyuan-a13b", {"use_cla": True}, "use_cla = true: is no key that is known here for hunyuan_v1_moe"),
        ("hunyuan-a13b", {"rope_scaling": {"type": "dynamic", "alpha": 0.5}}, "alpha = 0.5: must be a number from 1"),
        ("ernie-4.5-21b-a3b", {"moe_layer_end_index": 20}, "moe_layer_end_index = 20: the last layers are never dense"),
        ("exaone-4.0-1.2b", {"sliding_window": 64}, "sliding_window = 64: without local layers, no layer would have"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax': changes what the model costs"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads = 8: latent attention has a key and a value"),
        ("deepseek-v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63: rotary positions turn pairs"),
        ("deepseek-v3.2", {"qk_rope_head_dim": 256}, "index_head_dim = 128: must be at least rope_head_dim = 256"),
        ("deepseek-v3.2", {"q_lora_rank": None}, "reads the latent of the queries: model.attention.q_rank must be"),
        ("glm-5", {"indexer_types": ["full", "shared"] * 38 + ["full", "full"]}, "then in every n-th"),
        ("glm-5", {"mlp_layer_types": ["sparse"] * 78}, "must be dense in the first first_k_dense_replace = 3 layers"),
        ("phi-2", {"partial_rotary_factor": 0.001}, "rotates 0 of the 80 numbers of a head; rope rotates pairs"),
    ],
)
def test_what_costs_otherwise_is_refused_by_name(name, changes, sentence):
    with pytest.raises(InvalidInput) as caught:
        from_config(CONFIGS[name] | changes)
    assert sentence in str(caught.value)


def test_windows_of_every_kind():
    windows = {
        name: (from_config(config).attention.window, from_config(config).attention.global_every)
        for name, config in CONFIGS.items()
    }
    assert {name: each for name, each in windows.items() if each != (None, None)} == {
        "phi-3-mini-4k": (2047, None), "starcoder2-3b": (4096, None), "mistral-7b-v0.1": (4096, None),
        "gemma-2-27b": (4096, 2), "gemma-3-1b": (512, 6), "gemma-3-12b": (1024, 6), "gpt-oss-20b": (128, 2),
        "exaone-4.0-32b": (4096, 4), "olmo-3-7b": (4096, 4),
    }  # fmt: skip
    absent = {key: value for key, value in CONFIGS["mistral-7b-v0.1"].items() if key != "sliding_window"}
    assert from_config(absent).attention.window == 4096
    assert from_config(absent | {"sliding_window": None}).attention.window is None
    on = {"use_sliding_window": True, "sliding_window": 64}
    assert from_config(CONFIGS["qwen2.5-7b"] | on | {"max_window_layers": 0}).attention.window == 64
    assert from_config(CONFIGS["qwen2.5-7b"] | on | {"max_window_layers": 28}).attention.window is None
    listed = ["sliding_attention", "sliding_attention", "full_attention"] * 9 + ["sliding_attention"]
    assert from_config(CONFIGS["qwen2.5-7b"] | on | {"layer_types": listed}).attention.global_every == 3


def test_positions_of_every_kind():
    gemma, mini = from_config(CONFIGS["gemma-3-12b"]), from_config(CONFIGS["phi-3-mini-4k"] | LONGROPE)
    assert (gemma.rope.theta, gemma.rope.local_theta, gemma.rope.scaling) == (1e6, 1e4, Linear(factor=8.0))
    assert (mini.rope.scaling.kind, mini.rope.scaling.factor) == ("longrope", 32.0)
    assert mini.rope.scaling.original_seq_len == 4096
    assert mini.rope.scaling.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)  # sqrt(1 + ln 32 / ln 4096)
    deepseek = from_config(CONFIGS["deepseek-v3"])
    assert (deepseek.rope.scaling.attention_factor, deepseek.rope.scaling.factor, deepseek.rope.scaling.beta_fast) == (
        1.0,
        40.0,
        32.0,
    )
    assert deepseek.attention.scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)  # 1 + 0.1 ln 40
    assert (from_config(CONFIGS["phi-2"]).rope.dim, from_config(CONFIGS["gpt-neox-20b"]).rope.dim) == (32, 24)
    assert (from_config(CONFIGS["glm-4.6"]).rope.dim, from_config(CONFIGS["minimax-m2"]).rope.dim) == (64, 64)
    assert from_config(CONFIGS["exaone-4.0-32b"]).rope.skip_every == 4
    # The base of compute_ntk_alpha_rope_parameters in transformers: theta alpha ** (d / (d - 2)).
    assert from_config(CONFIGS["hunyuan-a13b"]).rope.theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    smol = from_config(CONFIGS["smollm3-3b"])
    assert [kind_of(smol, layer).rotary for layer in range(8)] == [True, True, True, False] * 2


def test_a_default_that_transformers_makes_of_nothing():
    """gpt-oss without rotary parameters has yarn's; a qwen2_moe without a window says 0."""
    bare = {key: value for key, value in CONFIGS["gpt-oss-20b"].items() if key != "rope_scaling"}
    assert fields_that_differ(from_config(bare), from_config(CONFIGS["gpt-oss-20b"])) == []
    assert from_config(CONFIGS["qwen1.5-moe-a2.7b"] | {"sliding_window": 0}).attention.window is None
