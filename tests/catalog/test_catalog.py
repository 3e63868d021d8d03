"""Every number of the catalog against the published tables, with its source and date."""

import csv
import datetime
import os
import tomllib
from pathlib import Path

import pytest

from trainledger import catalog
from trainledger.answers.catalog import of_one
from trainledger.answers.load import model
from trainledger.ledger.model.parameters import SCORES, forward_flops, parameters
from trainledger.spec.parts import field_at
from trainledger.spec.problem import InvalidInput

PUBLISHED = Path(__file__).parents[2] / "tools/published"


def rows(name):
    with open(PUBLISHED / name, newline="", encoding="utf-8") as file:
        return {row.get("model") or row["name"]: row for row in csv.DictReader(file)}


COUNTS, HARDWARE = rows("param_counts.csv"), rows("hardware.csv")

MODELS = {
    "gpt2-medium": "gpt2-medium", "gpt2-large": "gpt2-large", "gpt2-xl": "gpt2-xl", "llama-7b": "LLaMA-7B",
    "llama-65b": "LLaMA-65B", "llama-2-7b": "Llama-2-7b-hf", "llama-2-70b": "Llama-2-70b-hf",
    "llama-3-8b": "Llama-3-8B", "llama-3-70b": "Llama-3-70B", "llama-3.1-8b": "Llama-3.1-8B",
    "llama-3.1-70b": "Llama-3.1-70B", "llama-3.1-405b": "Llama-3.1-405B", "llama-3.2-1b": "Llama-3.2-1B",
    "llama-3.2-3b": "Llama-3.2-3B", "tinyllama-1.1b": "tiny-llama-1.1b", "llama-13b": "open_llama_13b",
    "llama-2-13b": "open_llama_13b", "mistral-7b": "Mistral-7B-v0.1", "mixtral-8x7b": "Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "Mixtral-8x22B-v0.1", "qwen2.5-7b": "Qwen2.5-7B", "qwen2.5-32b": "Qwen2.5-32B",
    "qwen2.5-72b": "Qwen2.5-72B", "qwen3-1.7b": "Qwen3-1.7B", "qwen3-8b": "Qwen3-8B", "qwen3-14b": "Qwen3-14B",
    "qwen3-32b": "Qwen3-32B", "gemma-2b": "Gemma-2b", "gemma-7b": "Gemma-7b", "gemma-2-2b": "Gemma-2-2b",
    "gemma-2-9b": "Gemma-2-9b", "gemma-2-27b": "Gemma-2-27b", "phi-3-mini": "Phi-3-mini-4k-instruct",
    "olmo-7b": "OLMo-7B-hf", "olmo-2-7b": "OLMo-2-1124-7B", "olmo-2-13b": "OLMo-2-1124-13B",
    **{f"pythia-{size}": f"pythia-{size}" for size in ("14m", "70m", "160m", "1b", "1.4b", "2.8b", "6.9b", "12b")},
    **{f"opt-{size}": f"opt-{size}" for size in ("1.3b", "2.7b", "13b", "30b")}, "mpt-7b": "mpt-7b",
    "mpt-30b": "mpt-30b", "smollm2-135m": "SmolLM2-135M", "smollm2-1.7b": "SmolLM2-1.7B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite (16B)", "kimi-k2": "Kimi-K2 (1T)", "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
# Counts that the table lacks; the catalog's files name where they were read. Those of the models after llama-30b are
# counted from transformers' modules in tests/spec/test_published_configs.py as well (deepseek-v3's without its
# prediction module, gemma-3-12b's with 64 more rows than the table's).
ALSO_PUBLISHED = {
    "gpt2": 124439808, "llama-30b": 32528943616, "gpt-j-6b": 6050882784, "gpt-neox-20b": 20554567680,
    "bloom": 176247271424, "falcon-7b": 6921720704, "falcon-40b": 41303293952, "phi-2": 2779683840,
    "starcoder2-3b": 3030371328, "smollm3-3b": 3075098624, "qwen3-30b-a3b": 30532122624,
    "gemma-3-12b": 11765788416 + 64 * 3840, "deepseek-v3": 682636472320, "qwen2.5-0.5b": 494032768,
    "qwen2.5-1.5b": 1543714304, "qwen2.5-3b": 3085938688, "qwen2.5-14b": 14770033664, "qwen3-0.6b": 596049920,
    "qwen3-4b": 4022468096, "smollm2-360m": 361821120, "mistral-7b-v0.3": 7248023552, "codellama-7b": 6738546688,
    "codellama-13b": 13016028160, "codellama-34b": 33743970304,
    # Of models with mixers, and others of 2025 and 2026: transformers' modules on the meta device.
    "deepseek-v3.2": 683501956608,
    "gemma-4-26b-a4b": 25233141760,
    "gemma-4-31b": 30697345280,
    "glm-4.6": 356785884416,
    "glm-5": 753864119552,
    "glm-5.2": 753329921024,
    "granite-4.0-h-small": 32207337984,
    "kimi-linear-48b-a3b": 49122675072,
    "lfm2-350m": 354483968,
    "lfm2-8b-a1b": 8339929856,
    "llama-4-maverick": 400711848960,
    "llama-4-scout": 107769861120,
    "mimo-7b": 7622619136,
    "mimo-v2-flash": 308778768832,
    "minimax-m2.5": 228689748992,
    "nemotron-3-nano-30b-a3b": 31577937344,
    "nemotron-3-super-120b-a12b": 120668687360,
    "nemotron-3-ultra-550b-a55b": 549308968960,
    "qwen3-235b-a22b": 235093634560,
    "qwen3-next-80b-a3b": 79674391296,
    "qwen3.5-122b-a10b": 122111526912,
    "qwen3.5-27b": 26895998464,
    "qwen3.5-35b-a3b": 34660610688,
    "qwen3.5-397b-a17b": 396346350336,
}  # fmt: skip

DEVICES = {
    "v100-sxm-16gb": "V100 SXM2 16GB", "v100-sxm-32gb": "V100 SXM2/SXM3 32GB", "v100-pcie": "V100 PCIe", "t4": "T4",
    "a10g": "A10G", "a100-sxm-40gb": "A100 SXM 40GB", "a100-sxm-80gb": "A100 SXM 80GB",
    "a100-pcie-40gb": "A100 PCIe 40GB", "a100-pcie-80gb": "A100 PCIe 80GB", "h100-sxm": "H100 SXM 80GB",
    "h100-pcie": "H100 PCIe 80GB", "h100-nvl": "H100 NVL 94GB", "h200": "H200 SXM 141GB", "h800-sxm": "H800 SXM",
    "b200": "B200 SXM 180GB", "b300": "B300 SXM 288GB", "gb200": "GB200 186GB (per GPU)",
    "gb300": "GB300 288GB (per GPU)",
    "l4": "L4 24GB", "l40": "L40 48GB", "l40s": "L40S 48GB", "rtx-a6000": "RTX A6000",
    "gh200-96gb": "GH200 96/141GB", "gh200-144gb": "GH200 144GB",
    "rtx-3090": "RTX 3090 24GB", "rtx-4090": "RTX 4090 24GB", "rtx-5090": "RTX 5090 32GB", "mi300x": "MI300X 192GB",
    "h100-sxm-96gb-500w": "H100 SXM 96GB (Meta Grand Teton)", "tpu-v3": "TPU v3 (per chip)", "tpu-v4": "TPU v4",
    "tpu-v5e": "TPU v5e", "tpu-v5p": "TPU v5p", "tpu-v6e": "TPU v6e (Trillium)",
    "tpu-v7x": "TPU v7x (Ironwood)", "mi325x": "MI325X 256GB", "mi350x": "MI350X 288GB", "mi355x": "MI355X 288GB",
    "h20": "H20", "rtx-pro-6000": "RTX PRO 6000 Blackwell 96GB", "a10": "A10", "a30": "A30", "a40": "A40",
    "l20": "L20 48GB", "a800-sxm": "A800 SXM 80GB", "rtx-6000-ada": "RTX 6000 Ada 48GB", "rtx-3060": "RTX 3060 12GB",
    "rtx-4080": "RTX 4080 16GB", "rtx-5080": "RTX 5080 16GB",
}  # fmt: skip


NORMS_OF_A_BLOCK = {"pre": 2, "post": 2, "after-add": 2, "sandwich": 4}


def count(spec):
    """Parameters from sizes, written here a second time so that the catalog has a witness of its own."""
    d, heads = spec.d_model, spec.attention.n_heads
    norm = d * (spec.norm.weight + spec.norm.bias)
    if spec.latent is not None:
        assert not spec.attention.bias
        width = heads * (spec.latent.nope_head_dim + spec.latent.rope_head_dim)
        queries = (
            d * width
            if spec.latent.q_rank is None
            else d * spec.latent.q_rank + spec.latent.q_rank + spec.latent.q_rank * width
        )
        if (part := spec.latent.indexer) is not None:
            indexer = spec.latent.q_rank * part.n_heads * part.head_dim
            indexer += d * (part.head_dim + part.n_heads) + 2 * part.head_dim
            queries += indexer
        latent = d * (spec.latent.kv_rank + spec.latent.rope_head_dim) + spec.latent.kv_rank
        attention = (
            queries
            + latent
            + heads
            * (spec.latent.kv_rank * (spec.latent.nope_head_dim + spec.latent.v_head_dim) + spec.latent.v_head_dim * d)
        )
    else:
        attention, others = of_heads(spec, vars(spec.attention)), spec.attention.in_global
    norms = 1 if spec.block == "parallel" else NORMS_OF_A_BLOCK[spec.norm_place]

    def mlp(inner):
        biases = inner * (2 if spec.feed_forward.gated else 1) + d if spec.feed_forward.bias else 0
        return d * inner * (3 if spec.feed_forward.gated else 2) + biases

    dense = attention + norms * norm + mlp(spec.feed_forward.d_ff)
    total = spec.n_layers * dense
    if spec.layers is not None:
        total = 0
        for at, letter in enumerate((spec.layers * spec.n_layers)[: spec.n_layers]):
            experts = letter == "E" or (letter in "AGRB" and spec.experts and at >= spec.experts.n_dense_layers)
            feed = mixture(spec, mlp) if experts else mlp(spec.feed_forward.d_ff)
            mixed = (attention if letter in "AGB*" else 0) + (mixer(spec) if letter in "RBM" else 0)
            total += (mixed + norm if mixed else 0) + (feed + norm if letter in "AGRB-E" else 0)
    elif spec.experts is not None:
        inner = spec.experts.expert_d_ff or spec.feed_forward.d_ff
        router = spec.experts.n_experts * (d + spec.experts.router.bias)
        sparse = (
            attention + norms * norm + router + spec.experts.n_experts * mlp(inner) + mlp(spec.experts.n_shared * inner)
        )
        sparse += spec.experts.shared_d_ff * 3 * d - mlp(inner) if spec.experts.own_norms else 0
        sparse += 4 * norm + spec.experts.n_experts if spec.experts.own_norms else 0
        sparse -= 0 if spec.experts.n_shared else mlp(0)
        n_sparse = (spec.n_layers - spec.experts.n_dense_layers) // spec.experts.every
        total = (spec.n_layers - n_sparse) * dense + n_sparse * sparse
        total += spec.n_mtp_layers * (sparse + 2 * d * d + 3 * norm)
    if spec.latent is None and others is not None:
        n_global = ((spec.layers or "-") * spec.n_layers)[: spec.n_layers].count(
            "G"
        ) or spec.n_layers // spec.attention.global_every
        total += n_global * (
            of_heads(spec, vars(spec.attention) | {k: v for k, v in vars(others).items() if v is not None}) - attention
        )
    if spec.indexer is not None and spec.indexer.every > 1:
        behind = spec.n_layers - spec.indexer.leading
        total -= indexer * (behind - behind // spec.indexer.every)
    embeddings = spec.vocab_size * d * (1 if spec.tie_embeddings else 2) + (spec.vocab_size if spec.head_bias else 0)
    embeddings += (spec.max_seq_len + spec.positions.extra_rows) * d if spec.positions.kind == "learned" else 0
    embeddings += norm if spec.embedding_norm else 0
    return embeddings + total + norm


def of_heads(spec, own):
    """Parameters of attention with these fields of its heads."""
    d, heads, head = spec.d_model, own["n_heads"], own["head_dim"] or spec.d_model // own["n_heads"]
    width, wide, kv = heads * head, heads * (own["v_head_dim"] or head), (own["n_kv_heads"] or heads) * head
    values = 0 if own["keys_as_values"] else (own["n_kv_heads"] or heads) * (own["v_head_dim"] or head)
    attention = d * (width + kv + values + wide) + (width + kv + values if own["bias"] else 0)
    attention += (d * width if own["gated"] else 0) + (d if spec.output_bias else 0) + (heads if own["sinks"] else 0)
    return attention + {None: 0, "turned": 0, "head": 2 * head, "width": width + kv}[own["qk_norm"]]


def mixture(spec, mlp):
    experts = spec.experts
    shared = experts.shared_d_ff or experts.n_shared * experts.width
    gate = spec.d_model if experts.shared_gate else 0
    narrow, gated = experts.expert_d_model, 3 if spec.feed_forward.gated else 2
    own = gated * narrow * experts.width if narrow else mlp(experts.width)
    around = 2 * narrow * spec.d_model if narrow else 0
    return experts.n_experts * (spec.d_model + own) + (mlp(shared) if experts.n_shared else 0) + gate + around


def mixer(spec):
    """A mixer's parameters: what it reads of the stream, the filters, vectors, norm and what it writes."""
    d, part = spec.d_model, spec.mixer
    if part.kind == "short-conv":
        return 3 * d * d + d * part.conv_width + d * d
    if part.kind == "mamba-2":
        inner, shared = part.n_heads * part.head_dim, 2 * part.n_groups * part.state
        read = d * (2 * inner + shared + part.n_heads)
        return read + (inner + shared) * (part.conv_width + 1) + 3 * part.n_heads + inner + inner * d
    keys, values = part.n_key_heads * part.key_dim, part.n_heads * part.value_dim
    filters = (2 * keys + values) * part.conv_width
    if part.kind == "gated-delta":
        read = d * (2 * keys + 2 * values + 2 * part.n_heads)
        return read + filters + 2 * part.n_heads + part.value_dim + values * d
    low = part.head_dim
    read = d * (2 * keys + values + 2 * low + part.n_heads) + 2 * low * values
    return read + filters + part.n_heads + values + low + values * d


@pytest.mark.parametrize("name", catalog.model_names())
def test_a_model_has_the_parameters_the_catalog_says(name):
    assert count(model(name)) == catalog.model_entry(name)["parameters"]


@pytest.mark.parametrize("name", sorted({*MODELS, *ALSO_PUBLISHED}))
def test_parameters_are_those_published(name):
    published = ALSO_PUBLISHED.get(name) or int(COUNTS[MODELS[name]]["exact_params"])
    assert catalog.model_entry(name)["parameters"] == published


@pytest.mark.parametrize("name", sorted(MODELS))
def test_sizes_are_those_published(name):
    spec, row = model(name), COUNTS[MODELS[name]]
    sizes = {"n_layers": "n_layers", "d_model": "d_model", "n_heads": "attention.n_heads", "d_ff": "feed_forward.d_ff"}
    latent = "qk 128+64, v 128"
    assert {each: str(field_at(spec, path)) for each, path in sizes.items()} == {each: row[each] for each in sizes}
    assert (str(spec.vocab_size), str(spec.kv_heads)) == (row["vocab"], row["n_kv_heads"])
    assert row["head_dim"] == (latent if spec.latent else str(spec.head_size))
    assert (str(int(spec.tie_embeddings)), str(int(spec.feed_forward.gated))) == (row["tied"], row["gated"])
    assert spec.norm.kind == ("rmsnorm" if row["norm"] == "rmsnorm" else "layernorm")
    assert (spec.norm.weight, spec.norm.bias) == (row["norm"] != "nonparam_layernorm", row["norm"] == "layernorm")
    assert spec.positions.kind == row["positional"]
    biases = (spec.attention.bias, spec.output_bias, spec.feed_forward.bias)
    assert biases == (row["biases"] != "none", row["biases"] == "all", row["biases"] == "all")
    if row["max_learned_pos"]:
        assert str(spec.max_seq_len + spec.positions.extra_rows) == row["max_learned_pos"]
    if row["n_experts"]:
        mixture = spec.experts
        experts = (
            mixture.n_experts, mixture.per_token, mixture.n_dense_layers, mixture.n_shared, mixture.width
        )  # fmt: skip
        named = ("n_experts", "experts_per_token", "n_dense_layers", "n_shared_experts", "moe_d_ff")
        assert experts == tuple(int(row[each] or 0) for each in named)


@pytest.mark.parametrize("name", catalog.model_names())
def test_active_parameters_stand_where_not_all_are_active(name):
    entry, active = catalog.model_entry(name), parameters(model(name)).active
    assert entry.get("active_parameters", entry["parameters"]) == active
    published = COUNTS[MODELS[name]]["active_params"] if name in MODELS else ""
    assert not published or int(published) == active


def test_every_model_is_either_published_or_a_teaching_size():
    named = {*MODELS, *ALSO_PUBLISHED}
    assert {each for each in catalog.model_names() if not each.startswith(("teach-", "cs336-"))} == named


# Sizes of CS336's assignments: d_model, n_layers, heads, d_ff; parameters; forward TFLOP of 1,024 and 16,384 tokens;
# per cent of projections, scores, MLP and head at 1,024.
COURSE = {
    "cs336-small": (768, 12, 12, 3072, 190_460_160, 0.3496, 14.87, (16.6, 11.1, 49.8, 22.6)),
    "cs336-medium": (1024, 24, 16, 4096, 505_629_696, 1.033, 41.27, (20.0, 10.0, 59.9, 10.2)),
    "cs336-large": (1280, 36, 20, 5120, 1_072_469_760, 2.258, 82.51, (21.4, 8.6, 64.2, 5.8)),
    "cs336-xl": (1600, 48, 25, 6400, 2_127_057_600, 4.513, 149.5, (22.3, 7.1, 66.9, 3.6)),
}


@pytest.mark.parametrize("name", COURSE)
def test_the_models_of_a_course_have_its_parameters_and_flops(name):
    d, layers, heads, inner, counted, short, long, shares = COURSE[name]
    spec, vocabulary = model(name), 50257
    assert (spec.d_model, spec.n_layers, spec.attention.n_heads, spec.feed_forward.d_ff) == (d, layers, heads, inner)
    assert (spec.norm.kind, spec.positions.kind, spec.tie_embeddings) == ("rmsnorm", "rope", False)
    assert (spec.attention.bias, spec.feed_forward.bias, spec.norm.bias, spec.output_bias) == (False,) * 4
    assert (spec.feed_forward.gated, spec.feed_forward.activation) == (True, "silu")
    assert parameters(spec).total == counted == layers * (4 * d * d + 3 * d * inner + 2 * d) + d + 2 * vocabulary * d
    for tokens, printed in ((1024, short), (16384, long)):
        flops = forward_flops(spec, tokens, attention="math")
        by_hand = (
            layers * 8 * tokens * d * d, layers * 4 * tokens**2 * d, layers * 6 * tokens * d * inner,
            2 * tokens * d * vocabulary,
        )  # fmt: skip
        matmuls = (flops["attention"], flops[SCORES], flops["mlp"], flops["head"])
        assert matmuls == by_hand
        assert sum(flops.values()) == sum(matmuls)
        assert sum(matmuls) / 1e12 == pytest.approx(printed, rel=5e-4)
        if tokens == 1024:
            assert [round(100 * each / sum(matmuls), 1) for each in matmuls] == list(shares)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("teach-1m", 1), ("teach-10m", 10), ("teach-100m", 100), ("teach-gpt-1m", 1), ("teach-gpt-10m", 10)],
)
def test_a_teaching_size_is_about_the_size_it_is_called(name, millions):
    assert count(model(name)) == pytest.approx(millions * 10**6, rel=0.1)


