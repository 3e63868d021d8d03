"""How a run grows in one direction: the values that keep its divisibility, and the run at each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm

from trainledger.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.precision import TILE, precision_of
from trainledger.spec.run import Run
from trainledger.spec.setting import rule_of

AXES = {
    "sequence": "recipe.seq_len",
    "batch": "recipe.global_batch",
    "width": "model.d_model",
    "depth": "model.n_layers",
    "devices": "cluster.count",
    "dataset": "recipe.tokens",
    "vocabulary": "model.vocab_size",
}
_ROWS = 128  # of the table on a tensor rank: what vocabularies are rounded to


@frozen
class Growth:
    """One thing that grows and what grows with it, told in ``carries``.

    ``values`` are those from the planned one upwards that the run's layout and batch can be divided by; ``at`` is the
    run with the value of that number.
    """

    axis: str
    field: str
    values: range | tuple[int, ...]
    at: Callable[[int], Run]
    carries: str

    @property
    def start(self) -> int:
        return self.values[0]


def growth(run: Run, axis: str, reach: int) -> Growth:
    """How a run grows along one of AXES, to ``reach`` times the planned value at most."""
    return _GROWTHS[axis](run, reach)


def _upwards(run: Run, field: str, start: int, step: int, reach: int) -> range:
    """start, start + step, ... up to ``reach`` times the start and no further than the field goes."""
    section, _, name = field.partition(".")
    most = rule_of(type(getattr(run, section)).__dataclass_fields__[name])["at_most"]
    end = start * reach if most is None else min(start * reach, int(most))
    return range(start, max(start, end) + 1, step)


def _sequence(run: Run, reach: int) -> Growth:
    context = run.layout.context
    step = 2 * context if context > 1 else 1
    if run.layout.sequence_parallel:
        step = lcm(step, context * run.layout.tensor)
    if precision_of(run.recipe).float8 is not None:
        step = lcm(step, TILE)
    if run.recipe.loss_in_chunks:
        step = lcm(step, run.recipe.loss_chunks)
    values = _upwards(run, "recipe.seq_len", run.recipe.seq_len, step, reach)

    def at(index: int) -> Run:
        T = values[index]
        known = max(run.model.max_seq_len, T)
        return replace(run, recipe=replace(run.recipe, seq_len=T), model=replace(run.model, max_seq_len=known))

    return Growth("sequence", "recipe.seq_len", values, at, "global_batch sequences, so that the tokens of a step grow")


def _batch(run: Run, reach: int) -> Growth:
    step = run.layout.data_ranks * (run.recipe.micro_batch or 1)
    if run.layout.schedule == "interleaved":
        step *= run.layout.pipeline
    values = _upwards(run, "recipe.global_batch", run.recipe.global_batch, step, reach)

    def at(index: int) -> Run:
        return replace(run, recipe=replace(run.recipe, global_batch=values[index]))

    with_it = "micro-batches of the planned size" if run.recipe.micro_batch else "all of a device's sequences at once"
    return Growth("batch", "recipe.global_batch", values, at, with_it)


def _width(run: Run, reach: int) -> Growth:
    spec, layout = run.model, run.layout
    tensor, heads = layout.tensor, spec.n_heads
    grows_kv = spec.kv_heads == heads
    more = lcm(tensor, 1 if grows_kv else spec.kv_heads)
    if layout.context > 1 and layout.context_kind == "all-to-all":
        more = lcm(more, layout.context * tensor)
    while (spec.d_model * more) % heads or (more * spec.d_model // heads) % _tile(run):
        more += lcm(tensor, 1 if grows_kv else spec.kv_heads)
    step = spec.d_model * more // heads
    values = _upwards(run, "model.d_model", spec.d_model, step, reach)
    whole = lcm(tensor, _tile(run))

    def wide(size: int, n_heads: int) -> int:
        return size if n_heads == heads else max(1, round(size * n_heads / heads / whole)) * whole

    def at(index: int) -> Run:
        n = heads + index * more
        kv = n if grows_kv and spec.n_kv_heads is not None else spec.n_kv_heads
        expert = None if spec.expert_d_ff is None else wide(spec.expert_d_ff, n)
        model = replace(
            spec, d_model=values[index], n_heads=n, n_kv_heads=kv, d_ff=wide(spec.d_ff, n), expert_d_ff=expert
        )
        return replace(run, model=model)

    carries = "heads of the planned width, d_ff in proportion" + ("" if grows_kv else ", key-value heads as they are")
    return Growth("width", "model.d_model", values, at, carries)


def _tile(run: Run) -> int:
    return TILE if precision_of(run.recipe).float8 is not None else 1


def _depth(run: Run, reach: int) -> Growth:
    chunks = run.layout.pipeline * run.layout.virtual_stages
    values = _upwards(run, "model.n_layers", run.model.n_layers, chunks, reach)

    def at(index: int) -> Run:
        model, layers = replace(run.model, n_layers=values[index]), run.layout.stage_layers
        if layers is None:
            return replace(run, model=model)
        return replace(
            run, model=model, layout=replace(run.layout, stage_layers=tuple(each + index for each in layers))
        )

    return Growth("depth", "model.n_layers", values, at, "as many layers more on each stage" if chunks > 1 else "")


def _devices(run: Run, reach: int) -> Growth:
    """More copies of the planned layout (layout.replicate), as long as each data rank gets whole sequences."""
    layout = run.layout
    if layout.alone and run.cluster.count > 1:
        layout = Layout(replicate=run.cluster.count)
    each_rank = run.recipe.global_batch // layout.data_ranks  # sequences of a data rank in a step
    copies = [1, *(k for k in range(2, min(each_rank, reach) + 1) if each_rank % k == 0)]
    if copies[-1] * 2 <= reach:
        copies.append(2 * copies[-1])  # the first without a sequence for each rank

    def at(index: int) -> Run:
        if index == 0 and layout is run.layout:
            return run
        k = copies[index]
        micro = run.device_batch
        left = max(1, each_rank // k)
        micro = max(size for size in range(1, min(micro, left) + 1) if left % size == 0)
        recipe = run.recipe
        if recipe.micro_batch is not None:
            recipe = replace(recipe, micro_batch=micro)
        grown = replace(layout, replicate=layout.replicate * k)
        cluster = replace(run.cluster, count=grown.devices)
        return replace(run, layout=grown, recipe=recipe, cluster=cluster)

    values = tuple(layout.devices * k for k in copies)
    carries = "copies of the planned layout, the global batch shared out"
    if run.device_batch > 1 and len(values) > 1 and at(len(values) - 1).device_batch < run.device_batch:
        carries += " (in smaller micro-batches where a rank has fewer sequences)"
    return Growth("devices", "cluster.count", values, at, carries)


def _dataset(run: Run, reach: int) -> Growth:
    recipe = run.recipe
    if recipe.tokens is None:
        values = _upwards(run, "recipe.steps", recipe.total_steps, 1, reach)
        field = "recipe.steps"
    else:
        values = _upwards(run, "recipe.tokens", recipe.tokens, recipe.tokens_per_step, reach)
        field = "recipe.tokens"

    def at(index: int) -> Run:
        if recipe.tokens is None:
            return replace(run, recipe=replace(recipe, steps=values[index]))
        return replace(run, recipe=replace(recipe, tokens=values[index]))

    return Growth("dataset", field, values, at, "steps" if recipe.tokens is not None else "")


def _vocabulary(run: Run, reach: int) -> Growth:
    """Multiples of what models round their vocabulary to: the head's product is far slower at sizes in between."""
    spec = run.model
    step = lcm(spec.vocab_multiple, _ROWS * run.layout.tensor)
    start = spec.vocab_size
    beyond = _upwards(run, "model.vocab_size", start, 1, reach).stop
    values = (start, *range((start // step + 1) * step, beyond, step))

    def at(index: int) -> Run:
        return replace(run, model=replace(spec, vocab_size=values[index]))

    carries = f"the table and the head, in multiples of {step:,} rows"
    return Growth("vocabulary", "model.vocab_size", values, at, carries)


_GROWTHS: dict[str, Callable[[Run, int], Growth]] = {
    "sequence": _sequence,
    "batch": _batch,
    "width": _width,
    "depth": _depth,
    "devices": _devices,
    "dataset": _dataset,
    "vocabulary": _vocabulary,
}
