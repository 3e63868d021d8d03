"""Model types with layers of several kinds: what of their config.json no table can say."""

from __future__ import annotations

from trainledger.spec.convert.huggingface.reading import Reading, every_so_many, read_letters
from trainledger.spec.units import round_up


def read_qwen3_5(reading: Reading) -> None:
    """Three layers of the gated delta rule before each with attention, unless the layers are listed."""
    interval = reading.whole("full_attention_interval", 4, 1)
    if reading.fields.get("layers") is None and reading.has("n_layers"):
        kinds = ["linear_attention"] * (interval - 1) + ["full_attention"]
        read_letters(reading, (kinds * reading.fields["n_layers"])[: reading.fields["n_layers"]])


def read_nemotron_h(reading: Reading) -> None:
    """The pattern of layers, and experts where it has any."""
    fields, listed = reading.fields, reading.given("layer_types") or reading.config.get("hybrid_override_pattern")
    if fields["n_layers"] is None and isinstance(listed, list | str) and listed:  # the list is the count
        fields["n_layers"] = len(listed)
    if fields["n_layers"] is None:
        reading.refuse("num_hidden_layers", None, "is missing (Transformer blocks), and so is layers_block_type")
    elif fields.get("layers") is None:
        read_letters(reading, listed or ["linear_attention", "moe", "full_attention", "mlp"])
    if "E" not in (fields.get("layers") or ""):
        return
    fields |= {
        "feed_forward": "experts",
        "feed_forward.router.scores": "sigmoid",
        "feed_forward.router.correction": True,
    }
    take = {
        "n_experts": ("n_routed_experts", 8),
        "per_token": ("num_experts_per_tok", 2),
        "expert_d_ff": ("moe_intermediate_size", 7688),
        "expert_d_model": ("moe_latent_size", None),
        "n_shared": ("n_shared_experts", 1),
        "shared_d_ff": ("moe_shared_expert_intermediate_size", 7688),
        "router.groups": ("n_group", 1),
        "router.top_groups": ("topk_group", 1),
        "router.normalize": ("norm_topk_prob", True),
        "router.scale": ("routed_scaling_factor", 1.0),
    }
    for name, (key, default) in take.items():
        reading.take(f"feed_forward.{name}", key, default)