def test_every_device_is_in_the_published_table():
    assert set(catalog.device_names()) == set(DEVICES)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_device_is_as_published(name):
    device, row = catalog.device(name), HARDWARE[DEVICES[name]]
    of_same_chip = ("peak.fp32", "peak.tf32") if name == "h100-sxm-96gb-500w" else ()
    published = {
        each: float(row[f"peak_{each}"]) * 1e12
        for each in ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
        if row[f"peak_{each}"] and (each, row["vendor"]) != ("fp4", "AMD")  # which has no nvfp4
    }
    # The table rounds half of 1,979 TFLOP/s down to 989.
    peaks = {each: rate for each, rate in device.peak_flops_per_second.items() if f"peak.{each}" not in of_same_chip}
    assert peaks == pytest.approx(published, rel=6e-4) or name in ("tpu-v6e", "a10g")
    assert device.memory_nbytes == float(row["mem_gb"]) * 1e9
    assert device.memory_bytes_per_second == pytest.approx(float(row["mem_bw_tbps"]) * 1e12)
    assert device.power_watts == (float(row["tdp_w"]) if row["tdp_w"] else 450 if name == "tpu-v3" else None)
    link = float(row["link_bw_gbps_uni"]) * 1e9 if row["link_bw_gbps_uni"] else None
    # Google's own pages of today say 400 and 1,200 GB/s in both directions; the table has half of that.
    assert device.link_bytes_per_second == (2 * link if name in ("tpu-v5e", "tpu-v5p") else link)
    read_elsewhere = name == "tpu-v5p" or (name == "a100-pcie-40gb" and "power:" in device.source)
    # The row of the A10G gives the A10's peaks, and says so; that of the TPU v3 is verified in part.
    others = name in ("a10g", "tpu-v3", "h100-sxm-96gb-500w")
    unverified = set(device.unverified) - {"multiprocessors"}
    assert bool(unverified) == (("from memory" in row["notes"] and not read_elsewhere) or others)


