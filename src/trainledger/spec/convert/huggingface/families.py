"""Model types of transformers: the records of families.toml, and what no table can say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainledger.spec.block import Router
from trainledger.spec.convert.huggingface import hybrids
from trainledger.spec.convert.huggingface.family import ExpertNames, Family, Names, Switch
from trainledger.spec.convert.huggingface.reading import Reading, read_letters
from trainledger.spec.convert.huggingface.rope import magnitude, rope_parameters
from trainledger.spec.layers import kind_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.plain import table_beside

_AS_FOUNDRY = "transformers builds it otherwise; accounted for as llm-foundry builds it"


def read_gemma(reading: Reading) -> None:
    if reading.has("d_model"):
        reading.fields["embedding_scale"] = float(reading.fields["d_model"]) ** 0.5


def read_gemma2(reading: Reading) -> None:
    read_gemma(reading)
    scalar = reading.given("query_pre_attn_scalar")
    if scalar is None:
        scalar = 256
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or not 0 < scalar < 1e18:
        reading.refuse("query_pre_attn_scalar", scalar, "must be a number above 0", 256)
    else:
        reading.fields["attention.scale"] = float(scalar) ** -0.5


def write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    scale = spec.attention.scale
    scalar = float(spec.head_size) if scale is None else 1 / scale / scale
    near = round(scalar) if scalar < 1e18 else scalar
    return {"query_pre_attn_scalar": near if abs(scalar - near) < 1e-9 * scalar else scalar}


def write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    return {"no_rope_layers": [int(kind_of(spec, layer).rotary) for layer in range(spec.n_layers)]}


def read_cohere2(reading: Reading) -> None:
    if reading.fields.get("attention.window") is None:
        reading.refuse("sliding_window", None, "is missing; without local layers no layer would have positions", 4096)
    reading.fields["positions.skip_every"] = reading.fields.get("attention.global_every")


def read_exaone4(reading: Reading) -> None:
    """Global layers have no positions where others are local."""
    if reading.has("attention.window"):
        reading.fields["positions.skip_every"] = reading.fields.get("attention.global_every")
    elif reading.config.get("sliding_window", 0) is not None:
        rule = "without local layers, no layer would have positions"
        reading.refuse("sliding_window", reading.config.get("sliding_window"), rule, "null")


def read_ernie4_5_moe(reading: Reading) -> None:
    last, n_layers = reading.config.get("moe_layer_end_index"), reading.fields["n_layers"]
    if last not in (None, -1, n_layers - 1 if n_layers else -1):
        reading.refuse("moe_layer_end_index", last, "the last layers are never dense here", -1)


def read_opt(reading: Reading) -> None:
    width = reading.whole("word_embed_proj_dim", reading.fields.get("d_model") or 0, 1)
    if reading.has("d_model") and width != reading.fields["d_model"]:
        rule = "narrower embeddings with a separate projection (OPT-350m) are not accounted for"
        reading.refuse("word_embed_proj_dim", width, rule, reading.fields["d_model"])


def write_opt(spec: ModelSpec) -> dict[str, Any]:
    return {"word_embed_proj_dim": spec.d_model}


def read_falcon(reading: Reading) -> None:
    newer, parallel = reading.flag("new_decoder_architecture", False), reading.flag("parallel_attn", True)
    if newer and not parallel:
        reading.refuse("parallel_attn", parallel, "is true in every new_decoder_architecture", True)
    norms = reading.whole("num_ln_in_parallel_attn", 2 if newer else 1, 1)
    if norms > (2 if newer else 1):
        rule = "must be 1 or 2" if newer else "must be 1 without new_decoder_architecture"
        reading.refuse("num_ln_in_parallel_attn", norms, rule, 1)
    if not newer:
        several = reading.flag("multi_query", True)
        reading.fields["attention.n_kv_heads"] = 1 if several else reading.fields.get("attention.n_heads")
    if parallel:
        reading.fields["block"] = "parallel-two-norms" if norms == 2 else "parallel"
    if reading.fields["positions"] == "alibi":
        reading.refuse_weights("alibi", True, "falcon's slopes are rounded to bf16 and divided by sqrt(head width)")


def write_falcon(spec: ModelSpec) -> dict[str, Any]:
    newer = spec.block == "parallel-two-norms" or (
        spec.block == "parallel" and spec.kv_heads not in (1, spec.attention.n_heads)
    )
    return {
        "new_decoder_architecture": newer,
        "multi_query": spec.kv_heads == 1,
        "parallel_attn": spec.block != "serial",
        "num_ln_in_parallel_attn": (2 if spec.block == "parallel-two-norms" else 1) if newer else None,
    }


def read_mpt(reading: Reading) -> None:
    """MPT as llm-foundry has it; transformers' MPT always has ALiBi, 4 D wide MLPs and no biases."""
    attend = reading.config.get("attn_config") or {}
    if isinstance(attend, dict):
        _read_mpt_attention(reading, attend)
    else:
        reading.refuse("attn_config", attend, "must be a JSON object, { ... }")
    if not reading.flag("no_bias", True):
        reading.fields |= {"norm.bias": True, "attention.bias": True, "feed_forward.bias": True}
        reading.refuse_weights("no_bias", False, _AS_FOUNDRY)
    ratio = reading.whole("expansion_ratio", 4, 1)
    if ratio != 4:
        reading.refuse_weights("expansion_ratio", ratio, _AS_FOUNDRY)
    if reading.has("d_model"):
        reading.fields["feed_forward.d_ff"] = ratio * reading.fields["d_model"]
    scale = reading.given("logit_scale")
    if scale == "inv_sqrt_d_model" and reading.has("d_model"):
        scale = reading.fields["d_model"] ** -0.5
    if scale is not None:
        reading.fields["logit_scale"] = reading.checked("logit_scale", "logit_scale", scale)
        reading.refuse_weights("logit_scale", scale, _AS_FOUNDRY)


