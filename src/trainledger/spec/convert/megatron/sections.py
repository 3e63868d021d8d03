"""The model and the recipe that Megatron-LM's arguments describe, as the fields of ``[model]`` and ``[recipe]``."""

from __future__ import annotations

import ast
import re
from typing import Any

from trainledger.spec.convert.megatron.arguments import Reading, tables

_MOST_LAYERS = 10_000
_SCALINGS = {"tensorwise": "fp8-tensorwise", "delayed": "fp8-tensorwise", "blockwise": "fp8-block", "mxfp8": "mxfp8"}
_OPTIMIZERS = {"adam": "adamw", "sgd": "momentum", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}


def model_of(read: Reading, tensor: int) -> dict[str, Any]:
    """The ``[model]`` section: sizes, norms, positions, attention and MLP."""
    width, layers, heads = (read.needed(name) for name in ("hidden-size", "num-layers", "num-attention-heads"))
    length = read.count("max-position-embeddings") or read.count("seq-length") or 1
    biased = not read.flag("disable-bias-linear")
    vocabulary, multiple = _vocabulary(read, tensor)
    root = read.text("normalization", "LayerNorm") == "RMSNorm"
    modules = read.count("mtp-num-layers", at_least=0)
    return {
        "name": "megatron",
        "vocab_size": vocabulary,
        "vocab_multiple": multiple,
        "d_model": width,
        "n_layers": layers,
        "max_seq_len": max(length, read.count("seq-length") or 1),
        "tie_embeddings": not read.flag("untie-embeddings-and-output-weights"),
        "norm": {"kind": "rmsnorm"} if root else {"kind": "layernorm", "bias": True},
        "attention": _attention(read, width, heads, biased),
        "positions": _positions(read, width, heads),
        "feed_forward": _feed_forward(read, width, layers, biased),
    } | ({"n_mtp_layers": modules} if modules else {})


def _vocabulary(read: Reading, tensor: int) -> tuple[int, int]:
    """Tokens, and the multiple to which Megatron-LM pads them: --make-vocab-size-divisible-by for each tensor rank."""
    padded = read.count("padded-vocab-size")
    if padded is not None:
        return padded, 1
    multiple = (read.count("make-vocab-size-divisible-by", 128) or 1) * tensor
    given = read.count("vocab-size")
    kind, named = read.text("tokenizer-type", "GPT2BPETokenizer"), (read.given("tokenizer-model") or "").lower()
    if given is not None:
        return given, multiple
    of_kind: int | None = tables()["vocabularies"].get(str(kind))
    known = of_kind or next((count for name, count in tables()["tokenizers"].items() if name in named), None)
    if known is None:
        rule = "names a tokenizer whose file is not opened here; say how many tokens it has"
        read.refuse("tokenizer-type", kind, rule, "--set model.vocab_size=32000")
        return 1, 1
    said = f"the {known:,} tokens of {kind}" if of_kind else f"{known:,} tokens by its name"
    read.notes.append(f"the tokenizer's file is not opened: assuming {said}")
    return known, multiple


def _attention(read: Reading, width: int, heads: int, biased: bool) -> dict[str, Any]:
    if read.flag("multi-latent-attention"):
        return {"kind": "latent", "n_heads": heads} | read.table("latent")
    section: dict[str, Any] = {"n_heads": heads}
    groups, channels = read.count("num-query-groups"), read.count("kv-channels")
    if read.flag("group-query-attention") and groups:
        section["n_kv_heads"] = groups
    elif groups and groups not in (1, heads):  # 1 is Megatron-LM's default, which a log prints
        read.notes.append(f"--num-query-groups {groups} without --group-query-attention: Megatron-LM ignores it")
    if channels and channels * heads != width:
        section["head_dim"] = channels
    if biased or read.flag("add-qkv-bias"):
        section |= {"bias": True, "output_bias": biased}
    if read.flag("qk-layernorm"):
        section["qk_norm"] = "head"
    window = re.search(r"\d+", " ".join(read.words("window-size")))
    if window and 0 < int(window[0]) < 10**9:
        section["window"] = int(window[0]) + 1  # Megatron-LM counts those before a token
    return section