def test_the_peaks_of_an_a10g_are_not_passed_off_as_its_own():
    device = catalog.device("a10g")
    assert device.unverified == ("peak.fp32", "peak.fp16", "peak.bf16")
    assert device.peak_flops_per_second["bf16"] == 70e12
    assert "about half (70)" in HARDWARE["A10G"]["notes"]


def test_half_of_1979_is_the_dense_peak_of_an_h100():
    assert catalog.device("h100-sxm").peak_flops_per_second["bf16"] == 1979e12 / 2


@pytest.mark.parametrize("name", ["v100-sxm-16gb", "v100-pcie", "t4"])
def test_a_peak_that_does_not_exist_is_absent(name):
    assert "bf16" not in catalog.device(name).peak_flops_per_second


@pytest.mark.parametrize("path", sorted(Path(catalog.__file__).parent.glob("*/*.toml")), ids=lambda path: path.stem)
def test_every_file_names_its_source_and_date_and_nothing_unknown(path):
    entry = tomllib.loads(path.read_text())
    assert len(entry["source"]) > 10
    assert isinstance(entry["date"], datetime.date)
    known = {"title", "source", "date", "note"}
    if path.parent.name == "models":
        assert set(entry) <= known | {"parameters", "active_parameters", "verified", "model"}
        assert entry["model"]["name"] == path.stem
    elif path.parent.name == "calibrations":
        assert set(entry) - {"fit", "note"} == {"source", "date", "efficiency"}
        assert path.stem in catalog.device_names()
        assert not list(catalog.efficiency(path.stem).problems())
    elif path.parent.name == "devices":
        more = {"memory", "memory_bandwidth", "link", "link_bandwidth", "power_watts", "unverified", "peak"}
        assert set(entry) <= known | more | {"usable_memory", "usable_memory_source", "compute_capability", "node"} | {
            "multiprocessors",
            "matrix_unit",
        }
        assert ("usable_memory" in entry) == ("usable_memory_source" in entry)
        numbers = {f"peak.{each}" for each in entry["peak"]} | more | {"multiprocessors"}
        assert set(entry["unverified"]) <= numbers


