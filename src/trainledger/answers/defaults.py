"""The run of a model that is named alone: what each question assumes of its recipe and its layout.

On one device that is one sequence of at most 8,192 tokens in bf16 autocast, one step; with adapters all weights are in
bf16. On several devices the layout, or what is not given of it, is searched for, with as many tokens in a step as
`default_tokens_per_step` says; under a layout that is given a micro-batch is one sequence. What fits is asked of
sharded states and small batches, and questions about a whole run assume 20 tokens for each parameter. A run of few
tokens has smaller steps.
Every field that is assumed is named in `Run.origin`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2, prod
from typing import Any

from trainledger import catalog
from trainledger.answers.machine import THIS_MACHINE, kernels_of
from trainledger.answers.source import (
    METHOD,
    Overrides,
    by_field,
    config_notes,
    known_device,
    lengths_notes,
    model_section,
    parsed,
)
from trainledger.forecast.plan.scaling_law import default_tokens_per_step
from trainledger.ledger.model.parameters import parameters
from trainledger.spec import runfile
from trainledger.spec.cluster import Cluster
from trainledger.spec.device import fused_attention
from trainledger.spec.layout import AXES, NOT_SEARCHED
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import field_at
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.reading import AUTO
from trainledger.spec.run import Origin, Run
from trainledger.spec.run_text import as_override
from trainledger.spec.units import NotAQuantity, format_count, parse_count, round_up

_NAMED = 4  # reservations of a file
FEWEST_STEPS = 256  # of a run whose tokens are given: people fine-tune on 100M tokens with 0.1M to 0.5M in a batch
TUNED_TOKENS = 2**18  # of a step of adapters on several devices
# Models that take longer sequences are trained on them at the end alone, and fewer layouts hold those (Llama 3,
# arXiv 2407.21783, sections 3.4.1 and 3.4.2: 8,192, and more for the last 800B of 15.6T tokens).
TRAINED_LENGTH = 8192
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv 2203.15556
# What people who tune a model begin with: 16 sequences of 2,048 tokens in a step, one at a time on a device, blocks
# recomputed (the examples of TRL, axolotl and LLaMA-Factory); adapters of rank 16 and alpha 32 on all linear layers
# (Dettmers et al. 2023, arXiv 2305.14314, section 4 and table 9 for the learning rate).
_TUNED = {"seq_len": 2048, "global_batch": 16, "micro_batch": 1, "activation_checkpointing": "full"}
# Preferences: 16 pairs in a step, one at a time; length, learning rate and beta are the defaults of TRL's DPOConfig,
# and of ORPOConfig and KTOConfig, whose term of mismatched answers needs two at a time.
_PAIRS = {**_TUNED, "seq_len": 1024, "global_batch": 32, "micro_batch": 2, "objective": "dpo", "learning_rate": 1e-6}
_LORA = {**_TUNED, "lora.rank": 16, "lora.alpha": 32.0, "learning_rate": 2e-4}
METHODS: dict[str, dict[str, Any]] = {
    "full": {**_TUNED, "learning_rate": 1e-5},
    "lora": _LORA,
    "qlora": {**_LORA, "lora.base_format": "nf4"},
    "dpo": _PAIRS,
    "orpo": {**_PAIRS, "objective": "orpo"},
    "kto": {**_PAIRS, "objective": "kto"},
    "reward": {**_PAIRS, "objective": "reward", "learning_rate": 1e-5},
    "distillation": {**_TUNED, "objective": "distillation", "learning_rate": 1e-5},
}
PLAN, SEARCH, FIT, SERVE = "plan", "search", "fit", "serve"  # what the run is for


def run_of_model(named: str | ModelSpec, overrides: Overrides, purpose: str = PLAN) -> Run:
    """A model of the catalog, of a config.json or made by hand, under the recipe that its purpose assumes.

    Its layout may be left to be searched for (``layout.auto``). Raises `InvalidInput`.
    """
    section, fields = model_section(named)
    cluster, data = _section("cluster", overrides), _section("data", overrides)
    longest = min([fields["max_seq_len"], *(tokens for tokens, _ in (data.lengths or ())[-1:])])
    method = str(by_field(overrides).get(METHOD, ""))
    layout = _layout(by_field(overrides), cluster, purpose)
    auto = layout.get("auto", False)
    overrides, preset = _with_method(overrides, cluster.count, longest, searched=auto)
    given = by_field(overrides)
    small = purpose == FIT and not auto
    spread = purpose != SERVE and not small and (cluster.count > 1 or (auto and cluster.device != THIS_MACHINE))
    adapters = any(name.startswith("recipe.lora") for name in given)
    precision = _precision(cluster, given, adapters, sharded=cluster.count > 1 if small else spread)
    micro_batch = size_of(given.get("recipe.micro_batch"))
    recipe: dict[str, Any] = {"seq_len": longest, "global_batch": micro_batch, **precision}
    if "recipe.tokens" not in given:
        recipe["steps"] = 1
    if spread:  # which every layout can divide, until the batch is chosen
        recipe["global_batch"] = cluster.count * micro_batch
    if purpose != SERVE:
        recipe["seq_len"] = min(recipe["seq_len"], TRAINED_LENGTH)
    if spread and not auto:  # the least that a layout of one's own takes; a search chooses
        recipe["micro_batch"] = micro_batch
    if small:
        recipe |= {"micro_batch": 1, "global_batch": 2 * cluster.count}
    table = {"model": section, "recipe": recipe, "layout": layout}
    run = parsed(table, overrides)
    kernels = kernels_of(run)
    more = _attention(run, "cuda" if spread and kernels == "cpu" else kernels)
    if spread and "recipe.global_batch" not in given:
        more["global_batch"] = default_batch(run)
    if more:
        recipe |= more
        run = parsed(table, overrides)
    assumed = [f"recipe.{name}" for name in recipe] + [f"layout.{name}" for name in layout if name != "auto"]
    origin = Origin(
        source=named.name if isinstance(named, ModelSpec) else named,
        explicit=runfile.written({}, overrides) | {f"model.{name}" for name in section},
        assumed=(*preset, *(each for each in assumed if each not in given)),
        notes=(
            *(config_notes(named) if isinstance(named, str) and named.endswith(".json") else ()),
            *lengths_notes(overrides),
        ),
        method=method,
    )
    return replace(run, origin=origin)


def _with_method(
    overrides: Overrides, devices: int, longest: int, *, searched: bool
) -> tuple[Overrides, tuple[str, ...]]:
    """Overrides with the recipe of a method (`METHODS`) before them in its place, and the fields that it gives.

    A layout that is ``searched`` for has its own micro-batch and recomputation.
    """
    given = by_field(overrides)
    if METHOD not in given:
        return overrides, ()
    if (method := str(given[METHOD])) not in METHODS:
        rule = f"must be one of {', '.join(METHODS)}; `trainledger rl` plans steps that generate text (grpo, ppo)"
        raise InvalidInput([Problem(METHOD, method, rule, nearest_text(method, METHODS))])
    adapters = next((name for name in given if name.startswith("recipe.lora.")), None)
    if method == "full" and adapters:
        raise InvalidInput([Problem(METHOD, method, f"trains all weights, and {adapters} is of adapters", "lora")])
    preset = {f"recipe.{name}": value for name, value in METHODS[method].items()}
    micro_batch = size_of(given.get("recipe.micro_batch", preset["recipe.micro_batch"]))
    batch = round_up(preset["recipe.global_batch"], devices * micro_batch)
    preset |= {"recipe.global_batch": batch, "recipe.seq_len": min(preset["recipe.seq_len"], longest)}
    if searched:
        del preset["recipe.activation_checkpointing"]
        if method != "kto":  # one answer alone has none that mismatches
            del preset["recipe.micro_batch"]
    preset = {name: value for name, value in preset.items() if not {name, name.rpartition(".")[0]} & given.keys()}
    if isinstance(overrides, Mapping):
        return {**preset, **{name: value for name, value in overrides.items() if name != METHOD}}, tuple(preset)
    rest = (override for override in overrides if override.partition("=")[0].strip() != METHOD)
    return [*(f"{name}={value}" for name, value in preset.items()), *rest], tuple(preset)


def _precision(cluster: Cluster, given: Mapping[str, Any], adapters: bool, *, sharded: bool) -> dict[str, Any]:
    """bf16 autocast, or shards in bf16; of a device without bf16 fp16 autocast; frozen weights are in bf16.

    Megatron-LM has bf16 weights with a copy in fp32, gradients in fp32 (its arguments.py, which sets their dtype
    with --bf16); a precision that is given is kept.
    """
    peaks = {} if cluster.device == THIS_MACHINE else catalog.device(cluster.device).peak_flops_per_second
    if "bf16" not in peaks and "fp16" in peaks:
        return {"precision": "fp16-mixed"}
    if adapters:
        return {"precision": "bf16"}
    stated = any(name.startswith("recipe.precision") for name in given)
    if not stated and str(given.get("recipe.framework", "")).startswith("megatron"):
        return {"precision": "bf16", "precision.master_weights": True, "precision.gradient_dtype": "fp32"}
    return {"precision": "bf16-sharded" if sharded else "bf16-mixed"}


def _section(name: str, overrides: Overrides) -> Any:
    """The cluster or the data that overrides name; the default where they are wrong, which the whole run is refused
    for."""
    of_section = {path: value for path, value in by_field(overrides).items() if path.startswith(f"{name}.")}
    if not isinstance(overrides, Mapping):
        of_section = [f"{path}={value}" for path, value in of_section.items()]  # type: ignore[assignment]
    try:
        section = runfile.section_of(name, of_section)
        return section if name != "cluster" else replace(section, device=known_device(section.device))
    except InvalidInput:
        return runfile.SECTIONS[name]()


def asks_for_layout(given: Mapping[str, Any]) -> bool:
    """Whether overrides ask for a search of the layout."""
    return given.get("layout") == AUTO or given.get("layout.auto") in (True, "true")


def _layout(given: Mapping[str, Any], cluster: Cluster, purpose: str) -> dict[str, Any]:
    """The ``[layout]`` that is assumed: a search where the axes that are given leave devices over.

    Not with a field that the search cannot keep, or where the search is off (``layout.auto=false``).
    """
    if asks_for_layout(given) or purpose == SEARCH:
        return {"auto": True}
    if cluster.count == 1 or purpose == SERVE:
        return {}
    if purpose == FIT:
        others = tuple(f"layout.{axis}" for axis in ("replicate", "context", "tensor", "pipeline"))
        return {} if any(name.startswith(others) for name in given) else {"shard": cluster.count}
    if any(name in given for name in ("layout", "layout.auto", *(f"layout.{each}" for each in NOT_SEARCHED))):
        return {}
    return {"auto": True} if prod(size_of(given.get(f"layout.{axis}")) for axis in AXES) < cluster.count else {}


def _attention(run: Run, kernels: str) -> dict[str, Any]:
    """The field of a kernel for scores that PyTorch's own fused attention does not compute (`MultiHead.custom_scores`).

    Flash kernels compute them, on accelerators and in 16 bits.
    """
    if not run.model.attention.custom_scores:
        return {}
    return {"attention": "flash" if "flash" in fused_attention(kernels) and run.recipe.precision.low else "math"}


def default_batch(run: Run) -> int:
    """Sequences of a step: about `default_tokens_per_step`, as many for each device, so that states can be sharded.

    A run whose length is not given has 20 tokens for each parameter. Fewer where the tokens of the run would be less
    than `FEWEST_STEPS`, but for one micro-batch on each device.
    Those of a device are 1 to 7 times a power of two, as they come in micro-batches of equal size. For more devices
    than sequences it is a multiple of their count's odd part: tensor ranks and stages take powers of two; where a
    layout is given, each data rank has at least one for each stage.
    """
    micro_batch, count = run.recipe.micro_batch or 1, run.cluster.count
    length, tokens = run.recipe.seq_len, run.recipe.tokens
    active = parameters(run.model).active
    flops = 6 * active * (tokens or TOKENS_PER_PARAMETER * active)
    whole: int = 2 ** round(log2(max(1, default_tokens_per_step(flops, count * micro_batch * length) / length)))
    if tokens is not None or run.recipe.lora is not None:
        most = TUNED_TOKENS if tokens is None else tokens // FEWEST_STEPS
        few = 2 ** max(0, (most // length).bit_length() - 1)
        whole = min(whole, max(few, count * micro_batch))
    wanted = max(1, whole // micro_batch)
    if count <= wanted:
        fine = 1 << max(0, (wanted // count).bit_length() - 3)
        return round(wanted / count / fine) * fine * count * micro_batch
    odd = count // (count & -count)
    each_step = odd << max(0, round(log2(wanted / odd)))
    unit = 1 if run.layout.auto else run.layout.data_ranks * run.layout.pipeline
    return max(1, each_step // unit) * unit * micro_batch


def with_length(run: Run) -> Run:
    """The run with 20 tokens for each parameter, where it is one step long because its length was assumed.

    Not of fine-tuning (adapters, a method by name), which takes far fewer, nor of a file whose data is not known.
    """
    origin = run.origin
    if "recipe.steps" not in origin.assumed or run.recipe.lora is not None or origin.method or origin.trainer:
        return run
    tokens = TOKENS_PER_PARAMETER * parameters(run.model).active
    assumed = tuple("recipe.tokens" if each == "recipe.steps" else each for each in origin.assumed)
    return replace(run, recipe=replace(run.recipe, steps=None, tokens=tokens), origin=replace(origin, assumed=assumed))


def sharded(named: str | ModelSpec, overrides: Sequence[str]) -> tuple[str, ...]:
    """What spreads a named model over its devices without a search, as ``--set`` takes it, the given overrides last.

    What the given axes of the layout leave of the devices shards parameters, gradients and optimizer state (FSDP); a
    micro-batch is one sequence, and each replica has as many as `default_batch` says, at least one.
    Raises `InvalidInput`.

    >>> sharded("llama-3-8b", ["cluster.device=h100-sxm", "cluster.count=64", "layout.tensor=8"])[1:5]
    ('recipe.precision=bf16-sharded', 'recipe.micro_batch=1', 'layout.shard=8', 'recipe.global_batch=512')
    """
    given = by_field(overrides)
    free = [override for override in overrides if not override.startswith("layout")]
    run = run_of_model(named, [*free, "layout.auto=true"])
    replicate, *others = (
        size_of(given.get(f"layout.{name}")) for name in ("replicate", "tensor", "pipeline", "context")
    )
    shard, micro_batch = max(1, run.cluster.count // (replicate * prod(others))), run.recipe.micro_batch or 1
    replicas = shard * replicate * micro_batch
    global_batch = max(1, run.recipe.global_batch // replicas) * replicas
    made = {
        each: _field(run, each) for each in run.origin.assumed if each not in ("recipe.steps", "recipe.global_batch")
    }
    made = {name: getattr(each, "kind", each) for name, each in made.items()}
    made |= {"recipe.micro_batch": micro_batch, "layout.shard": shard, "recipe.global_batch": global_batch}
    if shard * replicate * prod(others) != run.cluster.count:  # which is refused, not searched for
        made["layout.auto"] = False
    return *(as_override(name, each) for name, each in made.items() if name not in given), *overrides


def size_of(given: Any) -> int:
    """The size of an axis that is given; 1 where it is not, or is none, which reading the run refuses."""
    try:
        return max(1, 1 if given is None else parse_count(str(given)))
    except NotAQuantity:
        return 1


def is_one_step(run: Run) -> bool:
    """Whether the run is one step long because its length was assumed."""
    return "recipe.steps" in run.origin.assumed


def assumptions(run: Run) -> str:
    """What was assumed of a model that was named alone, as a sentence; empty where nothing was.

    >>> run = run_of_model("gpt2", ["recipe.seq_len=512"])
    >>> assumptions(run)
    'recipe.global_batch=1, recipe.precision=bf16-mixed, recipe.steps=1'
    """
    recipe, more = run.recipe, {}
    if recipe.global_batch > 1:
        more["recipe.global_batch"] = f" ({format_count(recipe.tokens_per_step)} tokens in a step)"
    if recipe.seq_len < run.model.max_seq_len:
        more["recipe.seq_len"] = f" (of {run.model.max_seq_len:,} that the model takes)"
    if recipe.tokens is not None:
        more["recipe.tokens"] = (
            f" ({format_count(recipe.tokens)}, {TOKENS_PER_PARAMETER} for each parameter: Hoffmann et al. 2022)"
        )
    texts = [as_override(each, _field(run, each)) + more.get(each, "") for each in run.origin.assumed]
    if texts and run.cluster.count == 1 and recipe.micro_batch is None and recipe.global_batch > 1:
        texts.append(f"one micro-batch of all {recipe.global_batch:,} sequences")
    if recipe.lora is not None and run.model.mixer is not None:
        texts.append("mixers without adapters")
    if recipe.lora is not None and run.model.experts is not None and recipe.lora.base_format in ("int8", "nf4"):
        texts.append(f"experts in {recipe.precision.parameters}, as bitsandbytes quantizes no stacks of them")
    return ", ".join(texts)


def of_full_rows(run: Run) -> Run:
    """The run with full rows, which it says, for questions that ask about no others (``data.lengths``)."""
    if run.data.lengths is None:
        return run
    note = "rows are counted full: plan, advise and compare take data.lengths"
    origin = replace(run.origin, notes=(note, *run.origin.notes))
    return replace(run, data=replace(run.data, lengths=None), origin=origin)


def how_else(run: Run) -> str:
    """What else could be assumed of a model that was named alone, by a method of fine-tuning; empty of other runs."""
    if run.origin.method:
        return f"; --method {run.origin.method} is a step of fine-tuning, without it one of training from scratch"
    alone = {"recipe.precision", "recipe.steps", "recipe.global_batch"} <= {*run.origin.assumed}
    *others, last = METHODS
    said = f"; a step of fine-tuning: --method {', '.join(others)} or {last}"
    return said if alone and run.recipe.lora is None else ""


def reservations(run: Run) -> str:
    """What a file of another program says that the numbers are without, or that was counted as something else.

    Its program's defaults are none; of many the first are named.
    """
    notes = [note for note in run.origin.notes if not note.startswith("defaults of ")]
    more = f"; {len(notes) - _NAMED} more with --full" if len(notes) > _NAMED else ""
    return "; ".join(notes[:_NAMED]) + more


def _field(run: Run, named: str) -> Any:
    section, _, path = named.partition(".")
    return field_at(getattr(run, section), path)