def _positions(read: Reading, width: int, heads: int) -> dict[str, Any]:
    latent = read.flag("multi-latent-attention")
    kind = read.text("position-embedding-type", "rope" if latent else "learned_absolute")
    if read.flag("use-rotary-position-embeddings") or latent:
        kind = "rope"
    if kind == "none" or read.flag("no-position-embedding"):
        return {"kind": "none"}
    if kind == "learned_absolute":
        return {"kind": "learned"}
    if kind not in ("rope", "yarn"):
        read.refuse("position-embedding-type", kind, "is not accounted for", "rope")
    section: dict[str, Any] = {"kind": "rope", "theta": read.number("rotary-base", 10000.0)}
    share = read.number("rotary-percent", 1.0) or 1.0
    channels = read.count("kv-channels") or max(2, width // heads)
    if share != 1.0 and not latent:
        section["dim"] = max(2, int(channels * share) // 2 * 2)
    if read.flag("rotary-interleaved"):
        section["interleaved"] = True
    if read.flag("use-rope-scaling"):
        section["scaling"] = {"kind": "llama3", "factor": read.number("rope-scaling-factor", 8.0)}
    return section


def _feed_forward(read: Reading, width: int, layers: int, biased: bool) -> dict[str, Any]:
    gated = read.flag("swiglu")
    inner = read.count("ffn-hidden-size")
    if inner is None:
        inner = int(4 * width * 2 / 3 / 64) * 64 if gated else 4 * width
        read.supplied["ffn-hidden-size"] = inner
    section: dict[str, Any] = {"d_ff": max(1, inner), "activation": _activation(read, gated, biased), "gated": gated}
    if biased:
        section["bias"] = True
    experts = read.count("num-experts")
    return section if not experts or experts == 1 else section | _experts(read, inner, experts, layers)


def _activation(read: Reading, gated: bool, biased: bool) -> str:
    """SwiGLU, squared ReLU or GELU, which is the tanh form where it is fused with the bias (fused_bias_gelu.py)."""
    fused = not read.flag("no-bias-gelu-fusion") and biased
    if gated:
        return "silu"
    if read.flag("squared-relu"):
        return "relu2"
    if read.flag("quick-geglu"):
        read.refuse("quick-geglu", "true", "is not accounted for", "--swiglu")
    return "gelu_tanh" if fused or read.flag("openai-gelu") else "gelu"


def _experts(read: Reading, inner: int, experts: int, layers: int) -> dict[str, Any]:
    width = read.count("moe-ffn-hidden-size", inner) or inner
    shared = read.count("moe-shared-expert-intermediate-size", at_least=0) or 0
    topk = read.count("moe-router-topk", 2)
    section: dict[str, Any] = {"kind": "experts", "n_experts": experts, "per_token": topk, "expert_d_ff": width}
    if shared:
        section["n_shared"] = max(1, shared // width)
        if shared % width:
            section["shared_d_ff"] = shared
    if read.flag("moe-shared-expert-gate"):
        section["shared_gate"] = True
    if narrow := read.count("moe-latent-size"):
        section["expert_d_model"] = narrow
    section |= _layers_with_experts(read, layers)
    router: dict[str, Any] = {"scores": read.text("moe-router-score-function", "softmax")}
    if router["scores"] == "softmax" and not read.flag("moe-router-pre-softmax"):
        router["scores"] = "softmax-of-chosen"
    if router["scores"] == "softmax":
        router["normalize"] = False
    if (factor := read.number("moe-router-topk-scaling-factor")) is not None:
        router["scale"] = factor
    if read.flag("moe-router-enable-expert-bias"):
        router["correction"] = True
    groups = read.count("moe-router-num-groups")
    if groups and groups > 1:
        router |= {"groups": groups, "top_groups": read.count("moe-router-group-topk", 1)}
    return section | {"router": router}


def _layers_with_experts(read: Reading, layers: int) -> dict[str, Any]:
    """The layers that have experts: every n-th, or all but some at the beginning."""
    pattern = read.text("moe-layer-freq", "1") or "1"
    if pattern.isdecimal():
        # Megatron-LM's layers with experts are the first of each n (gpt_layer_specs.py), those of the spec the last: as
        # many where n divides the layers.
        if layers % max(1, int(pattern)):
            read.notes.append(f"--moe-layer-freq {pattern} of {layers} layers: assuming experts in the last of each")
        return {} if int(pattern) <= 1 else {"every": int(pattern)}
    has = _written_list(pattern)
    for dense, every in ((dense, every) for every in range(1, layers + 1) for dense in range(layers + 1)):
        if has == [int(layer >= dense and (layer + 1) % every == 0) for layer in range(layers)]:
            return ({"n_dense_layers": dense} if dense else {}) | ({"every": every} if every > 1 else {})
    rule = (
        f"must be a number, or a list of 0 and 1 for {layers} layers whose ones are all after some or each n-th of them"
    )
    read.refuse("moe-layer-freq", pattern, rule, 1)
    return {}


def _written_list(text: str) -> list[int] | None:
    """A list of 0 and 1 that Python's lists, sums and products write, as Megatron-LM evaluates it; None for others.

    >>> _written_list("([0]*1+[1]*2)*2"), _written_list("[1]*9**9")
    ([0, 1, 1, 0, 1, 1], None)
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.List(elts=members):
                return [value(member) for member in members]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                one, other = value(left), value(right)
                if isinstance(one, list) and isinstance(other, int) and len(one) * other <= _MOST_LAYERS:
                    return one * other
        raise ValueError(text)

    try:
        flags = value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return flags if isinstance(flags, list) and all(number in (0, 1) for number in flags) else None


def recipe_of(read: Reading, data_ranks: int) -> dict[str, Any]:
    """The ``[recipe]`` section for so many ranks with their own sequences."""
    micro_batch = read.count("micro-batch-size") or 1
    if "micro-batch-size" not in read.arguments.given:
        read.refuse("micro-batch-size", None, "is missing, and Megatron-LM has no default for it", 1)
    batch, length = _global_batch(read) or micro_batch * data_ranks, read.needed("seq-length")
    steps, sequences = read.count("train-iters", at_least=0), read.count("train-samples", at_least=0)
    section: dict[str, Any] = {
        "seq_len": length,
        "global_batch": batch,
        "micro_batch": micro_batch,
        "steps": max(1, steps or (sequences or 0) // batch),
        "framework": "megatron-local" if _is_local(read) else "megatron-core",
        "precision": _precision(read),
        "attention": _kernel(read),
        **read.table("recipe"),
        "activation_checkpointing": _recomputation(read),
        "optimizer": _optimizer(read),
        "grad_clip": read.number("clip-grad", 1.0) or "none",
    }
    own_buffers = section["precision"].get("gradient_dtype") == "fp32" and section["framework"] == "megatron-core"
    if own_buffers and not read.flag("no-gradient-accumulation-fusion"):
        section["gradient_fusion"] = True
    if section["framework"] == "megatron-core" and read.flag("moe-grouped-gemm") and read.flag("num-experts"):
        section["grouped_experts"] = True
    # cuBLAS's workspace as --deterministic-mode wants it says the same alone.
    section["deterministic"] |= (read.arguments.environment or {}).get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    if any(map(read.flag, ("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph"))):
        section["cuda_graphs"] = True
    if (rate := read.number("lr")) is not None and rate > 0:
        section |= {"learning_rate": rate, "schedule": _schedule(read, rate, section["steps"], batch)}
    if (weight := read.number("moe-aux-loss-coeff")) and read.flag("num-experts"):
        section["load_balance_loss"] = weight
    if (weight := read.number("mtp-loss-scaling-factor")) and read.flag("mtp-num-layers"):
        section["mtp_loss"] = weight
    if (factor := read.number("moe-expert-capacity-factor")) and factor > 0:
        section["expert_dispatch"] = {"kind": "capacity", "factor": factor}
    if read.flag("cross-entropy-loss-fusion"):
        section["loss"] = "in-place" if read.text("cross-entropy-fusion-impl", "native") == "te" else "compiled"
    return section


def _global_batch(read: Reading) -> int | None:
    """--global-batch-size, or the first batch of a schedule that grows."""
    grows = read.given("step-batch-size-schedule")
    if grows and grows.strip():
        first = grows.split()[0].rpartition(":")[2]
        read.notes.append(f"the batch grows by --step-batch-size-schedule {grows}: this is a step of its beginning")
        return int(first) if first.isdecimal() and int(first) else None
    if read.words("rampup-batch-size"):
        read.notes.append("the batch grows by --rampup-batch-size: this is a step of the whole batch")
    return read.count("global-batch-size")


def _precision(read: Reading) -> dict[str, Any]:
    """Parameters in 16 bits with an fp32 copy at the optimizer; of bf16 gradients add up in fp32 (arguments.py)."""
    in_8_bits, in_4_bits = read.given("fp8-format"), read.given("fp4-format")
    for name, value in (("fp8-format", in_8_bits), ("fp4-format", in_4_bits)):
        if value is not None and not read.flag("bf16"):
            read.refuse(name, value, f"computes in {name[2]} bits beside bf16 here", "--bf16")
    if read.flag("fp16"):
        section: dict[str, Any] = {"kind": "fp16"}
    elif read.flag("bf16"):
        section = {"kind": "bf16", "master_weights": True}
        if not read.flag("grad-reduce-in-bf16") and read.text("main-grads-dtype", None) != "bf16":
            section["gradient_dtype"] = "fp32"
    else:
        return {"kind": "fp32"}
    if in_8_bits is not None or in_4_bits is not None:
        section["kind"] = (
            read.chosen("fp8-recipe", _SCALINGS, "delayed", "tensorwise")
            if in_4_bits is None
            else read.chosen("fp4-recipe", {"nvfp4": "nvfp4"}, "nvfp4", "nvfp4")
        )
        if read.flag("first-last-layers-bf16"):
            for end, field in (("start", "first"), ("end", "last")):
                section[f"{field}_in_16_bits"] = read.count(f"num-layers-at-{end}-in-bf16", 1, at_least=0)
        if not any(read.flag(name) for name in ("use-megatron-fsdp", "use-torch-fsdp2", "use-custom-fsdp")):
            section["weight_caching"] = True  # Transformer Engine's is_first_microbatch
    moments = {read.text("exp-avg-dtype", None), read.text("exp-avg-sq-dtype", None)} - {None, "fp32"}
    if moments and not read.flag("use-precision-aware-optimizer"):
        read.refuse("exp-avg-dtype", ", ".join(sorted(map(str, moments))), "needs --use-precision-aware-optimizer")
    elif moments:
        if moments == {"bf16"}:
            section["moment_dtype"] = "bf16"
        else:
            read.refuse("exp-avg-dtype", ", ".join(sorted(map(str, moments))), "is not accounted for", "bf16")
    return section


def _is_local(read: Reading) -> bool:
    """Megatron-LM's own modules in place of Transformer Engine's."""
    return read.text("transformer-impl", "transformer_engine") == "local"


def _kernel(read: Reading) -> str:
    """The kernel: --attention-backend, or what Transformer Engine selects; unfused without it."""
    backend = read.text("attention-backend", "auto")
    unfused = backend in ("unfused", "local") or (_is_local(read) and not read.flag("use-flash-attn"))
    if unfused or not (read.flag("bf16") or read.flag("fp16")):
        return "math"
    return {"fused": "cudnn", "flash": "flash"}.get(str(backend), "sdpa")


def _recomputation(read: Reading) -> dict[str, Any] | str:
    """--recompute-granularity full or selective, the latter of attention's core by default."""
    granularity = read.text("recompute-granularity", None)
    if read.flag("recompute-activations") and granularity is None:
        granularity = "selective"
    if granularity == "selective":
        modules = [word for module in read.words("recompute-modules") for word in module.strip("[],' ").split()]
        if set(modules) - {"core_attn"}:
            read.refuse("recompute-modules", " ".join(modules), "is accounted for as core_attn alone", "core_attn")
        return "attention"
    if granularity == "full":
        method, count = read.given("recompute-method"), read.count("recompute-num-layers", 1) or 1
        if method == "block":
            read.notes.append("--recompute-method block runs a part of the layers again: assuming all")
        return "full" if count == 1 or method == "block" else {"kind": "segments", "n_blocks": count}
    if granularity is not None:
        read.refuse("recompute-granularity", granularity, "must be full or selective", "selective")
    return "none"


def _optimizer(read: Reading) -> dict[str, Any]:
    kind = read.chosen("optimizer", _OPTIMIZERS, "adam", "adam")
    section: dict[str, Any] = {"kind": kind, "weight_decay": read.number("weight-decay", 0.01)}
    if kind == "adamw":  # Transformer Engine's and Apex's FusedAdam
        section |= {**read.table("adamw"), "implementation": "fused"}
    return section


def _schedule(read: Reading, rate: float, steps: int, batch: int) -> dict[str, Any]:
    kind = _SCHEDULES.get(str(read.text("lr-decay-style", "linear")), "cosine")
    warmup = read.count("lr-warmup-iters", at_least=0) or (read.count("lr-warmup-samples", at_least=0) or 0) // batch
    share = read.number("lr-warmup-fraction")
    if share:
        decay = read.count("lr-decay-iters") or (read.count("lr-decay-samples") or 0) // batch or steps
        warmup = int(share * decay)
    section: dict[str, Any] = {"kind": kind, "warmup_steps": min(steps, warmup)}
    lowest = read.number("min-lr")
    if lowest is not None and kind != "constant":
        section["final_ratio"] = min(1.0, max(0.0, lowest / rate))
    return section