def is_weaker(one, other):
    """Not above another device of its generation in any figure of its data sheet."""
    peaks, links = other.peak_flops_per_second, [each.link_bytes_per_second or 0 for each in (one, other)]
    return (
        one.name != other.name
        and one.compute_capability == other.compute_capability is not None
        and all(rate <= peaks.get(dtype, 0) for dtype, rate in one.peak_flops_per_second.items())
        and one.memory_bytes_per_second <= other.memory_bytes_per_second
        and links[0] <= links[1]
    )


CALIBRATED = [each for each in map(catalog.device, catalog.device_names()) if each.efficiency]
WEAKER = [(one, other) for one in CALIBRATED for other in CALIBRATED if is_weaker(one, other)]


@pytest.mark.parametrize(("one", "other"), WEAKER, ids=lambda each: each.name)
def test_a_weaker_device_of_a_generation_is_nowhere_faster(one, other):
    mine, others = one.efficiency, other.efficiency
    peaks = [each.peak_flops_per_second.get("fp16") or each.peak_flops_per_second["bf16"] for each in (one, other)]
    for share in ("matmul_share", "attention_share", "attention_backward_share"):
        assert getattr(mine, share) * peaks[0] <= getattr(others, share) * peaks[1]
    memory = one.memory_bytes_per_second, other.memory_bytes_per_second
    assert mine.bandwidth_share * memory[0] <= others.bandwidth_share * memory[1]
    for lost in ("depth", "attention_length", "kernel_seconds", "launch_seconds", "contention_share"):
        assert getattr(mine, lost) >= getattr(others, lost), lost
    assert mine.straggler_share >= others.straggler_share


