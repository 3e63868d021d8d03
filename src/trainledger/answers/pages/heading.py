"""The lines above an account that say whose it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from trainledger.answers.defaults import assumptions
from trainledger.forecast.plan.changes import RESHARDS
from trainledger.ledger.model.parameters import parameters
from trainledger.report.document import Item, Items, Section, section
from trainledger.report.table import commands, wrapped
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.objective import DPO, KTO, ORPO, Distillation, Reward
from trainledger.spec.optimizers import ACCOUNTED_ONLY
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import BLOCK_ROWS, Run, dealt
from trainledger.spec.run_text import found_layout
from trainledger.spec.units import counted, format_count, format_percent, format_seconds

_FEW = 8  # numbers that are shown one by one


def heading(run: Run, backend: str) -> str:
    """The model, the devices, a step and whose kernels run it (``backend``: of `spec.device`), in at most 80 columns.

    >>> from trainledger.answers.load import load
    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 512, "global_batch": 4, "steps": 1}})
    >>> print(heading(run, "cpu"))
    gpt2 on this-machine, with the kernels of a CPU: 4 sequences of 512 tokens a
    step, fp32, adamw
    """
    cluster, recipe = run.cluster, run.recipe
    where = cluster.device if cluster.count == 1 else f"{cluster.count:,} x {cluster.device}"
    kernels = ", with the kernels of a CPU" if backend == "cpu" else ""
    step = f"{_sequences(recipe)} of {counted(recipe.seq_len, 'token')} a step"
    return wrapped(f"{run.model.name} on {where}{kernels}: {step}, {recipe.precision.kind}, {recipe.optimizer.kind}")


def model_line(model: ModelSpec, adapters: int | None = None) -> str:
    """A model's name and size: its active parameters where they are fewer, and those of ``adapters``.

    >>> from trainledger.answers.load import model
    >>> model_line(model("gpt2"))
    'gpt2: 124,439,808 parameters, 12 layers, hidden size 768'
    """
    count = parameters(model)
    active = "" if count.active == count.total else f" ({count.active:,} active)"
    more = "" if adapters is None else f" + {adapters:,} in adapters (only these are trained)"
    size = f"{counted(model.n_layers, 'layer')}, hidden size {model.d_model:,}"
    return f"{model.name}: {count.total:,} parameters{active}{more}, {size}"


def of_run(run: Run) -> tuple[str, ...]:
    """What a step of a run is, in lines of any width: its sequences, its recipe, its devices and its layout.

    >>> from trainledger.answers.load import load
    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 8, "global_batch": 4, "steps": 1}})
    >>> of_run(run)[0]
    'A step: 4 sequences of 8 tokens'
    """
    recipe = run.recipe
    batches = f", in {run.grad_accum} micro-batches of {run.device_batch}" if run.grad_accum > 1 else ""
    sequences = _sequences(recipe)
    within = " within documents" if recipe.documents is not None else ""
    return (
        f"A step: {sequences} of {_tokens(run)}{batches}",
        f"{recipe.precision.kind}, {recipe.optimizer.kind} ({recipe.optimizer.implementation}), {recipe.attention} "
        f"attention{within}, activation checkpointing {recipe.activation_checkpointing.kind}",
        *_devices(run),
        *_mixture(run),
        *_objective(run),
    )


def _tokens(run: Run) -> str:
    """The length of a sequence, which rows of uneven length have at most."""
    return f"{'up to ' if run.data.lengths else ''}{counted(run.recipe.seq_len, 'token')}"


def _sequences(recipe: Recipe) -> str:
    """The sequences of a step, of preferences in pairs."""
    if recipe.objective.answers == 2:
        return f"{counted(recipe.global_batch // 2, 'pair')} of sequences"
    return counted(recipe.global_batch, "sequence")


def _objective(run: Run) -> Iterator[str]:
    """What preferences or a student are compared with."""
    recipe, objective, teacher = run.recipe, run.recipe.objective, run.reference
    if isinstance(objective, Distillation) and teacher is not None:
        count, ratio = format_count(parameters(teacher.model).total), objective.kd_ratio
        rest = f", the loss of the next token by {1 - ratio:g}" if ratio < 1 else ""
        yield (
            f"distillation from {teacher.model.name} ({count}, frozen, in {teacher.recipe.precision.parameters}): the "
            f"KL divergence at temperature {objective.temperature:g} is weighed by {ratio:g}{rest}"
        )
    if isinstance(objective, ORPO):
        yield f"ORPO with weight {objective.weight:g} of the odds ratio, without a reference"
    if isinstance(objective, Reward):
        yield "a reward model: one score in place of logits, compared in pairs"
    if isinstance(objective, DPO | KTO):
        beside = "a second, frozen model" if recipe.lora is None else "the frozen weights with adapters off"
        reference = beside if objective.reference == "device" else "precomputed"
        further = ", and a forward more of mismatched answers" if objective.mismatched else ""
        yield f"{objective.kind.upper()} with beta {objective.beta:g}; the reference is {reference}{further}"


def unfused_update(run: Run, seconds: float | None) -> str | None:
    """Whose time an update is that others run as one kernel, which this engine accounts for and does not have."""
    optimizer = run.recipe.optimizer
    if (optimizer.kind, "fused") not in ACCOUNTED_ONLY or optimizer.implementation == "fused" or not seconds:
        return None
    return (
        f"The {format_seconds(seconds)} of the update are those of an unfused {optimizer.kind}, many small kernels for "
        "each tensor, and not of the method: recipe.optimizer.implementation=fused is one kernel, as in bitsandbytes."
    )


def run_line(run: Run) -> str:
    """The model, the devices with the layout, and a step, in one sentence.

    >>> from trainledger.answers.load import load
    >>> run_line(load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 8, "global_batch": 4, "steps": 1}}))
    'gpt2 (124.4M) on this-machine: 4 sequences of 8 tokens a step, fp32, adamw, no recomputation'
    """
    recipe, cluster = run.recipe, run.cluster
    where = cluster.device if cluster.count == 1 else f"{cluster.count:,} x {cluster.device}"
    spread = "" if run.layout.alone else f", {layout_name(run.layout)}"
    batches = f" in micro-batches of {run.device_batch}" if run.grad_accum > 1 else ""
    step = f"{_sequences(recipe)} of {_tokens(run)} a step{batches}"
    count = format_count(parameters(run.model).total)
    learned = f", distilled from {run.teacher.name}" if run.teacher is not None else ""
    return (
        f"{run.model.name} ({count}) on {where}{spread}{learned}: {step}, {recipe.precision.kind}, "
        f"{recipe.optimizer.kind}, {recomputation(recipe)}"
    )


def read_as(run: Run, *, by_file: bool) -> Iterator[str]:
    """How another program's file was read: the run, whether the file says how many devices, and what is assumed."""
    yield run_line(run)
    if by_file:
        devices = counted(run.cluster.count, "device")
        yield f"{devices} by the file's own degrees; --count N gives others, whom layout, batch and precision follow"
    if run.origin.assumed:
        yield f"assuming {assumptions(run)}"


