"""Weights of every model type in and out, with transformers' own modules as the witness: equal logits, equal bits."""

from __future__ import annotations

import json
import os

from models import sizes as model_fields

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from thinned import thinned
from trainledger.answers.load import load
from trainledger.engine.nn.huggingface import export_model, import_model
from trainledger.engine.nn.transformer import Transformer
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse
from trainledger.spec.convert.huggingface import from_config, left_out, read_json
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.problem import InvalidInput

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES = {"vocab_size": 29, "hidden_size": 24, "num_attention_heads": 4, "pad_token_id": None}
LAYERS = {"num_hidden_layers": 3, "intermediate_size": 20}
GROUPED = {**LAYERS, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 10}
WINDOWS = {**HEADS, "num_hidden_layers": 4, "sliding_window": 5}
LATENT = {
    "kv_lora_rank": 6, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
_SHARES = ["full", "full", "shared", "shared", "full", "shared"]
INDEXER = {"index_n_heads": 2, "index_head_dim": 6, "index_topk": 5}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 1.0, "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 1000.0,
}  # fmt: skip
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
SPARSE = {**HEADS, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GLM_MOE = {**HEADS, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

# Model type, what sets this one apart, and the keys that its config is built with beside SIZES.
MODELS = [
    ("llama", "biased, llama3", {**HEADS, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("llama", "yarn", {**GROUPED, "rope_parameters": YARN}),
    ("llama", "linear", {**GROUPED, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3}}),
    ("mistral", "window", {**HEADS, "sliding_window": 5}),
    ("mistral", "no window", {**HEADS, "sliding_window": None}),
    ("qwen2", "", GROUPED),
    ("qwen2", "window", {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("qwen3", "", HEADS),
    ("qwen3", "biased, tied", {**HEADS, "attention_bias": True, "tie_word_embeddings": True}),
    ("gemma", "", HEADS),
    ("gemma2", "", {**WINDOWS, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 3.0}),
    ("gemma3_text", "", {**WINDOWS, "num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE}),
    ("phi3", "", {**GROUPED, "rope_parameters": {"partial_rotary_factor": 0.67}}),
    ("phi3", "window", {**GROUPED, "sliding_window": 4}),
    ("olmo", "", GROUPED),
    ("olmo2", "", GROUPED),
    ("olmo3", "", {**GROUPED, "num_hidden_layers": 5, "sliding_window": 4}),
    ("smollm3", "", {**GROUPED, "num_hidden_layers": 5}),
    ("arcee", "", GROUPED),
    ("seed_oss", "", HEADS),
    ("glm", "", {**HEADS, "head_dim": 8}),
    ("glm4", "", {**HEADS, "head_dim": 8}),
    ("cohere", "", GROUPED),
    ("cohere2", "", {**GROUPED, "num_hidden_layers": 5, "sliding_window": 4}),
    ("stablelm", "serial", {**GROUPED, "use_qkv_bias": True, "partial_rotary_factor": 0.67}),
    ("stablelm", "parallel", {**GROUPED, "use_parallel_residual": True, "partial_rotary_factor": 0.67}),
    ("gpt2", "", {"n_layer": 3, "n_positions": 32}),
    ("gptj", "", {"n_layer": 3, "n_positions": 32, "rotary_dim": 4}),
    ("gpt_neox", "parallel", {**LAYERS, "rotary_pct": 0.67}),
    ("gpt_neox", "serial", {**LAYERS, "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False}),
    ("opt", "", {"num_hidden_layers": 3, "ffn_dim": 20}),
    ("opt", "norms after", {"num_hidden_layers": 3, "ffn_dim": 20, "do_layer_norm_before": False}),
    ("opt", "bare", {"num_hidden_layers": 2, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("bloom", "", {"n_layer": 3}),
    ("falcon", "as 7b", {"num_hidden_layers": 3}),
    ("falcon", "as 40b", {"num_hidden_layers": 3, "new_decoder_architecture": True, "num_kv_heads": 2}),
    (
        "falcon", "as 11b",
        {
            "num_hidden_layers": 3, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    ("falcon", "serial", {"num_hidden_layers": 3, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("mpt", "", {"n_layers": 3}),
    ("mpt", "six heads", {"n_layers": 3, "n_heads": 6}),
    ("phi", "", {**GROUPED, "partial_rotary_factor": 0.67}),
    ("phi", "norms of heads", {**GROUPED, "qk_layernorm": True, "partial_rotary_factor": 0.67}),
    ("starcoder2", "", {**GROUPED, "sliding_window": 5}),
    ("mixtral", "", {**GROUPED, "num_local_experts": 5, "num_experts_per_tok": 2}),
    ("qwen2_moe", "", {**SPARSE, "head_dim": 6, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}),
    ("qwen3_moe", "", {**SPARSE, "norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    ("olmoe", "", {**GROUPED, "num_experts": 5, "num_experts_per_tok": 3}),
    ("deepseek_v2", "", {**LAYERS, **LATENT}),
    (
        "deepseek_v2", "groups, yarn",
        {
            **LAYERS, **LATENT, "q_lora_rank": None, "n_group": 3, "topk_group": 2,
            "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    ("deepseek_v3", "", {**LAYERS, **LATENT, "n_group": 3, "topk_group": 2}),
    (
        "deepseek_v3", "halves, yarn",
        {
            **LAYERS, **LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    ("deepseek_v32", "", {**LAYERS, **LATENT, **INDEXER, "n_group": 3, "topk_group": 2}),
    ("deepseek_v32", "halves", {**LAYERS, **LATENT, **INDEXER, "n_group": 1, "topk_group": 1, "index_topk": 40}),
    (
        "glm_moe_dsa", "shared choices",
        {**LAYERS, **LATENT, **INDEXER, "num_hidden_layers": 6, "indexer_types": _SHARES},
    ),
    ("glm_moe_dsa", "", {**LAYERS, **LATENT, **INDEXER, "attention_bias": True}),
    ("ernie4_5", "", HEADS),
    ("ernie4_5", "biased", {**HEADS, "use_bias": True, "tie_word_embeddings": False}),
    ("exaone4", "", {**GROUPED, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("exaone4", "window", {**WINDOWS, "num_hidden_layers": 5}),
    ("glm4_moe", "", {**GLM_MOE, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}),
    (
        "glm4_moe", "groups",
        {**GLM_MOE, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    ),
    ("minimax_m2", "", {**HEADS, "head_dim": 8, "rotary_dim": 4, "num_local_experts": 5, "num_experts_per_tok": 2}),
    (
        "ernie4_5_moe", "",
        {**GROUPED, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_interval": 2},
    ),
    ("gpt_oss", "", {**WINDOWS, "num_local_experts": 5, "num_experts_per_tok": 2}),
    ("gpt_oss", "plain rope", {**WINDOWS, "num_local_experts": 5, "rope_parameters": {"rope_type": "default"}}),
]  # fmt: skip
NAMED = [pytest.param(kind, keys, id=f"{kind} {what}".strip()) for kind, what, keys in MODELS]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def theirs_of(kind, keys, seed=0):
    """A model of transformers with random numbers in every parameter and every router's correction."""
    torch.manual_seed(seed)  # transformers initializes from the global generator
    # transformers gives a config its defaults in place
    keys = {key: dict(value) if isinstance(value, dict) else value for key, value in keys.items()}
    config = transformers.AutoConfig.for_model(kind, **SIZES | keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0, 1 / 3 if each.ndim == 1 else max(each.shape[-2:]) ** -0.5)
        for name, each in model.named_buffers():
            if name.endswith("correction_bias"):
                each.normal_(0, 0.1)
    return model


def opened(directory):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@torch.no_grad()
def assert_equal_logits(ours, theirs):
    ids = torch.randint(SIZES["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(1))
    wanted = theirs(input_ids=ids).logits
    assert wanted.std() > 1e-3, "logits that are all alike would prove nothing"
    torch.testing.assert_close(ours(ids), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "keys"), NAMED)
def test_weights_come_in_and_go_out(kind, keys, tmp_path):
    theirs = theirs_of(kind, keys)
    theirs.save_pretrained(tmp_path / "in")
    ours = import_model(tmp_path / "in").eval()
    assert_equal_logits(ours, theirs)

    export_model(ours, tmp_path / "out", model_type=kind)
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("in", "out"))
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in after.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_equal_logits(ours, opened(tmp_path / "out"))

    again = import_model(tmp_path / "out")
    assert list(again.state_dict()) == list(ours.state_dict())
    assert all(torch.equal(again.state_dict()[name], each) for name, each in ours.state_dict().items())
    assert all(each.is_contiguous() and not each.is_meta for each in (*again.parameters(), *again.buffers()))


KEYS = {f"{kind} {what}".strip(): (kind, keys) for kind, what, keys in MODELS}


@given(
    name=st.sampled_from(sorted(KEYS)), kv_heads=st.sampled_from([1, 2, 3]), ratio=st.sampled_from([1, 2, 4]),
    half_width=st.sampled_from([2, 3, 4]), layers=st.integers(1, 7), inner=st.integers(1, 9), seed=st.integers(0, 99),
    tied=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
@pytest.mark.long
def test_weights_of_any_sizes_come_in_and_go_out(
    name, kv_heads, ratio, half_width, layers, inner, seed, tied, tmp_path_factory
):
    """The same with other numbers of heads and layers, and other widths."""
    directory = tmp_path_factory.mktemp("any")
    kind, keys = KEYS[name]
    heads = kv_heads * ratio
    sizes = {
        "num_attention_heads": heads, "hidden_size": 4 * half_width * heads, "num_hidden_layers": layers,
        "intermediate_size": 4 * inner, "ffn_dim": 4 * inner, "num_key_value_heads": kv_heads, "num_kv_heads": kv_heads,
        "head_dim": 4 * half_width + 4, "tie_word_embeddings": tied, "partial_rotary_factor": 0.5, "rotary_pct": 0.5,
        "rope_parameters": {**keys.get("rope_parameters", {}), "partial_rotary_factor": 0.5},
    }  # fmt: skip
    if "kv_lora_rank" in keys:
        sizes["num_key_value_heads"] = heads
    if "partial_rotary_factor" not in keys.get("rope_parameters", {}):
        del sizes["rope_parameters"]
    if kind == "gptj":
        sizes["rotary_dim"] = 2 * half_width
    own = {"n_layer": "num_hidden_layers", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    always = {"num_attention_heads", "hidden_size", "tie_word_embeddings"}
    given = {key: sizes[own.get(key, key)] for key in {*keys, *always} if own.get(key, key) in sizes}
    if "layer_types" in keys:
        given["layer_types"] = ["full_attention"] * layers
    if "indexer_types" in keys:
        given["indexer_types"] = [*_SHARES, "shared"][:layers]
    theirs = theirs_of(kind, keys | given, seed)
    theirs.save_pretrained(directory / "in")
    ours = import_model(directory / "in").eval()
    assert_equal_logits(ours, theirs)
    export_model(ours, directory / "out", model_type=kind)
    before, after = (load_file(directory / each / "model.safetensors") for each in ("in", "out"))
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


FIRST = {kind: keys for kind, _, keys in reversed(MODELS)}
# Its weights have no place here, since its query-key norms follow the rotation; its account has.
FIRST["hunyuan_v1_moe"] = {**HEADS, "num_experts": 5, "moe_topk": 2}


@pytest.mark.parametrize("kind", thinned(sorted(FIRST)))
def test_the_closed_form_of_every_family_is_its_trace(kind):
    """A config as transformers writes it, accounted for by sizes alone and by the modules on fake tensors."""
    keys = {key: dict(value) if isinstance(value, dict) else value for key, value in FIRST[kind].items()}
    spec = from_config(transformers.AutoConfig.for_model(kind, **SIZES | keys).to_dict())
    fields = {name: value for name, value in vars(spec).items() if value is not None}
    unfused = spec.attention.sinks or spec.attention.softcap is not None
    recipe = {"seq_len": 12, "global_batch": 2, "micro_batch": 1, "steps": 1, "precision": "bf16-mixed"}
    run = load({"model": fields, "recipe": recipe | {"attention": "math" if unfused else "sdpa"}})
    closed, traced = account(run, backend="cpu"), rehearse(run)
    for amount in ("parameters", "flops", "model_flops", "kept_nbytes"):
        assert getattr(closed, amount) == getattr(traced, amount), amount
    kinds = [{kind: flops for kind, flops in each.by("kind").items() if flops} for each in (closed, traced)]
    assert kinds[0] == kinds[1]
    assert [closed.total(each) for each in ("read", "written")] == [traced.total(each) for each in ("read", "written")]
    assert closed.peak().nbytes == traced.peak().nbytes


def saved(name, directory):
    theirs = theirs_of(*KEYS[name])
    theirs.save_pretrained(directory)
    return theirs


def change(directory, tensors=None, **keys):
    """Rewrite a saved model with ``tensors`` applied to the dict of its tensors, and with other keys in its config."""
    if tensors is not None:
        found = load_file(directory / "model.safetensors")
        tensors(found)
        save_file(found, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | keys))


def refusal(directory):
    with pytest.raises(InvalidInput) as caught:
        import_model(directory)
    return str(caught.value)


STACKED = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"]


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_as_the_modules_have_them_are_read(name, tmp_path):
    theirs = saved(name, tmp_path)
    tied = theirs.config.tie_word_embeddings
    state = {key: each.contiguous() for key, each in theirs.state_dict().items() if not (tied and "lm_head" in key)}
    assert any(key.endswith("experts.gate_up_proj") for key in state)
    save_file(state, tmp_path / "model.safetensors")
    assert_equal_logits(import_model(tmp_path).eval(), theirs)


def test_modules_of_multi_token_prediction_are_left_out_and_that_is_reported(tmp_path):
    theirs = saved("deepseek_v3", tmp_path)
    last = len(theirs.model.layers)

    def add_module(tensors):
        tensors[f"model.layers.{last}.eh_proj.weight"] = torch.zeros(24, 48)
        tensors[f"model.layers.{last}.enorm.weight"] = torch.zeros(24)

    change(tmp_path, add_module, num_nextn_predict_layers=1)
    assert_equal_logits(import_model(tmp_path).eval(), theirs)
    assert left_out(read_json(tmp_path / "config.json"), for_weights=True) == [
        "1 modules of multi-token prediction are left out, as transformers leaves them out"
    ]
    change(tmp_path, num_nextn_predict_layers=0)
    assert f"layers.{last}.eh_proj.weight': has no place in this model" in refusal(tmp_path)


def test_kimi_is_deepseek_by_another_name(tmp_path):
    theirs = saved("deepseek_v3", tmp_path)
    change(tmp_path, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    assert_equal_logits(import_model(tmp_path).eval(), theirs)


def test_older_names_are_read(tmp_path):
    theirs = saved("gpt_neox parallel", tmp_path / "neox")

    def older_neox(tensors):
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
        for layer in range(3):
            tensors[f"gpt_neox.layers.{layer}.attention.bias"] = torch.ones(1, 1, 32, 32).tril()
            tensors[f"gpt_neox.layers.{layer}.attention.masked_bias"] = torch.tensor(-1e9)
            tensors[f"gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq"] = torch.ones(2)

    change(tmp_path / "neox", older_neox)
    assert_equal_logits(import_model(tmp_path / "neox").eval(), theirs)

    theirs = saved("opt", tmp_path / "opt")

    def older_opt(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change(tmp_path / "opt", older_opt)
    assert_equal_logits(import_model(tmp_path / "opt").eval(), theirs)


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("mistral window", {"quantization_config": {"quant_method": "fp8"}}, "says how the weights are stored"),
        ("falcon serial", {"alibi": True}, "alibi = true: falcon's slopes are rounded to bf16"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5: changes what the model computes"),
        ("llama yarn", {"rope_parameters": LONGROPE}, "a factor for every wave has no place in a ModelSpec"),
        ("qwen3", {"num_key_value_heads": 1}, "layers.0.self_attn.k_proj.weight: has shape [20, 24]; the model"),
        ("phi3", {"num_key_value_heads": 1}, "self_attn.qkv_proj.weight: has shape [48, 24]; the model needs [36, 24]"),
        ("mixtral", {"num_local_experts": 6}, "block_sparse_moe.experts.5.w1.weight: is missing; the model needs"),
        ("gpt_oss", {"num_local_experts": 6}, "mlp.experts.gate_up_proj: has shape [5, 24, 40]; the model needs [6,"),
        ("bloom", {"n_head": 5}, "n_head = 5: must divide d_model = 24"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_said(name, keys, sentence, tmp_path):
    saved(name, tmp_path)
    change(tmp_path, **keys)
    assert sentence in refusal(tmp_path)


def test_a_model_is_exported_as_the_type_that_is_asked_for(tmp_path):
    saved("phi3", tmp_path / "in")
    model = import_model(tmp_path / "in")
    with pytest.raises(InvalidInput, match=r"llama is no such model.*partial_rotary_factor|llama is no such model"):
        export_model(model, tmp_path / "out", model_type="llama")
    assert not (tmp_path / "out").exists()
    saved("llama yarn", tmp_path / "plain")
    model = import_model(tmp_path / "plain").eval()
    for kind in ("mistral", "qwen3_moe", "phi3"):
        if kind == "mistral":
            export_model(model, tmp_path / kind, model_type=kind)
            assert_equal_logits(model, opened(tmp_path / kind))
        else:
            with pytest.raises(InvalidInput, match="is no such model"):
                export_model(model, tmp_path / kind, model_type=kind)


def test_padded_rows_of_the_vocabulary_are_tokens_in_an_export(tmp_path):
    spec = from_fields(ModelSpec, model_fields(V=29, D=24, L=2, H=4, F=20, T=32, vocab_multiple=16))
    ours = Transformer(spec).eval()
    with torch.no_grad():
        for each in ours.parameters():
            each.normal_(0, 0.3, generator=torch.Generator().manual_seed(each.numel()))
    export_model(ours, tmp_path / "out")
    assert read_json(tmp_path / "out/config.json")["vocab_size"] == 32
    assert_equal_logits(ours, opened(tmp_path / "out"))
    assert torch.equal(import_model(tmp_path / "out").lm_head.weight, ours.lm_head.weight)


def test_modules_of_multi_token_prediction_are_left_out_of_an_export(tmp_path):
    saved("deepseek_v3", tmp_path / "in")
    plain = import_model(tmp_path / "in").eval()
    ours = Transformer(with_fields(plain.spec, {"n_mtp_layers": 2})).eval()
    missing, surplus = ours.load_state_dict(plain.state_dict(), strict=False)
    assert {name.split(".")[0] for name in missing} == {"mtp"}
    assert not surplus
    assert export_model(ours, tmp_path / "out") == "deepseek_v3"
    assert read_json(tmp_path / "out/config.json")["num_nextn_predict_layers"] == 0
    assert_equal_logits(ours, opened(tmp_path / "out"))