@pytest.mark.parametrize(
    ("ask", "wanted", "sentence"),
    [
        (
            catalog.model,
            "llama-3-8",
            "model.preset = 'llama-3-8': is not in the catalog; nearest that works: llama-3-8b",
        ),
        (catalog.model, "GTP2", "model.preset = 'GTP2': is not in the catalog; nearest that works: gpt2"),
        (catalog.device, "a100-pcie", "(a100-pcie-40gb, a100-pcie-80gb); nearest that works: a100-pcie-40gb"),
        (catalog.device, "zx81", "(trainledger catalog devices lists all): add catalog/devices/NAME.toml, a copy"),
        (catalog.model, "vit-large", "'vit-large': is not in the catalog (trainledger catalog models lists all): give"),
        (catalog.model, "qwen2.5-vl-7b", "lists all): give its config.json in place of its name, or of any other"),
        (catalog.model, "foo bar/Qwen2.5-7B", "'foo bar/Qwen2.5-7B': is not in the catalog (trainledger catalog"),
    ],
)
def test_an_unknown_name_brings_the_nearest(ask, wanted, sentence):
    with pytest.raises(InvalidInput) as caught:
        ask(wanted)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("H100", "h100-sxm"),
        ("h100", "h100-sxm"),
        ("a100", "a100-sxm-80gb"),
        ("v100", "v100-sxm-32gb"),
        ("gh200", "gh200-96gb"),
    ],
)
def test_a_device_without_its_variant_is_the_usual_one(name, variant):
    assert catalog.device(name).name == variant