def _read_mamba(reading: Reading) -> None:
    """Heads as wide as the inner width leaves them, where they are not given."""
    heads, width = reading.fields.get("mixer.n_heads"), reading.given("mamba_d_head")
    inner = reading.given("mamba_d_ssm") or reading.whole("mamba_expand", 2, 1) * (reading.fields["d_model"] or 0)
    if heads and "mixer.n_heads" in reading.fields:
        reading.fields["mixer.head_dim"] = inner // heads if width in (None, "auto") else width
        if reading.fields["mixer.head_dim"] * heads != inner:
            reading.refuse("mamba_d_head", width, f"times mamba_n_heads = {heads} must be {inner}", inner // heads)


def read_granite_hybrid(reading: Reading) -> None:
    fields, rotary = reading.fields, reading.config.get("position_embedding_type")
    _read_mamba(reading)
    if rotary not in (None, "rope", "nope"):
        reading.refuse("position_embedding_type", rotary, "must be rope or nope", "nope")
    fields["positions"] = "rope" if rotary == "rope" else "none"
    shared, experts = reading.whole("shared_intermediate_size", 1024, 1), reading.whole("num_local_experts", 8)
    if not experts:  # the shared MLP is then the only one
        fields["feed_forward.d_ff"] = shared
    else:
        fields |= {"feed_forward": "experts", "feed_forward.n_experts": experts, "feed_forward.n_shared": 1}
        fields |= {"feed_forward.shared_d_ff": shared, "feed_forward.router.scores": "softmax-of-chosen"}
        reading.take("feed_forward.per_token", "num_experts_per_tok", 2)
    if (logits := reading.given("logits_scaling")) not in (None, 1, 0):
        fields["logit_scale"] = 1 / logits


def read_falcon_h1(reading: Reading) -> None:
    _read_mamba(reading)
    reading.fields["layers"] = "B"


def read_lfm2(reading: Reading) -> None:
    fields, listed = reading.fields, reading.config.get("full_attn_idxs")
    if fields.get("layers") is None and reading.has("n_layers") and "layer_types" not in reading.config:
        indices = range(fields["n_layers"])
        read_letters(reading, ["full_attention" if listed is None or at in listed else "conv" for at in indices])
    width = fields.get("feed_forward.d_ff")
    if width and reading.flag("block_auto_adjust_ff_dim", True) and reading.family.model_type == "lfm2":
        factor, multiple = reading.given("block_ffn_dim_multiplier"), reading.whole("block_multiple_of", 256, 1)
        width = round_up(int((1.0 if factor is None else factor) * int(2 * width / 3)), multiple)
    fields["feed_forward.d_ff"] = width


def read_skipped_rope(reading: Reading) -> None:
    """Set ``skip_every`` of the positions from no_rope_layers (0 where a layer has none) or their interval."""
    if not reading.has("n_layers"):
        return
    n_layers = reading.fields["n_layers"]
    listed = reading.config.get("no_rope_layers")
    if listed is None:
        every = reading.whole("no_rope_layer_interval", 4, 1)
        reading.fields["positions.skip_every"] = every if every <= n_layers else None
    elif not isinstance(listed, list) or not set(map(repr, listed)) <= {"0", "1"} or len(listed) < n_layers:
        reading.refuse("no_rope_layers", listed, f"must be a list of 0 and 1 for each of the {n_layers} layers")
    else:
        skipped = every_so_many([mark == 0 for mark in listed[:n_layers]])
        if skipped is None:
            reading.refuse("no_rope_layers", listed, "only every n-th layer without positions is accounted for")
        reading.fields["positions.skip_every"] = skipped or None


def read_gemma4(reading: Reading) -> None:
    """Global layers have wider heads, and where keys are values fewer key-value heads."""
    fields, every = reading.fields, reading.fields.get("attention.global_every")
    if reading.has("d_model"):
        fields["embedding_scale"] = float(fields["d_model"]) ** 0.5
    if reading.has("n_layers") and (every is None or fields["n_layers"] % every):
        types = reading.config.get("layer_types")
        reading.refuse("layer_types", types, "must end with a global layer, and have every n-th one global")
    own = "attention.in_global"
    reading.take(f"{own}.head_dim", "global_head_dim", 512)
    if reading.flag("attention_k_eq_v", False):
        fields[f"{own}.keys_as_values"] = True
        reading.take(f"{own}.n_kv_heads", "num_global_key_value_heads")
    shared = "layers that attend to keys and values of an earlier one (Gemma 4 E2B and E4B) are not accounted for"
    inputs = "embeddings that each layer reads beside the stream (Gemma 4 E2B and E4B) are not accounted for"
    for key, usual, rule in (("hidden_size_per_layer_input", 256, inputs), ("num_kv_shared_layers", 0, shared)):
        if count := reading.whole(key, usual):
            reading.refuse(key, count, rule, 0)
    if reading.flag("enable_moe_block", False):
        fields |= {"feed_forward": "experts", "feed_forward.n_shared": 1, "feed_forward.own_norms": True}
        fields["feed_forward.shared_d_ff"] = fields.get("feed_forward.d_ff")
        take = {"n_experts": "num_experts", "per_token": "top_k_experts", "expert_d_ff": "moe_intermediate_size"}
        for name, key in take.items():
            if reading.take(f"feed_forward.{name}", key) is None:
                reading.refuse(key, reading.config.get(key), "is missing, and enable_moe_block is true")
    rule = "a factor of each layer's output, which has no gradient, has no place in a ModelSpec"
    reading.refuse_weights("layer_scalar", None, rule)


def read_mimo_v2(reading: Reading) -> None:
    """Local layers have other key-value heads than global ones, and sinks; experts come behind the first layers."""
    fields, config = reading.fields, reading.config
    if not reading.has("n_layers", "attention.n_kv_heads"):
        return
    n_layers, listed = fields["n_layers"], config.get("hybrid_layer_pattern")
    if "layer_types" not in config:
        marks = [at > 0 and (at + 1) % 6 > 0 for at in range(n_layers)] if listed is None else listed
        read_letters(reading, ["sliding_attention" if mark else "full_attention" for mark in marks])
    window = reading.whole("sliding_window", 129, 1)  # tokens before the query, and itself
    fields["attention.window"] = reading.whole("sliding_window_size", window - 1, 1) + 1
    fields["attention.in_global.n_kv_heads"] = fields["attention.n_kv_heads"]
    reading.take("attention.n_kv_heads", "swa_num_key_value_heads", 2 * fields["attention.n_kv_heads"])
    reading.take("feed_forward.router.scale", "routed_scaling_factor", 1.0)
    for name, key in {"n_heads": "num_attention_heads", "head_dim": "head_dim", "v_head_dim": "v_head_dim"}.items():
        if config.get(f"swa_{key}") not in (None, own := fields[f"attention.{name}"]):
            reading.refuse(f"swa_{key}", config[f"swa_{key}"], "local layers have those of global ones here", own)
    sparse = config.get("mlp_layer_types") or config.get("moe_layer_freq") or [0] + [1] * (n_layers - 1)
    dense = sum(mark in (0, "dense") for mark in sparse)
    if [mark in (0, "dense") for mark in sparse] != [at < dense for at in range(n_layers)]:
        reading.refuse("moe_layer_freq", sparse, f"must be 0 in the first of the {n_layers} layers, then 1 in all")
    fields |= {"feed_forward.n_dense_layers": dense, "feed_forward.n_shared": 0}
    reading.config = {"rope_local_base_freq": config.get("swa_rope_theta"), **config}


def read_llama4(reading: Reading) -> None:
    """Chunks where heads are turned, all tokens where they are not."""
    read_skipped_rope(reading)
    fields, listed = reading.fields, reading.config.get("moe_layers")
    skipped = fields.get("positions.skip_every")
    if skipped is None:
        fields["positions.skip_every"] = None
    fields["attention.global_every"] = skipped if fields.get("attention.window") is not None else None
    if fields.get("attention.window") is None or skipped == 1:
        fields |= {"attention.window": None, "attention.chunked": False, "attention.global_every": None}
    kinds, types = ("chunked_attention", "full_attention"), reading.config.get("layer_types")
    if types is not None and skipped and reading.has("n_layers"):
        wanted = [kinds[at % skipped == 0] for at in range(1, fields["n_layers"] + 1)]
        if types != wanted:
            reading.refuse("layer_types", types, f"must be {kinds[1]} where no_rope_layers has 0, else {kinds[0]}")
    every = fields.get("feed_forward.every")
    if (
        listed is not None
        and every
        and reading.has("n_layers")
        and listed != [*range(every - 1, fields["n_layers"], every)]
    ):
        reading.refuse("moe_layers", listed, f"must be every n-th layer, as interleave_moe_layer_step = {every} says")
    rule = "multiplies what experts read in Llama 4, and here what they write: as many multiplications"
    reading.refuse_weights("num_experts_per_tok", fields.get("feed_forward.per_token"), f"its score {rule}")
