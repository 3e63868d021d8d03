"""The layout that Megatron-LM's arguments describe, as the fields of a ``[layout]`` section."""

from __future__ import annotations

from typing import Any

from trainledger.spec.convert.megatron.arguments import Reading


def ranks_of(read: Reading) -> tuple[int, int, int]:
    """Tensor ranks, pipeline stages and context ranks: the devices of one replica."""
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    tensor, pipeline, context = (read.count(name, 1) or 1 for name in names)
    return tensor, pipeline, context


def layout_of(read: Reading, data_ranks: int, layers: int) -> dict[str, Any]:
    """The ``[layout]`` section: what shards or replicates, the model's axes, the schedule, and what overlaps."""
    tensor, pipeline, context = ranks_of(read)
    section: dict[str, Any] = {}
    if read.flag("use-megatron-fsdp") or read.flag("use-torch-fsdp2") or read.flag("use-custom-fsdp"):
        section |= _sharded(read, data_ranks)
    elif read.flag("use-distributed-optimizer"):
        instances = read.count("num-distributed-optimizer-instances", 1) or 1
        replicas = instances if data_ranks % instances == 0 else 1
        section |= {"replicate": replicas, "shard": data_ranks // replicas, "zero": 1}
    else:
        section |= (
            {"shard": data_ranks, "zero": 0} if context > 1 or _spreads_experts(read) else {"replicate": data_ranks}
        )
    section |= {"tensor": tensor, "pipeline": pipeline, "context": context}
    if tensor > 1 and read.flag("sequence-parallel"):
        section |= {"sequence_parallel": True, "sequence_gather": "again"}
    if pipeline > 1:
        section |= _stages(read, pipeline, layers)
    kinds = read.arguments.given.get("cp-comm-type", "p2p")
    read.asked.add("cp-comm-type")
    if context > 1 and (kinds if isinstance(kinds, str) else kinds[0]) == "a2a":
        section["context_kind"] = "all-to-all"
    elif context > 1 and kinds != "p2p" and "p2p" not in kinds[:1]:
        read.notes.append(f"--cp-comm-type {kinds}: assuming a ring over all context ranks")
    experts = read.count("expert-model-parallel-size", 1) or 1
    if experts > 1:
        section["expert"] = experts
    within = read.count("expert-tensor-parallel-size")
    if within is not None and within != tensor and read.flag("num-experts"):
        read.notes.append(
            f"--expert-tensor-parallel-size {within}: assuming experts that are split over {tensor} tensor ranks"
        )
    section["overlap"] = _overlap(read, section) or "none"
    read.asked |= {"moe-token-dispatcher-type", "tp-comm-overlap-cfg", "overlap-param-gather-with-optimizer-step"}
    return section


def _spreads_experts(read: Reading) -> bool:
    return (read.count("expert-model-parallel-size", 1) or 1) > 1


def _sharded(read: Reading, data_ranks: int) -> dict[str, Any]:
    """Megatron-FSDP and FSDP2: optim = ZeRO-1, optim_grads = ZeRO-2, optim_grads_params = ZeRO-3."""
    kind = read.text("data-parallel-sharding-strategy", "optim_grads_params")
    zero = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(str(kind))
    if kind == "no_shard":
        return {"replicate": data_ranks}
    if zero is None:
        rule = "must be no_shard, optim, optim_grads or optim_grads_params"
        read.refuse("data-parallel-sharding-strategy", kind, rule, "optim_grads_params")
    return {"shard": data_ranks, "zero": zero or 3}


def _stages(read: Reading, pipeline: int, layers: int) -> dict[str, Any]:
    """The layers of stages, and the schedule: interleaved where a rank has several chunks of layers."""
    pattern = read.text("pipeline-model-parallel-layout", None)
    if pattern is not None:
        counts = layers_of_layout(pattern)
        if len(counts) % pipeline or sum(counts) != layers:
            rule = f"says {sum(counts)} layers on {len(counts)} stages, and there are {layers} on {pipeline} ranks"
            read.refuse("pipeline-model-parallel-layout", pattern, rule)
            return {}
        return _interleaved(len(counts) // pipeline, tuple(counts))
    chunks = read.count("num-virtual-stages-per-pipeline-rank")
    each = read.count("num-layers-per-virtual-pipeline-stage")
    first, last = read.count("decoder-first-pipeline-num-layers"), read.count("decoder-last-pipeline-num-layers")
    embedding, loss = (read.flag(f"account-for-{what}-in-pipeline-split") for what in ("embedding", "loss"))
    if chunks is None and each is not None:
        chunks = max(1, (layers + embedding + loss) // pipeline // each)
    chunks = chunks or 1
    total = pipeline * chunks
    if first is None and last is None and not embedding and not loss:
        return _interleaved(chunks, None)
    rest, stages = (
        layers + embedding + loss - (first or 0) - (last or 0),
        pipeline - (first is not None) - (last is not None),
    )
    if stages > 0 and rest % (stages * chunks) == 0:
        even = rest // (stages * chunks)
        counts = [even] * total
        for chunk in range(chunks if first or last else 0):
            if first is not None:
                counts[chunk * pipeline] = first // chunks
            if last is not None:
                counts[chunk * pipeline + pipeline - 1] = last // chunks
        counts[0] -= embedding
        counts[-1] -= loss
        if sum(counts) == layers and min(counts) >= 0:
            return _interleaved(chunks, tuple(counts))
    read.refuse("num-layers", layers, f"cannot be divided evenly among {total} chunks of a pipeline of {pipeline}")
    return {}


def _interleaved(chunks: int, counts: tuple[int, ...] | None) -> dict[str, Any]:
    section: dict[str, Any] = {} if counts is None else {"stage_layers": list(counts)}
    if chunks > 1:
        section |= {"schedule": "interleaved", "virtual_stages": chunks}
    return section


def layers_of_layout(pattern: str) -> list[int]:
    """Layers of each stage of a --pipeline-model-parallel-layout: t is a layer, | the end of a stage.

    >>> layers_of_layout("Et*2|(tt|)*2tL")
    [2, 2, 2, 1]
    """
    import re

    text = pattern.replace(" ", "").replace(",", "")[:4096]
    for _ in range(2):  # (tt|)*5, then t*2
        text = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda found: found[1] * min(1024, int(found[2])), text)[: 2**16]
        text = re.sub(r"([A-Za-z])\*(\d{1,4})", lambda found: found[1] * min(1024, int(found[2])), text)[: 2**16]
    return [each.count("t") for each in text.split("|")]


def _overlap(read: Reading, section: dict[str, Any]) -> list[str]:
    """What overlaps with compute: gradients of inputs always, with tensor ranks (core/tensor_parallel/layers.py)."""
    found = []
    if read.flag("overlap-grad-reduce"):
        found.append("gradients")
    if read.flag("overlap-param-gather") and section.get("zero", 3) < 3:
        found.append("parameters")
    if read.flag("tp-comm-overlap") and section.get("sequence_parallel"):
        found.append("tensor")
    if section["tensor"] > 1:
        found.append("input-gradients")
    if read.flag("overlap-moe-expert-parallel-comm"):
        found.append("experts")
    return found