def test_a_device_is_found_by_the_name_that_its_driver_has_for_it():
    names = tomllib.loads((Path(catalog.__file__).parent / "driver_names.toml").read_text())
    assert {written: catalog.device(written).name for written in names} == names


def test_names_are_found_in_upper_case_as_well():
    assert catalog.device("H200") == catalog.device("h200")
    assert catalog.model("GPT2-XL") == catalog.model("gpt2-xl")


@pytest.mark.parametrize("name", ["../models/gpt2", "", ".", f"..{os.sep}__init__", "gpt2\0", "x" * 10**5])
def test_a_name_is_never_a_path(name):
    with pytest.raises(InvalidInput):
        catalog.device(name)


def test_a_device_file_without_a_needed_key_is_named_with_the_key(tmp_path, monkeypatch):
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "toy.toml").write_text('title = "Toy"\nmemory = "80GB"\n', encoding="utf-8")
    monkeypatch.setattr(catalog, "_HERE", str(tmp_path))
    monkeypatch.setattr(catalog, "_names", catalog._names.__wrapped__)  # uncached
    with pytest.raises(InvalidInput, match=r"catalog/devices/toy.toml has no peak, no memory_bandwidth, no link"):
        catalog.device("toy")


def test_a_caller_that_changes_its_copy_changes_no_other():
    catalog.model("mixtral-8x7b")["feed_forward"].clear()
    assert catalog.model("mixtral-8x7b")["feed_forward"]
    catalog.scaling_laws()["besiroglu"].clear()
    assert catalog.scaling_laws()["besiroglu"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("rtx4090", "rtx-4090"), ("RTX 4090", "rtx-4090"), ("4090", "rtx-4090"), ("h100-80gb", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("a100-80gb", "a100-sxm-80gb"), ("b200-sxm", "b200"), ("Tesla T4", "t4"), ("h200-141gb", "h200"),
        ("l40", "l40"), ("a6000", "rtx-a6000"), ("GH200-144GB", "gh200-144gb"),
        ("a10", "a10"), ("a100-80g", "a100-sxm-80gb"), ("GB200 NVL72", "gb200"), ("RTX 6000 Ada", "rtx-6000-ada"),
        ("v6e-8", None), ("h100-40gb", None), ("a100-pcie", None), ("h1000", None), ("sxm", None),
    ],
)  # fmt: skip
def test_a_device_as_people_and_drivers_write_it(written, meant):
    if meant is None:
        with pytest.raises(InvalidInput, match="is not in the catalog"):
            catalog.device(written)
    else:
        assert catalog.device(written).name == meant


@pytest.mark.parametrize("name", ["h100-sxm", "t4"])
def test_each_size_of_a_device_says_what_it_is(name):
    device, text = catalog.device(name), " ".join(str(of_one(name)).split())
    assert f"{device.memory_nbytes} (by the data sheet, whose GB may be GiB)" in text
    assert f"{device.usable_nbytes} (the total that PyTorch reports" in text
    assert abs(device.usable_nbytes / device.memory_nbytes - 1) < 0.1