def _read_mpt_attention(reading: Reading, attend: dict[str, Any]) -> None:
    family = reading.family
    for key, value in attend.items():
        at = f"attn_config.{key}"
        if at in family.allowed:
            reading.check_allowed(at, value)
        elif at not in family.reads and key not in family.ignored:
            reading.refuse(at, value, "is no key that is known here; it may change the model")
    scale, alibi = attend.get("softmax_scale"), attend.get("alibi", True)
    if scale is not None:
        reading.fields["attention.scale"] = reading.checked("attention.scale", "attn_config.softmax_scale", scale)
    if attend.get("alibi_bias_max", 8) != 8:
        reading.refuse_weights(
            "attn_config.alibi_bias_max", attend["alibi_bias_max"], "the slopes start at 2 ** (-8 / H)"
        )
    if not isinstance(alibi, bool):
        reading.refuse("attn_config.alibi", alibi, "must be true or false", True)
    elif not alibi:
        reading.fields["positions"] = "learned" if reading.flag("learned_pos_emb", True) else "none"
        reading.refuse_weights("attn_config.alibi", False, _AS_FOUNDRY)


def write_mpt(spec: ModelSpec) -> dict[str, Any]:
    return {
        "attn_config": {"alibi": spec.positions.kind == "alibi", "softmax_scale": spec.attention.scale},
        "no_bias": not spec.norm.bias,
        "expansion_ratio": spec.feed_forward.d_ff // spec.d_model,
        "logit_scale": None if spec.logit_scale == 1 else spec.logit_scale,
        "learned_pos_emb": spec.positions.kind == "learned",
    }


