"""The recipe that Megatron-LM's arguments describe, as the fields of a ``[recipe]`` section."""

from __future__ import annotations

from typing import Any

from trainledger.spec.convert.megatron.arguments import Reading

_SCALINGS = {"tensorwise": "tensorwise", "delayed": "tensorwise", "blockwise": "block", "mxfp8": "block"}
_OPTIMIZERS = {"adam": "adamw", "sgd": "momentum", "muon": "muon", "dist_muon": "muon", "lion": "lion"}


def recipe_of(read: Reading, data_ranks: int) -> dict[str, Any]:
    """The ``[recipe]`` section for so many ranks with their own sequences."""
    micro_batch = read.count("micro-batch-size") or 1
    if "micro-batch-size" not in read.arguments.given:
        read.refuse("micro-batch-size", None, "is missing, and Megatron-LM has no default for it", 1)
    batch = _global_batch(read) or micro_batch * data_ranks
    length = read.count("seq-length")
    if length is None:
        if not any(each.field == "--seq-length" for each in read.problems):
            read.refuse("seq-length", None, "is missing, and Megatron-LM has no default for it")
        length = 1
    section: dict[str, Any] = {
        "seq_len": length, "global_batch": batch, "micro_batch": micro_batch, "steps": _steps(read, batch),
        "framework": _framework(read), "deterministic": _deterministic(read),
        "precision": _precision(read), "attention": _attention(read),
        "dropout": read.number("hidden-dropout", 0.1), "attention_dropout": read.number("attention-dropout", 0.1),
        "activation_checkpointing": _recomputation(read), "optimizer": _optimizer(read),
        "grad_clip": read.number("clip-grad", 1.0) or "none",
    }  # fmt: skip
    if (rate := read.number("lr")) is not None and rate > 0:
        section["learning_rate"] = rate
        section["schedule"] = _schedule(read, rate, section["steps"], batch)
    if (weight := read.number("moe-aux-loss-coeff")) and read.flag("num-experts"):
        section["load_balance_loss"] = weight
    if (weight := read.number("mtp-loss-scaling-factor")) and read.flag("mtp-num-layers"):
        section["mtp_loss"] = weight
    if (factor := read.number("moe-expert-capacity-factor")) and factor > 0:
        section["expert_dispatch"] = {"kind": "capacity", "factor": factor}
    if read.flag("cross-entropy-loss-fusion"):
        section["loss"] = "in-place" if read.text("cross-entropy-fusion-impl", "native") == "te" else "compiled"
    read.asked |= {"seed", "min-lr", "lr-warmup-fraction", "lr-warmup-iters", "cross-entropy-loss-fusion"}
    return section


def _global_batch(read: Reading) -> int | None:
    """--global-batch-size, or the first batch of a schedule that grows."""
    grows = read.given("step-batch-size-schedule")
    if grows and grows.strip():
        first = grows.split()[0].rpartition(":")[2]
        read.notes.append(f"the batch grows by --step-batch-size-schedule {grows}: this is a step of its beginning")
        return int(first) if first.isdecimal() and int(first) else None
    ramp = read.arguments.given.get("rampup-batch-size")
    if ramp is not None:
        read.asked.add("rampup-batch-size")
        read.notes.append("the batch grows by --rampup-batch-size: this is a step of the whole batch")
    return read.count("global-batch-size")


