"""The grid of layouts: every way that the search considers to lay a run out over so many devices.

A layout of the grid has three parts. Its shape is what one device computes of a micro-batch, its stages are how layers
go over the pipeline, and its sharding is how the ranks that are left share states. Names are those of `spec.layout`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.layers import checkpointed, layer_runs
from trainledger.spec.layout import MOST_CHUNKS, SCHEDULES, Layout, overlaps
from trainledger.spec.parts import KIND
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.layout import can_overlap
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.setting import Broken, read_value
from trainledger.spec.units import ceil_div

CHECKPOINTING = ("none", "selective", "full")
FIELDS = (
    "tensor", "sequence_parallel", "context", "context_kind", "expert", "micro_batch", "activation_checkpointing",
    "pipeline", "schedule", "virtual_stages", "replicate", "shard", "zero", "reshard_after_forward",
    "expert_send", "overlap",
)  # fmt: skip
KNOWN = {**Recipe.__dataclass_fields__, **Layout.__dataclass_fields__}  # how each of `FIELDS` is read
# How states are shared: (zero, reshard_after_forward). The first is that of ranks that share none.
ZERO_MODES: tuple[tuple[int, bool | None], ...] = ((3, None), (1, None), (2, None), (3, True), (3, False))
UNSHARDED = 0
ZERO3_RESHARDS = 3  # from here on parameters are gathered block by block
SENDING = ("expert_send", "overlap")  # how tokens go to their experts: no axes, the quickest is chosen_sending


@frozen
class Shape:
    """What one device computes of a micro-batch."""

    tensor: int
    sequence_parallel: bool
    context: int
    context_kind: str
    expert: int
    micro_batch: int
    checkpointing: str


@frozen
class Stages:
    """How the layers go over the pipeline; ``layers`` are those of each chunk, None where all have as many."""

    pipeline: int
    schedule: str
    virtual_stages: int
    layers: tuple[int, ...] | None


@frozen
class Sharding:
    """How the ranks that are left share states; ``zero_mode`` is a place in `ZERO_MODES`."""

    replicate: int
    shard: int
    zero_mode: int


@frozen
class Grid:
    """The values of each axis; ``fixed`` are the user's, ``chosen_sending`` those of `SENDING` that the search sets."""

    run: Run
    devices: int
    fixed: Mapping[str, Any]
    checkpointing: tuple[str, ...]
    chosen_sending: tuple[str, ...] = ()

    def values(self, name: str, of: Any) -> tuple[Any, ...]:
        """The values of an axis, or the one that is fixed."""
        return tuple(each for each in of if each == self.fixed[name]) if name in self.fixed else tuple(of)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Every (tensor, context, pipeline) that divides the devices."""
        for tensor in self.values("tensor", divisors(self.devices)):
            for context in self.values("context", divisors(self.devices // tensor)):
                for pipeline in self.values("pipeline", divisors(self.devices // (tensor * context))):
                    yield tensor, context, pipeline

    def parallels(self, tensor: int) -> tuple[bool, ...]:
        return self.values("sequence_parallel", (False,) if tensor == 1 else (False, True))

    def kinds(self, context: int) -> tuple[str, ...]:
        return self.values("context_kind", ("ring",) if context == 1 else ("ring", "all-to-all"))

    def experts(self) -> tuple[int, ...]:
        experts = self.run.model.experts
        sizes = (1,) if experts is None else divisors(experts.n_experts)
        sends = self.fixed.get("expert_send", "copies") != "copies"  # of one rank nothing is sent
        return self.values("expert", sizes[1:] if sends else sizes)

    def micro_batches(self) -> tuple[int, ...]:
        return self.values("micro_batch", divisors(self.run.recipe.global_batch))

    def again(self) -> tuple[str, ...]:
        return self.values("activation_checkpointing", self.checkpointing)

    def stages(self, pipeline: int) -> Iterator[Stages]:
        """The ways to run a pipeline of so many stages."""
        layers = self.run.model.n_layers
        for schedule in self.values("schedule", SCHEDULES if pipeline > 1 else ("1f1b",)):
            several = schedule == "interleaved"
            chunks = range(2, min(MOST_CHUNKS, layers + 2) // pipeline + 1) if several else (1,)
            for each in self.values("virtual_stages", chunks):
                shared = shared_layers(layers, pipeline * each, at_most_ends=several)
                if shared is not None:
                    yield Stages(pipeline, schedule, each, shared or None)

    def shardings(self, ranks: int, context: int) -> Iterator[Sharding]:
        """The ways to share states over the data-parallel ranks."""
        for shard in self.values("shard", divisors(ranks)):
            if "replicate" in self.fixed and ranks // shard != self.fixed["replicate"]:
                continue
            for zero_mode in (UNSHARDED,) if shard * context == 1 else range(1, len(ZERO_MODES)):
                zero, reshard = ZERO_MODES[zero_mode]
                if self.fixed.get("zero", zero) == zero and self.fixed.get("reshard_after_forward", reshard) == reshard:
                    yield Sharding(ranks // shard, shard, zero_mode)


def grid_of(run: Run, devices: int, fixed: Mapping[str, Any]) -> Grid:
    """The grid of a run on so many devices; raises InvalidInput for a fixed name that is no axis of it."""
    unknown = [name for name in fixed if name not in FIELDS]
    if unknown:
        rule = f"is not searched; what can be fixed is {', '.join(FIELDS)}"
        raise InvalidInput([Problem(name, fixed[name], rule, nearest_text(name, FIELDS)) for name in unknown])
    own = fixed.get("activation_checkpointing", run.recipe.activation_checkpointing.kind)
    if own == "from-start":
        rule = "is not searched: what a layer costs depends on how many layers of its stage come before it"
        raise InvalidInput([Problem("recipe.activation_checkpointing", own, rule, "full")])
    layout = _sending(run, fixed)
    asked = replace(run, layout=replace(layout, auto=True))
    if problems := [run_problem for run_problem in run_problems(asked) if run_problem.field == "layout.overlap"]:
        raise InvalidInput(problems)
    changed = (name for name in SENDING if getattr(layout, name) != getattr(run.layout, name))
    chosen_sending = tuple(name for name in changed if name not in fixed)
    run = replace(run, recipe=checkpointed(run.recipe, own), layout=layout)
    return Grid(run, devices, dict(fixed), tuple(dict.fromkeys((*CHECKPOINTING, own))), chosen_sending)


def read_fixed(fixed: Mapping[str, Any], problems: list[Problem], flag: str = "fixed ") -> dict[str, Any]:
    """The values that axes are given, read as the fields of a run file are; what is wrong is added to problems."""
    found = {}
    for name, value in fixed.items():
        if name not in FIELDS:
            rule = f"is not searched; what can be fixed is {', '.join(FIELDS)}"
            problems.append(Problem(f"{flag}{name}", value, rule, nearest_text(str(name), FIELDS)))
            continue
        try:
            found[name] = read_value(KNOWN[name], value)
        except Broken as broken:
            problems.append(Problem(f"{flag}{name}", value, broken.rule, broken.nearest))
    return found


def _sending(run: Run, fixed: Mapping[str, Any]) -> Layout:
    """The run's layout with the way that tokens take to their experts; the quickest, where none is fixed.

    A token goes once to each node, and overlaps another micro-batch in all layouts that have one. Of 169 drawn layouts
    of five models the first made none slower, the second 12, by up to 2.2 %, and others up to 20 % quicker; so they are
    no axes, which would make the grid four times as large, and the search looks at the best without them (`plainer`).
    """
    layout = replace(run.layout, **{name: fixed[name] for name in SENDING if name in fixed})
    if run.model.experts is None:
        return layout
    usual = Layout()
    if "expert_send" not in fixed and run.recipe.expert_dispatch.kind == "dropless":
        layout = replace(layout, expert_send="nodes")
    if "overlap" not in fixed and layout.overlap == usual.overlap and not run.recipe.launch_blocking:
        layout = replace(layout, overlap=(*(usual.overlap or ()), "experts"))
    return layout


def runs_of(run: Run) -> list[int]:
    """How many layers each run of alike ones has, alike in all the ways of recomputing that a grid of the run has."""
    edges = {0}
    for again in (*CHECKPOINTING, run.recipe.activation_checkpointing.kind):
        runs = layer_runs(run.model, checkpointed(run.recipe, again))
        edges |= set(accumulate(layer_run.count * len(layer_run.kinds) for layer_run in runs))
    return [until - at for at, until in pairwise(sorted(edges))]


def whole(run: Run) -> Run:
    """The run without a layout: nothing but what is searched for is left out."""
    kept = run.layout
    names = ("prefetch", "split_sends", "sequence_gather", "expert_send", "overlap")
    return replace(run, layout=Layout(**{name: getattr(kept, name) for name in names}))


def fixed_by(run: Run, written: Collection[str] = ()) -> dict[str, Any]:
    """The axes that a run fixes itself: all that are not as by default, and those that the user has ``written``.

    Those are named as `runfile.written` names them; none where it is the default is no choice.
    """
    found: dict[str, Any] = {}
    for section, names in (("layout", FIELDS), ("recipe", ("micro_batch", "activation_checkpointing"))):
        part = getattr(run, section)
        known = {field.name: field.default for field in fields(part)}
        said = {name: getattr(part, name) for name in names if name in known}
        chosen = {name for name, value in said.items() if f"{section}.{name}" in written and value is not None}
        of_run = ((name, value) for name, value in said.items() if value != known[name] or name in chosen)
        found |= {name: getattr(value, KIND, value) for name, value in of_run}
    return found


def run_of(run: Run, shape: Shape, stages: Stages, sharding: Sharding) -> Run:
    """The run with one layout of the grid."""
    zero, reshard = ZERO_MODES[sharding.zero_mode]
    usual = stages.pipeline == 1
    layout = Layout(
        replicate=sharding.replicate, shard=sharding.shard, zero=zero,
        reshard_after_forward=None if reshard is usual else reshard, prefetch=run.layout.prefetch,
        tensor=shape.tensor, sequence_parallel=shape.sequence_parallel, pipeline=stages.pipeline,
        schedule=stages.schedule, virtual_stages=stages.virtual_stages, stage_layers=stages.layers,
        context=shape.context, context_kind=shape.context_kind, expert=shape.expert,
    )  # fmt: skip
    if run.layout.split_sends and layout.sends_whole:
        layout = replace(layout, split_sends=True)
    if layout.sequence_parallel and run.layout.sequence_gather != layout.sequence_gather:
        layout = replace(layout, sequence_gather=run.layout.sequence_gather)
    if layout.expert > 1 and run.layout.expert_send != layout.expert_send:
        layout = replace(layout, expert_send=run.layout.expert_send)
    recipe = replace(checkpointed(run.recipe, shape.checkpointing), micro_batch=shape.micro_batch)
    found = replace(run, layout=layout, recipe=recipe, cluster=replace(run.cluster, count=layout.devices))
    overlap = run.layout.overlap
    if overlap == layout.overlap:
        return found
    if overlap is not None:  # of what should overlap compute, what there is in this layout
        overlap = tuple(each for each in overlap if can_overlap(found, each))
    return replace(found, layout=replace(layout, overlap=overlap or None))


def plainer(run: Run, chosen_sending: Sequence[str]) -> Iterator[Run]:
    """The run with copies to experts, with nothing overlapped, and with both, of what was ``chosen_sending``."""
    layout = run.layout
    plain: dict[str, Any] = {}
    if "expert_send" in chosen_sending and layout.sends_to_nodes:
        plain["expert_send"] = "copies"
    if "overlap" in chosen_sending and overlaps(layout, "experts"):
        plain["overlap"] = tuple(each for each in layout.overlap or () if each != "experts") or None
    if len(plain) > 1:
        yield replace(run, layout=replace(layout, **plain))
    for name, value in plain.items():
        yield replace(run, layout=replace(layout, **{name: value}))


def shared_layers(layers: int, chunks: int, *, at_most_ends: bool = False) -> tuple[int, ...] | None:
    """The layers of each chunk: () where all have as many, else those at the ends have one fewer than the others.

    The embedding and the head are there, which weigh about as much as a layer (Grattafiori et al. 2024, The Llama 3
    Herd of Models, section 3.3.2, takes one layer off each end). None where a chunk between would be empty, or with
    ``at_most_ends`` where more than the first and the last would be smaller.

    >>> shared_layers(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    >>> shared_layers(32, 4), shared_layers(4, 8)
    ((), None)
    """
    most = ceil_div(layers, chunks)
    missing = most * chunks - layers
    if not missing:
        return ()
    if missing > 2 and (at_most_ends or most == 1):
        return None
    shared = [most] * chunks
    for number in range(missing):
        shared[-1 - number // 2 if number % 2 == 0 else number // 2] -= 1
    return tuple(shared)


def divisors(whole: int) -> tuple[int, ...]:
    """The divisors of a number, the smallest first.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [index for index in range(1, int(whole**0.5) + 1) if whole % index == 0]
    return tuple(sorted({*small, *(whole // each for each in small)}))