def read_qwen2_moe(reading: Reading) -> None:
    read_sparse_layers(reading)
    shared = reading.whole("shared_expert_intermediate_size", 5632, 1)
    width = reading.fields.get("feed_forward.expert_d_ff")
    if not width:
        return
    reading.fields["feed_forward.n_shared"] = max(1, shared // width)
    if shared % width:
        reading.fields["feed_forward.shared_d_ff"] = shared


def write_sparse(spec: ModelSpec) -> dict[str, Any]:
    if spec.experts is None:
        return {}
    return {"decoder_sparse_step": spec.experts.every, "mlp_only_layers": list(range(spec.experts.n_dense_layers))}


def write_qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    shared = 0 if spec.experts is None else spec.experts.shared_width
    return write_sparse(spec) | {"shared_expert_intermediate_size": shared}


def _read_latent(reading: Reading) -> None:
    heads, kv_heads = reading.fields["attention.n_heads"], reading.fields.pop("attention.n_kv_heads")
    if kv_heads not in (None, heads):
        rule = "latent attention has a key and a value for every query head"
        reading.refuse("num_key_value_heads", kv_heads, rule, heads)


def _read_groups(reading: Reading, default: int) -> None:
    reading.take("feed_forward.router.groups", "n_group", default)
    reading.take("feed_forward.router.top_groups", "topk_group", default // 2 or 1)


def read_deepseek_v2(reading: Reading) -> None:
    _read_latent(reading)
    method = reading.config.get("topk_method")
    if method == "group_limited_greedy":
        _read_groups(reading, 1)
    elif method not in (None, "greedy"):
        reading.refuse("topk_method", method, "must be greedy or group_limited_greedy", "greedy")


def read_deepseek_v3(reading: Reading) -> None:
    _read_latent(reading)
    _read_groups(reading, 8)


def read_deepseek_v32(reading: Reading, groups: int = 8) -> None:
    """Every layer chooses its keys, and experts come behind the first layers."""
    _read_latent(reading)
    _read_groups(reading, groups)
    listed, dense = reading.config.get("mlp_layer_types"), reading.fields.get("feed_forward.n_dense_layers")
    if listed is not None and dense is not None and reading.has("n_layers"):
        wanted = ["dense"] * dense + ["sparse"] * (reading.fields["n_layers"] - dense)
        if listed != wanted:
            rule = f"must be dense in the first first_k_dense_replace = {dense} layers, then sparse in all"
            reading.refuse("mlp_layer_types", listed, rule)


def read_glm_moe_dsa(reading: Reading) -> None:
    """Behind the leading layers some attend to the keys that one before them chose (GLM-5.2)."""
    read_deepseek_v32(reading, 1)
    if not reading.has("n_layers"):
        return
    layers = range(reading.fields["n_layers"])
    every, leading = reading.whole("index_topk_freq", 1, 1), reading.whole("index_skip_topk_offset", 2, 1)
    listed = reading.config.get("indexer_types") or reading.config.get("index_topk_pattern")
    if isinstance(listed, list | str):
        full = [at for at, kind in enumerate(listed) if kind in ("full", "F")]
        leading = next((at for at in layers if at not in full), len(layers))
        every = next((at - leading + 1 for at in full if at > leading), len(layers) if leading < len(layers) else 1)
        chosen = [at for at in layers if max(at - leading + 1, 0) % every == 0]
        if full != chosen or len(listed) != len(layers):
            reading.refuse("indexer_types", listed, "must be full in the first layers, then in every n-th")
    if every > 1:
        reading.fields |= {"attention.indexer.every": every, "attention.indexer.leading": leading}


def write_glm_moe_dsa(spec: ModelSpec) -> dict[str, Any]:
    kinds = (kind_of(spec, layer) for layer in range(spec.n_layers))
    return write_deepseek_v3(spec) | {"indexer_types": ["full" if kind.chooses else "shared" for kind in kinds]}


def write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    """The groups of experts, and the rotary parameters with the weight from which the scale of the scores follows."""
    router, rope = Router() if spec.experts is None else spec.experts.router, rope_parameters(spec)
    scaling = None if spec.rope is None else spec.rope.scaling
    if spec.attention.scale is not None and scaling is not None and scaling.factor > 1:
        growth = (spec.attention.scale * spec.head_size**0.5) ** 0.5
        weight = round((growth - 1) / (magnitude(scaling.factor) - 1), 9)
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    return {"rope_parameters": rope, "n_group": router.groups, "topk_group": router.top_groups}


def write_deepseek_v2(spec: ModelSpec) -> dict[str, Any]:
    written = write_deepseek_v3(spec)
    return written | {"topk_method": "greedy" if written["n_group"] == 1 else "group_limited_greedy"}


def _same_in_all(reading: Reading, key: str, default: Any, must_be: Any = None) -> Any:
    """The value of a key that may be a list of one for each layer; layers that differ are refused."""
    value = reading.given(key)
    each = value if isinstance(value, list) and value else [default if value is None else value]
    if any(type(other) is not int or other != each[0] for other in each) or must_be not in (None, each[0]):
        wanted = "a whole number" if must_be is None else str(must_be)
        reading.refuse(key, value, f"must be {wanted}, the same in all layers", must_be)
    return each[0]


def read_qwen3_next(reading: Reading) -> None:
    hybrids.read_qwen3_5(reading)
    read_qwen2_moe(reading)


def read_kimi_linear(reading: Reading) -> None:
    """Layers by number from 1 in ``linear_attn_config``; of rotary positions there are none."""
    read_deepseek_v3(reading)
    linear = reading.config.get("linear_attn_config") or {}
    sizes = {"mixer.n_heads": "num_heads", "mixer.head_dim": "head_dim", "mixer.conv_width": "short_conv_kernel_size"}
    for name, key in sizes.items():
        if key in linear:
            reading.fields[name] = reading.checked(name, f"linear_attn_config.{key}", linear[key])
    if reading.fields.get("layers") is None and reading.has("n_layers"):
        full = linear.get("full_attn_layers", [])
        numbers = range(1, reading.fields["n_layers"] + 1)
        read_letters(reading, ["full_attention" if number in full else "linear_attention" for number in numbers])


def read_minimax_m2(reading: Reading) -> None:
    _same_in_all(reading, "attn_type_list", 1, must_be=1)  # 0 is linear attention


def read_hunyuan(reading: Reading) -> None:
    for name, key in {"n_experts": "num_experts", "per_token": "moe_topk"}.items():
        value = _same_in_all(reading, key, 1)
        reading.fields[f"feed_forward.{name}"] = reading.checked(f"feed_forward.{name}", key, value)
    _same_in_all(reading, "num_shared_expert", 1, must_be=1)
    inner = reading.fields.get("feed_forward.d_ff")
    _same_in_all(reading, "moe_intermediate_size", inner, must_be=inner)
    reading.refuse_weights("model_type", reading.config["model_type"], "its query-key norms follow the rotation")


def write_hunyuan(spec: ModelSpec) -> dict[str, Any]:
    return {} if spec.experts is None else {"num_experts": spec.experts.n_experts, "moe_topk": spec.experts.per_token}


def read_sparse_layers(reading: Reading) -> None:
    """Set ``every`` and ``n_dense_layers`` of the experts from decoder_sparse_step and mlp_only_layers (Qwen)."""
    if not reading.has("n_layers"):
        return
    n_layers = reading.fields["n_layers"]
    step = reading.whole("decoder_sparse_step", 1, 1)
    dense = reading.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        reading.refuse("mlp_only_layers", dense, "must be a list of layer numbers from 0")
        return
    listed = {layer for layer in dense if layer < n_layers}
    if listed != set(range(len(listed))):
        reading.refuse("mlp_only_layers", dense, "only the first layers may be dense here", list(range(len(listed))))
        return
    reading.fields["feed_forward.every"] = step
    reading.fields["feed_forward.n_dense_layers"] = len(listed)


def _plain(value: Any) -> Any:
    """A value of TOML as a family has it: None for "none", tuples for lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, list) else None if value == "none" else value


def _by_path(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Fields of a model by their paths, the kind of a part by the path of the part.

    >>> _by_path({"norm": {"kind": "layernorm", "eps": 1e-5}, "d_model": "n_embd"})
    {'norm': 'layernorm', 'norm.eps': 1e-05, 'd_model': 'n_embd'}
    """
    fields: dict[str, Any] = {}
    for name, value in table.items():
        path = before if name == "kind" else f"{before}.{name}".lstrip(".")
        fields |= _by_path(value, path) if isinstance(value, dict) else {path: value}
    return fields


def _changes(record: Mapping[str, Any]) -> dict[str, Any]:
    changes = dict(record)
    for name in {"keys", "always", "defaults"} & changes.keys():
        changes[name] = _by_path(changes[name])
    for name in {"read", "write"} & changes.keys():
        changes[name] = globals().get(changes[name]) or getattr(hybrids, changes[name])
    if "switches" in changes:
        changes["switches"] = {
            flag: switch and Switch(switch["default"], _by_path(switch["on"]), _by_path(switch["off"]))
            for flag, switch in changes["switches"].items()
        }
    if "names" in changes:
        experts = ExpertNames(**changes["names"].pop("experts", {}))
        changes["names"] = Names(**changes["names"], experts=experts)
    return changes


def _families() -> dict[str, Family]:
    families = {"": Family()}
    for name, record in _plain(table_beside(__file__)).items():
        changes = _changes(record)
        if name != "_any" and "ignored" in changes:
            changes["ignored"] = (*families["_any"].ignored, *changes["ignored"])
        base = families[changes.pop("like", "")]
        families[name] = base.like(name, *changes.pop("architectures", ()), **changes)
    named = [family for name, family in families.items() if name[:1] not in ("", "_")]
    return {name: family for family in named for name in (family.model_type, *family.also)}


FAMILIES = _families()
