"""Runs of Megatron-LM read from its arguments: a launch line, a script, a YAML map, or the log of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainledger.spec.convert.megatron.arguments import (
    LARGEST,
    SUFFIXES,
    Arguments,
    Reading,
    changes_nothing,
    from_values,
    read_arguments,
    tables,
)
from trainledger.spec.convert.megatron.sections import model_of, recipe_of
from trainledger.spec.durable import opened
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import ceil_div

__all__ = ["SUFFIXES", "Arguments", "MegatronRun", "from_arguments", "from_values", "read_arguments", "read_file"]

_DISPATCHERS = {"allgather": "all", "alltoall": "copies", "alltoall_seq": "copies", "flex": "nodes"}
_NAMED = 12  # arguments that a sentence names


@frozen
class MegatronRun:
    """A run of Megatron-LM: the sections of a run file, what Megatron-LM's defaults supplied, and sentences.

    ``not_understood`` are arguments that have no place in a run file and may change it; ``notes`` say what was assumed.
    """

    table: dict[str, dict[str, Any]]
    supplied: dict[str, Any]
    not_understood: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """All of it in sentences."""
        said = list(self.notes)
        if self.not_understood:
            said.append(f"not understood: {_listed([f'--{name}' for name in self.not_understood])}")
        if self.supplied:
            given = [f"--{name} {value}" for name, value in self.supplied.items()]
            said.append(f"defaults of Megatron-LM: {_listed(given)}")
        return tuple(said)


def _listed(words: list[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def read_file(path: Path) -> Arguments:
    """The arguments in a file; nothing in it is run. Raises `InvalidInput` for one that cannot be read or has none."""
    where = str(path)
    try:
        with opened(path) as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise InvalidInput([Problem("", None, f"cannot be read: {error.strerror}")], where) from None
    if len(content) > LARGEST and b"arguments ----" not in content:
        raise InvalidInput([Problem("", None, f"is larger than {LARGEST:,} bytes, and no log of Megatron-LM")], where)
    return read_arguments(content.decode("utf-8", errors="replace"), where)


def from_arguments(arguments: Arguments, *, devices: int | None = None, where: str = "") -> MegatronRun:
    """A run on so many devices, where None on as many as the text says; raises `InvalidInput` with every problem.

    Arguments that are not given have Megatron-LM's defaults of 2026 (commit d98e8a64).

    >>> text = ("--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 4 "
    ...         "--max-position-embeddings 1024 --bf16 --tensor-model-parallel-size 2")
    >>> run = from_arguments(read_arguments(text), devices=8)
    >>> run.table["layout"]["replicate"], run.table["recipe"]["global_batch"], run.supplied["hidden-dropout"]
    (4, 16, 0.1)
    """
    run = _run_of(arguments, devices, where)
    for other in arguments.others:
        try:
            same = _run_of(other, devices, where).table == run.table
        except InvalidInput as error:  # a variable that is set on one way alone
            same = any("$" in str(problem.value) for problem in error.problems)
        if not same:
            raise InvalidInput([_open_question(arguments, other)], where)
    return run


def _open_question(followed: Arguments, other: Arguments) -> Problem:
    """The problem of a script that describes one of two runs by a condition that it leaves open."""
    assert followed.script is not None
    assert other.script is not None
    one, two = followed.script, other.script
    names = [name for name in (*followed.given, *other.given) if followed.given.get(name) != other.given.get(name)]
    name = next((name for name in names if not changes_nothing(name)), names[0] if names else "nproc-per-node")
    values = [arguments.given.get(name) if names else arguments.devices for arguments in (followed, other)]
    rule = f"the text launches more than one run (lines {followed.line} and {other.line}): give one launch line"
    asked = next((ours for ours, theirs in zip(one.decisions, two.decisions, strict=False) if ours != theirs), None)
    if asked is not None:
        rule = f"line {asked.line} decides ({asked.text}), and the text does not say how: set its variable "
        rule += "in a line before, or give the launch line itself"
        differ = [name for name, text in one.variables.items() if two.variables.get(name, text) != text]
        if variable := next((name for name in differ if one.variables[name] in values), None):
            rule = f"{variable} is set in lines {one.set_at[variable]} and {two.set_at[variable]}; {rule}"
    return Problem(f"--{name}", " or ".join("absent" if value is None else str(value) for value in values), rule)


def _run_of(arguments: Arguments, devices: int | None, where: str) -> MegatronRun:
    read = Reading(arguments)
    commands = () if arguments.script is None else arguments.script.commands
    if sourced := [words[1] for words in commands if words[0] in ("source", ".") and len(words) > 1]:
        read.notes.append(f"not opened, so that what they set is not known: {_listed(sourced)}")
    program = arguments.program.lower()
    for word, kind in tables()["programs"].items():
        if word in program:
            read.problems.append(Problem("", None, f"{arguments.program} trains {kind}, which is not accounted for"))
            break
    for name, rule in tables()["refused"].items():
        if name in arguments.given:
            read.refuse(name, " ".join(read.words(name)), rule)
    tensor, pipeline, context = ranks_of(read)
    replica = tensor * pipeline * context
    count = devices or arguments.devices
    if count is None:
        rule = "is not said by the arguments: how many devices the run has"
        read.problems.append(Problem("cluster.count", None, rule, f"--count {8 * ceil_div(replica, 8)}"))
    elif count % replica:
        sizes = f"tensor {tensor} x pipeline {pipeline} x context {context}"
        rule = f"must be a multiple of the {replica} devices of a replica ({sizes})"
        read.problems.append(Problem("cluster.count", count, rule, max(1, round(count / replica)) * replica))
    ranks = max(1, (count or replica) // replica)
    model = model_of(read, tensor)
    table = {
        "model": model,
        "recipe": recipe_of(read, ranks),
        "layout": layout_of(read, ranks, model["n_layers"]),
        "cluster": {"count": count or replica},
    }
    if read.problems:
        raise InvalidInput(read.problems, where)
    return MegatronRun(table, read.supplied, read.strangers(), tuple(read.notes))


def ranks_of(read: Reading) -> tuple[int, int, int]:
    """Tensor ranks, pipeline stages and context ranks: the devices of one replica."""
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    tensor, pipeline, context = (read.count(name, 1) or 1 for name in names)
    return tensor, pipeline, context


def layout_of(read: Reading, data_ranks: int, layers: int) -> dict[str, Any]:
    """The ``[layout]`` section: what shards or replicates, the model's axes, the schedule, and what overlaps."""
    tensor, pipeline, context = ranks_of(read)
    experts, within = read.count("expert-model-parallel-size", 1) or 1, read.count("expert-tensor-parallel-size")
    folds = within is not None and within != tensor and bool(read.count("num-experts"))
    section: dict[str, Any] = {}
    if read.flag("use-megatron-fsdp") or read.flag("use-torch-fsdp2") or read.flag("use-custom-fsdp"):
        section |= _sharded(read, data_ranks)
    elif read.flag("use-distributed-optimizer"):
        instances = read.count("num-distributed-optimizer-instances", 1) or 1
        replicas = instances if data_ranks % instances == 0 else 1
        section |= {"replicate": replicas, "shard": data_ranks // replicas, "zero": 1}
    elif context > 1 or experts > 1 or folds:
        section |= {"shard": data_ranks, "zero": 0}
    else:
        section["replicate"] = data_ranks
    section |= {"tensor": tensor, "pipeline": pipeline, "context": context}
    if tensor > 1 and read.flag("sequence-parallel"):
        section |= {"sequence_parallel": True, "sequence_gather": "again"}
    if pipeline > 1:
        section |= _stages(read, pipeline, layers)
    kinds = read.words("cp-comm-type") or ("p2p",)
    if context > 1 and kinds[0] == "a2a":
        section["context_kind"] = "all-to-all"
    elif context > 1 and kinds[0] != "p2p":
        said = kinds if len(kinds) > 1 else kinds[0]
        read.notes.append(f"--cp-comm-type {said}: assuming a ring over all context ranks")
    sends = ""
    if experts > 1 or read.given("moe-token-dispatcher-type"):
        sends = read.chosen("moe-token-dispatcher-type", _DISPATCHERS, "allgather", "alltoall")
    if experts > 1:
        section["expert"] = experts
        if not read.number("moe-expert-capacity-factor"):
            section["expert_send"] = sends
    if folds:
        section["expert_tensor"] = within
    section["overlap"] = _overlap(read, section) or "none"
    return section


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
        text = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda match: match[1] * min(1024, int(match[2])), text)[: 2**16]
        text = re.sub(r"([A-Za-z])\*(\d{1,4})", lambda match: match[1] * min(1024, int(match[2])), text)[: 2**16]
    return [stage.count("t") for stage in text.split("|")]


def _overlap(read: Reading, section: dict[str, Any]) -> list[str]:
    """Overlapped communication: gradients of inputs always, with tensor ranks (core/tensor_parallel/layers.py)."""
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