def _steps(read: Reading, batch: int) -> int:
    steps, sequences = read.count("train-iters", at_least=0), read.count("train-samples", at_least=0)
    return max(1, steps or (sequences or 0) // batch)


def _precision(read: Reading) -> dict[str, Any]:
    """Parameters in 16 bits with an fp32 copy at the optimizer; of bf16 gradients add up in fp32 (arguments.py)."""
    in_8_bits = read.given("fp8-format")
    if read.flag("fp16"):
        section: dict[str, Any] = {"kind": "fp16"}
    elif read.flag("bf16"):
        section = {"kind": "bf16", "master_weights": True}
        if not read.flag("grad-reduce-in-bf16") and read.text("main-grads-dtype", None) != "bf16":
            section["gradient_dtype"] = "fp32"
    else:
        return {"kind": "fp32"}
    if in_8_bits is not None:
        scaling = read.text("fp8-recipe", "delayed")
        if scaling not in _SCALINGS:
            read.refuse("fp8-recipe", scaling, f"must be one of {', '.join(_SCALINGS)}", "tensorwise")
        section = {**section, "kind": f"fp8-{_SCALINGS.get(str(scaling), 'tensorwise')}"}
        if not any(read.flag(name) for name in ("use-megatron-fsdp", "use-torch-fsdp2", "use-custom-fsdp")):
            section["weight_caching"] = True  # Transformer Engine's is_first_microbatch
    moments = {read.text("exp-avg-dtype", None), read.text("exp-avg-sq-dtype", None)} - {None, "fp32"}
    if read.flag("use-precision-aware-optimizer") and moments:
        if moments == {"bf16"}:
            section["moment_dtype"] = "bf16"
        else:
            read.refuse("exp-avg-dtype", ", ".join(sorted(map(str, moments))), "is not accounted for", "bf16")
    return section


def _deterministic(read: Reading) -> bool:
    """--deterministic-mode, or cuBLAS's workspace as it wants it alone."""
    environment = read.arguments.environment or {}
    return read.flag("deterministic-mode") or environment.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"


def _framework(read: Reading) -> str:
    """Transformer Engine's modules, or Megatron-LM's own."""
    local = read.text("transformer-impl", "transformer_engine") == "local"
    return "megatron-local" if local else "megatron-core"


def _attention(read: Reading) -> str:
    """The kernel: --attention-backend, or what Transformer Engine selects; unfused without it."""
    backend = read.text("attention-backend", "auto")
    if backend in ("unfused", "local") or (
        read.text("transformer-impl", "transformer_engine") == "local" and not read.flag("use-flash-attn")
    ):
        return "math"
    if not (read.flag("bf16") or read.flag("fp16")):
        return "math"
    return {"fused": "cudnn", "flash": "flash"}.get(str(backend), "sdpa")


def _recomputation(read: Reading) -> dict[str, Any] | str:
    """--recompute-granularity full or selective, the latter of attention's core by default."""
    granularity = read.text("recompute-granularity", None)
    if read.flag("recompute-activations") and granularity is None:
        granularity = "selective"
    modules = read.arguments.given.get("recompute-modules")
    read.asked |= {"recompute-modules", "recompute-method", "recompute-num-layers", "distribute-saved-activations"}
    if granularity == "selective":
        named = [
            each.strip("[],' ") for each in ((modules,) if isinstance(modules, str) else modules or ("core_attn",))
        ]
        named = [word for each in named for word in each.split()]
        if set(named) - {"core_attn"}:
            read.refuse("recompute-modules", " ".join(named), "is accounted for as core_attn alone", "core_attn")
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
    named = read.text("optimizer", "adam")
    kind = _OPTIMIZERS.get(str(named))
    if kind is None:
        read.refuse("optimizer", named, f"must be one of {', '.join(_OPTIMIZERS)}", "adam")
        kind = "adamw"
    section: dict[str, Any] = {"kind": kind, "weight_decay": read.number("weight-decay", 0.01)}
    if kind == "adamw":
        section |= {"beta1": read.number("adam-beta1", 0.9), "beta2": read.number("adam-beta2", 0.999)}
        section["implementation"] = "fused"  # Transformer Engine's and Apex's FusedAdam
    return section


def _schedule(read: Reading, rate: float, steps: int, batch: int) -> dict[str, Any]:
    kind = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}.get(
        str(read.text("lr-decay-style", "linear")), "cosine"
    )
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