def recomputation(recipe: Recipe) -> str:
    """Whether activations are recomputed, in two words."""
    kind = recipe.activation_checkpointing.kind
    return "no recomputation" if kind == "none" else f"{kind} recomputation"


def layout_name(layout: Layout) -> str:
    """A layout as people write it, its axes from the innermost to the outermost.

    >>> layout_name(Layout(shard=32)), layout_name(Layout(shard=8, replicate=4)), layout_name(Layout(shard=16, zero=1))
    ('FSDP 32', 'HSDP 8 x DP 4', 'DP 16 (ZeRO-1)')
    >>> layout_name(Layout(tensor=8, sequence_parallel=True, pipeline=4, replicate=16, schedule="interleaved",
    ...                    virtual_stages=5))
    'TP 8 (SP) x PP 4 x DP 16, interleaved 5'
    """
    sharded = {
        0: "DP {}",
        1: "DP {} (ZeRO-1)",
        2: "DP {} (ZeRO-2)",
        3: "HSDP {}" if layout.replicate > 1 else "FSDP {}",
    }
    axes = (
        (layout.tensor, "TP {} (SP)" if layout.sequence_parallel else "TP {}"),
        (layout.context, "CP {}"),
        (layout.expert, "EP {}"),
        (layout.pipeline, "PP {}"),
        (layout.shard, sharded[layout.zero]),
        (layout.replicate, "DP {}"),
    )
    name = " x ".join(written.format(size) for size, written in axes if size > 1) or "one device"
    if layout.pipeline == 1 or layout.schedule == "1f1b":
        return name
    chunks = f" {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    return f"{name}, {layout.schedule}{chunks}"


def found_layout_section(run: Run) -> Section | None:
    """The layout that a search selected, as it is pasted; None where there was no search."""
    sets = found_layout(run)
    item = Item("The layout that the search selected:", commands(sets))
    return section("", Items((item,), numbered=False)) if sets else None


def _mixture(run: Run) -> Iterator[str]:
    """How many tokens the run takes of each source of a mixture; how many epochs that are, their text says."""
    if run.data.mixture:
        tokens = run.recipe.total_steps * run.recipe.tokens_per_step
        shares = [each / BLOCK_ROWS for each in dealt(BLOCK_ROWS, run.data.weights)]
        said = [
            f"{name} {format_count(round(share * tokens))} ({format_percent(share)})"
            for (name, _), share in zip(run.data.mixture, shares, strict=True)
        ]
        yield f"Tokens of each source: {', '.join(said)}"


def _devices(run: Run) -> Iterator[str]:
    """On what it runs, and how it is spread: what was said, defaults left out."""
    cluster, layout = run.cluster, run.layout
    if cluster.device != "this-machine" or cluster.count > 1:
        yield f"{cluster.count:,} x {cluster.device}"
    if not layout.alone:
        values = {
            field.name: value for field in fields(layout) if (value := getattr(layout, field.name)) != field.default
        }
        said = {name: name if value is True else f"{name} {_folded(value)}" for name, value in values.items()}
        reshards = values.get("reshard_after_forward")
        said |= {} if reshards is None else {"reshard_after_forward": RESHARDS[reshards]}
        yield f"Layout: {', '.join(said.values())}"


def _folded(value: object) -> str:
    """A field's value, of a long row of numbers each with how often it comes.

    >>> _folded((0, *[1] * 126, 0)), _folded((4, 4, 3)), _folded("1f1b"), _folded(None)
    ('0, 126 x 1, 0', '4, 4, 3', '1f1b', 'none')
    """
    if not isinstance(value, tuple):
        return "none" if value is None else str(value)
    from itertools import groupby

    if len(value) <= _FEW:
        return ", ".join(map(str, value))
    runs = [(each, len(list(same))) for each, same in groupby(value)]
    return ", ".join(str(each) if times == 1 else f"{times} x {each}" for each, times in runs)
