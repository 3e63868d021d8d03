"""Runs of programs that train models, read from their files or launch lines by a table of keys each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainledger.spec.convert import foreign_program
from trainledger.spec.convert.trainers.files import Launched
from trainledger.spec.convert.trainers.files import values_of as _values_of
from trainledger.spec.convert.trainers.reading import Reading, tables
from trainledger.spec.frozen import frozen
from trainledger.spec.objective import OBJECTIVES
from trainledger.spec.optimizers import OPTIMIZERS
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.schedule import SCHEDULES
from trainledger.spec.units import ceil_div

# The place of a size's factor in ``run.times``: of heads and the MLP, of the hidden size, of layers.
_WIDENED = {"n_heads": 0, "n_kv_heads": 0, "d_ff": 0, "expert_d_ff": 0, "d_model": 1, "n_layers": 2}

_BOTH_STACKS = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})
_OF_RECIPE = ("lora", "optimizer", "schedule", "precision", "objective")  # sections of ours that are parts of one

__all__ = ["TrainerRun", "from_launch", "from_values", "generating", "tables", "values_of"]


@frozen
class TrainerRun:
    """A run of a program: the sections of a run file, the model's name, and sentences on the rest.

    The model is empty where the file names none; the ``[model]`` section is there where the file has its sizes.
    ``said_by`` has the file's keys by the fields of a run that they mean, and by ``run.model``; ``rollout`` is what
    generates text between steps, by the options of `answers.rl`.
    """

    program: str
    model: str
    table: dict[str, dict[str, Any]]
    assumed: tuple[str, ...]
    remarks: tuple[str, ...]
    said_by: Mapping[str, str]
    rollout: Mapping[str, Any]


def values_of(named: str) -> Launched | None:
    """The values in a file of a program with a table, or of a launch line; None for any other text."""
    return _values_of(named, tables())


def generating(launch: Launched) -> Launched | None:
    """A launch that generates text between steps, by keys that are read, no longer refused for it; None for others."""
    table = tables().get(launch.program or "", {"fields": {}})
    if not any(path.startswith("rollout.") for path in table["fields"].values()):
        return None
    return replace(launch, refused="") if launch.refused in table["commands"].values() else launch


def from_launch(launch: Launched, *, devices: int | None = None, where: str = "") -> TrainerRun:
    """The run of a file or a launch line, as `from_values`; raises `InvalidInput`."""
    if launch.refused:
        raise InvalidInput([Problem(f"the command of {launch.program}", None, launch.refused)], where)
    return from_values(launch.values, devices=devices, where=where, program=launch.program)


def from_values(
    values: Mapping[Any, Any], *, devices: int | None = None, where: str = "", program: str | None = None
) -> TrainerRun:
    """The run of a file on so many devices, None those that it says or the fewest that it takes; raises
    `InvalidInput` with all problems.

    >>> file = {"base_model": "org/m", "sequence_len": 512, "micro_batch_size": 2, "bf16": True, "learning_rate": 1e-4}
    >>> run = from_values(file | {"gradient_accumulation_steps": 4}, devices=8)
    >>> run.model, run.table["recipe"]["global_batch"], run.table["recipe"]["precision"], run.table["layout"]
    ('org/m', 64, {'kind': 'bf16'}, {'replicate': 8})
    """
    program = program or foreign_program(values)
    assert program is not None
    read = Reading(program, values, where)
    model, sizes = _model(read)
    layout, count, data_ranks = _layout(read, devices)
    table = {"recipe": _recipe(read, layout, data_ranks), "layout": layout, "cluster": {"count": count}}
    if teacher := read.said.get("run.teacher"):
        table["teacher"] = {"preset": teacher}
    if read.problems:
        raise InvalidInput(read.problems, where)
    meanings = (read.table["fields"].get(key, "") for key in read.supplied)
    assumed = [path for path in meanings if path.startswith("recipe.") and path.partition(".")[2] in table["recipe"]]
    assumed += ["recipe.steps"] * read.epochs + ["cluster.count"] * (devices is None and not read.devices_said)
    return TrainerRun(
        program,
        model,
        {"model": sizes} | table if sizes else table,
        tuple(assumed),
        tuple(read.remarks()),
        {f"recipe.{path}" if path.partition(".")[0] in _OF_RECIPE else path: key for path, key in read.said_by.items()},
        read.group("rollout"),
    )


def _model(read: Reading) -> tuple[str, dict[str, Any]]:
    """The model's name, and its sizes where the file or the program's own list of models has them."""
    words = [read.said.pop(path) for path in ("run.model", "run.flavor") if path in read.said]
    known, name = read.table["models"], " ".join(map(str, words))
    if times := read.said.get("run.times"):
        widened = (
            (path, _WIDENED[path.rpartition(".")[2]])
            for path in read.group("model")
            if path.rpartition(".")[2] in _WIDENED
        )
        read.said |= {f"model.{path}": read.said[f"model.{path}"] * times[place] for path, place in widened}
    if not all(isinstance(word, str) for word in words):
        read.refuse(read.key_of("run.model"), str(words[0]), "must name a model")
    last, sizes = name.rpartition("/")[2], _nested(read.group("model"))
    own = known.get(name, known.get(last, name))
    if isinstance(own, dict):
        return "", {"name": last.replace(" ", "-").lower()} | own | sizes
    if own and "d_model" in sizes:  # which are those of a model without a name, but for those in the file
        written = _nested({path: size for path, size in read.group("model").items() if f"model.{path}" in read.given})
        own, sizes = ("", {"name": last} | sizes) if "d_model" in written else (own, written)
    if own.startswith(("/", "./", "../", "~", "checkpoints/")):
        own = own.removeprefix("checkpoints/") if own.startswith("checkpoints/") else Path(own).name
    return own, sizes


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by their path as maps in one another."""
    found: dict[str, Any] = {}
    for path, value in fields.items():
        *parts, last = path.split(".")
        part = found
        for name in parts:
            part = part.setdefault(name, {})
        part[last] = value
    return found


def _layout(read: Reading, devices: int | None) -> tuple[dict[str, Any], int, int]:
    """The ``[layout]``, the devices and the data ranks; data ranks replicate, or shard as DeepSpeed or FSDP does.

    Where nobody says how many devices there are, they are the fewest that the file's sizes take.
    """
    said, shards = read.said, "layout.shard" in read.said
    sizes = {
        axis: read.count(f"layout.{axis}") for axis in ("tensor", "context", "pipeline", "expert", "shard", "replicate")
    }
    shard, replicate = sizes.pop("shard"), sizes.pop("replicate")
    within = read.count("layout.expert_tensor") if "layout.expert_tensor" in said else sizes["tensor"]
    zero = said.get("run.zero")
    replica, fewest = sizes["tensor"] * sizes["context"] * sizes["pipeline"], shard * replicate
    known = {path for path in ("run.devices", "run.per_node", "run.nodes") if path in said}
    read.devices_said = bool(known)
    if devices is None and known:
        devices = read.count("run.devices") if "run.devices" in known else read.count("run.per_node")
        devices *= 1 if "run.devices" in known else read.count("run.nodes")
    whole, micro, times = (said.get(path) for path in ("recipe.global_batch", "recipe.micro_batch", "run.accumulation"))
    fewest = max(fewest, sizes["expert"] * within // (sizes["context"] * sizes["tensor"]))
    if said.get("recipe.offload") == "parameters" and (zero == 3 or said.get("run.sharded")):
        fewest = max(fewest, 2)  # pieces of weights are offloaded, which one device has not
    if type(whole) is int and type(micro) is int and type(times) is int and micro * times > 0:
        fewest = max(fewest, whole // (micro * times))
    count = devices or replica * fewest
    if count % (size := replica * shard * replicate):
        rule = f"must be a multiple of the {size} devices that the file's sizes take"
        read.refuse("cluster.count", count, rule, ceil_div(count, size) * size)
    data = max(1, count // replica)
    if zero is not None and zero not in (0, 1, 2, 3):
        read.refuse(read.key_of("run.zero"), zero, "must be a stage of 0 to 3", 3)
    read.sharded = zero is None and bool(shards or said.get("run.sharded"))
    section = {axis: size for axis, size in sizes.items() if size > 1}
    section |= {"expert_tensor": within} if within != sizes["tensor"] else {}
    if said.get("run.of_shards"):  # data ranks that do not shard are replicas (DDP), and context ranks always shard
        shard, shards = shard if shards else max(1, data // replicate), True
        read.sharded = zero is None and shard * sizes["context"] > 1
    if said.get("run.experts_over_tensor") and {"expert", "tensor"} <= section.keys():
        read.refuse(
            read.key_of("layout.expert"), sizes["expert"], "is over tensor ranks too, which is not accounted for", 1
        )
    if zero or read.sharded:
        section |= {"shard": shard if shards else max(1, data // replicate), "zero": zero or 3}
        section |= {"replicate": data // section["shard"]} if data > section["shard"] else {}
        section |= {"reshard_after_forward": False} if said.get("run.reshard") is False and not zero else {}
    elif section.keys() & {"context", "expert", "expert_tensor"}:
        section |= {"shard": data, "zero": 0}
    else:
        section |= {"replicate": data}
    if count == 1 and "expert" not in section:
        return {}, count, data
    kinds = {
        "tensor": ("sequence_parallel", "sequence_gather"),
        "pipeline": ("schedule", "virtual_stages"),
        "context": ("context_kind",),
    }
    own = [name for axis, names in kinds.items() if axis in section for name in names] + ["overlap"]
    own += ["reshard_after_forward"] if read.sharded else []
    if "pipeline" in section and said.get("run.lighter_ends"):
        read.notes.append("layers are divided evenly; the program gives one less to the first and the last stage")
    return section | {name: value for name, value in read.group("layout").items() if name in own}, count, data


def _recipe(read: Reading, layout: Mapping[str, Any], data_ranks: int) -> dict[str, Any]:
    """The ``[recipe]``."""
    said, batch = read.said, _batch(read, data_ranks, pipeline="pipeline" in layout)
    section = read.group("recipe") | batch
    if kind := said.get("run.objective"):  # the programs count pairs, whose sequences are two
        answered = OBJECTIVES[kind]
        own = {name: value for name, value in read.group("objective").items() if name in answered.__dataclass_fields__}
        section["objective"] = {"kind": kind} | own
        section |= {name: (answered.answers or 1) * size for name, size in batch.items()}
        section |= {"loss": "full"} if kind in ("reward", "distillation") else {}
    if read.epochs:
        section["steps"] = 1
    adapter = said.get("run.adapter") or None
    precision = _precision(read, adapter is not None, split="tensor" in layout or "pipeline" in layout)
    section["precision"] = precision | read.group("precision")
    if adapter is not None:
        section["lora"] = _lora(read, adapter)
        if kind == "reward":  # PEFT trains the scores' matrix whole
            section["lora"]["whole"] = ["lm_head"]
    elif bits := said.get("run.bits"):
        read.refuse(f"weights in {bits} bits", bits, "need an adapter: quantized weights are not trained")
    optimizer = read.group("optimizer")
    of_kind = OPTIMIZERS[optimizer.setdefault("kind", "adamw")].__dataclass_fields__
    section["optimizer"] = {name: each for name, each in optimizer.items() if name in of_kind or name == "kind"}
    if said.get("run.compiled"):
        section |= {"compile": "model" in said["run.components"]}
        section |= {"loss": "compiled"} if "loss" in said["run.components"] else {}
    if "tensor" in layout and section.pop("loss", "full") != "full":
        read.notes.append("tensor ranks: the loss is counted of all logits at once, an upper bound")
    if section.get("loss") == "fused" and section["precision"]["kind"].endswith("-sharded"):
        section["loss"] = "chunked"  # whose gradients may be scaled or gathered afterwards
        read.notes.append("a fused loss of sharded weights is counted as a chunked one")
    if section.get("grad_clip") in (0, 0.0):
        section["grad_clip"] = "none"
    if said.get("run.recompute_shards") and layout.get("shard", 1) > 1:
        section["activation_checkpointing"] = "full"
    if (chunks := said.get("run.chunks")) and "tensor" not in layout:
        apart = section["precision"]["kind"].endswith("-sharded") or section.get("framework") == "jax"
        loss = "chunked" if apart else "fused"
        section["loss"] = {"kind": loss, "chunks": chunks}
    if said.get("run.inputs_on_host"):
        if section.get("activation_checkpointing") == "full":
            section["activation_checkpointing"] = {"kind": "full", "inputs": "host"}
        else:
            rule = (
                "moves all saved activations to host memory, which is accounted for with gradient checkpointing alone"
            )
            read.refuse(read.key_of("run.inputs_on_host"), True, rule)
    if said.get("run.places"):
        if (factor := said.get("run.capacity", -1.0)) > 0:
            section["expert_dispatch"] = {"kind": "capacity", "factor": factor}
        else:
            rule = f"computes experts densely, which is not accounted for without {read.key_of('run.capacity')}"
            read.refuse(read.key_of("run.places"), False, rule, True)
    if policy := read.group("remat"):
        section["activation_checkpointing"] = _named(read, policy)
    if said.get("run.selective") and (every := said.get("run.every")):
        section["activation_checkpointing"] = {"kind": "full", "every": every}
    schedule = {"kind": "cosine"} | read.group("schedule")
    rate, least = section.get("learning_rate"), said.get("run.min_lr")
    if isinstance(rate, int | float) and isinstance(least, int | float) and 0 < least < rate:
        schedule["final_ratio"] = least / rate
    schedule |= {"kind": "wsd"} if "decay_fraction" in schedule else {}
    of_kind = SCHEDULES[schedule["kind"]].__dataclass_fields__
    schedule = {name: each for name, each in schedule.items() if name in of_kind or name == "kind"}
    if not read.epochs:
        warmup = said.get("run.warmup_steps") or said.get("run.warmup_ratio")
        if isinstance(warmup, float) and warmup < 1 and isinstance(section.get("steps"), int):
            warmup = round(warmup * section["steps"])
        if isinstance(warmup, int) and isinstance(section.get("steps"), int):
            warmup = min(warmup, section["steps"])
        schedule |= {"warmup_steps": warmup} if warmup else {}
    return section | {"schedule": schedule}


# Outputs that MaxText names together.
_TOGETHER = {"qkv": ("q_proj", "k_proj", "v_proj"), "kv": ("k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}


def _named(read: Reading, policy: dict[str, Any]) -> dict[str, Any]:
    """Checkpointing by the names of what is kept, on the device or the host; a custom policy has a key for each."""
    places = read.group("named") if policy.get("custom") else policy
    for name, place in places.items():
        if place not in ("remat", "device", "offload"):
            read.refuse(read.key_of(f"named.{name}"), place, "must be remat, device or offload", "remat")
    inputs = "host" if places.pop("inputs", "") == "offload" else "device"
    keep, offload = (
        [each for name, place in places.items() if place == where for each in _TOGETHER.get(name, (name,))]
        for where in ("device", "offload")
    )
    if not keep and not offload:
        return {"kind": "full", "inputs": inputs}
    sent = {"offload": offload} if offload else {}
    return {"kind": "selective", "keep": keep or "none", "inputs": inputs} | sent


def _batch(read: Reading, data_ranks: int, *, pipeline: bool) -> dict[str, Any]:
    """The batches: a micro-batch is of a device, and data ranks and accumulation make the global batch of it.

    Stages run parts of a micro-batch one after the other where the program says so.
    """
    said = read.said
    whole = read.count("recipe.global_batch") if "recipe.global_batch" in said else None
    steps = read.count("run.accumulation") if "run.accumulation" in said else None
    micro = read.count("recipe.micro_batch") if whole is None or "recipe.micro_batch" in said else None
    part = said.get("run.stage_batch") if pipeline else None
    if steps is None and whole is None and (aim := said.get("run.batch_aim")):
        steps = max(1, ceil_div(aim, (micro or 1) * data_ranks))
        read.notes.append(f"assuming {steps} micro-batches, as the program does for a batch of about {aim}")
    times = data_ranks * (steps or 1)
    if micro is None and whole is not None and whole % times:
        rule = f"must be a multiple of {times}: data ranks x gradient accumulation"
        read.refuse(read.key_of("recipe.global_batch"), whole, rule, ceil_div(whole, times) * times)
    if whole is not None and micro is not None and steps is not None and whole != micro * times:
        rule = f"must be {micro * times}: micro-batch {micro} x accumulation {steps} x {data_ranks} data ranks"
        read.refuse(read.key_of("recipe.global_batch"), whole, rule, micro * times)
    micro = max(1, (whole or 1) // times) if micro is None else micro
    return {"micro_batch": part or micro, "global_batch": whole or micro * times}


def _precision(read: Reading, adapters: bool, *, split: bool) -> dict[str, Any]:
    said = read.said
    half = said.get("run.half")
    if half is None or (said.get("run.mixed_by_shards") and split and not read.sharded):
        return {"kind": "tf32" if said.get("run.tf32") else "fp32"}
    if said.get("run.float8"):
        kind = "mxfp8" if said.get("run.mx") else f"fp8-{said.get('run.scaling', 'tensorwise')}"
        return {"kind": kind + ("-sharded" if read.sharded else "")}
    zero = "run.zero" in said
    if adapters and half == "fp16":
        read.notes.append("embeddings, head and norms are counted in fp32, as PEFT casts them beside quantized weights")
        return {"kind": "fp16-mixed"}
    if adapters or (said.get("run.pure") and not read.sharded and not zero):
        if adapters:
            read.notes.append(f"adapters are counted in {half} as the model is; PEFT keeps them in fp32")
        precision = {"kind": half}
        if half == "bf16" and said.get("run.moments") == "fp32":
            precision["moment_dtype"] = "fp32"
        return precision
    if zero:
        return {"kind": half} | ({"master_weights": True} if half == "bf16" else {})
    return {"kind": "bf16-sharded" if read.sharded and half == "bf16" else f"{half}-mixed"}


def _lora(read: Reading, adapter: str) -> dict[str, Any]:
    section, bits = read.group("lora"), read.said.get("run.bits")
    section.setdefault("alpha", 2 * section["rank"] if type(section.get("rank")) is int else 16)
    targets = section.get("targets")
    if chosen := [name for name, on in read.group("target").items() if on]:
        targets = chosen
    names = targets.replace(",", " ").split() if isinstance(targets, str) else targets or []
    if not isinstance(names, list):
        read.refuse(read.key_of("lora.targets"), targets, "must be names of layers", "all-linear")
        names = []
    linear = read.said.get("run.linear") or not names or {"all", "all-linear"} & set(map(str, names))
    section["targets"] = ["linear"] if linear else list(names)
    if parameters := section.pop("parameters", None):
        stacks = " ".join(map(str, parameters)).split() if isinstance(parameters, list) else str(parameters).split()
        numbered = any(map(str.isdigit, "".join(stacks)))
        if numbered or {name.rpartition("experts.")[2] for name in stacks} not in _BOTH_STACKS:
            rule = "must be both stacks of the experts of all layers: a part of them, or a router, is not accounted for"
            read.refuse(read.key_of("lora.parameters"), parameters, rule, "experts.gate_up_proj experts.down_proj")
        section["targets"].append("experts")
    if isinstance(whole := section.get("whole"), str):
        section["whole"] = whole.replace(",", " ").split()
    if whole:
        read.notes.append("what is trained beside adapters is counted once; PEFT keeps the frozen original too")
    if bits not in (None, 4, 8):
        read.refuse(read.key_of("run.bits"), bits, "must be 4 or 8", 4)
    if bits or adapter == "qlora":
        section["base_format"] = "int8" if bits == 8 else "nf4"
    elif read.said.get("run.half") == "fp16":
        section["base_format"] = "bf16"  # as large as fp16
    return section
