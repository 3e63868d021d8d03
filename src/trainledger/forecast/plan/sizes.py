"""The sizes of a run that can grow: runs along each of them, in steps that its layout and batch allow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from trainledger.forecast.plan.family import Family
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.parts import with_fields
from trainledger.spec.precision import TILE
from trainledger.spec.problem import shown
from trainledger.spec.reading import field_of
from trainledger.spec.rules.run import memory_problems
from trainledger.spec.run import Run
from trainledger.spec.runfile import SECTIONS
from trainledger.spec.setting import rule_of

_GAP = 4096  # how far apart two runs that obey all rules may lie


@frozen
class Sweep:
    """Runs that differ in one size: ``values`` of ``field`` in order, and the run ``at`` the index of each.

    ``start`` is the index of the planned value. ``carries`` says what changes with the size. ``ahead`` further values
    are tried beyond an edge, where memory does not grow with every step. ``turns`` are indices at which amounts may be
    larger than at later ones.
    """

    field: str
    values: Sequence[int]
    at: Callable[[int], Run]
    start: int = 0
    ahead: int = 0
    carries: str = ""
    turns: Sequence[int] = ()

    def allowed(self, index: int) -> tuple[int, Run] | None:
        """The first index from here on whose run obeys the rules of memory and layout, and the run."""
        for each in range(index, min(len(self.values), index + _GAP)):
            run = self.at(each)
            if next(memory_problems(run), None) is None:
                return each, run
        return None


MOST_SHARDS = 2**14  # beyond the rows of a matrix, what is gathered is mostly padding
_MOST_TOKENS = 2**27  # of a sequence
_AHEAD = 8  # members of a family that are tried beyond the edge, as memory does not follow parameters to the byte
_TURNS = 8  # last values at which a step loses a micro-batch
_ROWS = 128  # of the embedding on a tensor rank: what vocabularies are rounded to


def grow(run: Run, axis: str, reach: int, *, keep_tokens: bool = True) -> Sweep:
    """How a run grows along one of AXES, to ``reach`` times the planned value at most.

    A longer sequence comes in fewer sequences, so that a step keeps its tokens; with ``keep_tokens`` off in as many.
    """
    return _sequence(run, reach, keep_tokens) if axis == "sequence" else _GROWTHS[axis](run, reach)


def regrown(run: Run, axis: str, reach: int, *, keep_tokens: bool = True) -> Sweep:
    """As `grow`, of a run whose layout and micro-batch are chosen anew at each value: the planned ones bind nothing."""
    if axis == "devices":
        count = run.cluster.count
        values = tuple(count * 2**k for k in range(reach.bit_length()) if 2**k <= reach)

        def at(index: int) -> Run:
            return replace(run, cluster=replace(run.cluster, count=values[index]))

        return Sweep("cluster.count", values, at, carries="the global batch shared out")
    free = replace(run, layout=Layout(), recipe=replace(run.recipe, micro_batch=None))
    sweep = grow(free, axis, reach, keep_tokens=keep_tokens)
    if axis != "sequence" or not keep_tokens:
        return sweep

    def with_even_batch(index: int) -> Run:
        longer = sweep.at(index)
        batch = longer.recipe.global_batch
        fine = 1 << max(0, batch.bit_length() - 3)  # 4 to 7 times a power of two: ranks can share them
        return replace(longer, recipe=replace(longer.recipe, global_batch=batch // fine * fine))

    return replace(sweep, at=with_even_batch, turns=(), carries="fewer sequences, so that a step keeps its tokens")


def _upwards(run: Run, field: str, start: int, step: int, reach: int) -> range:
    """start, start + step, ... up to ``reach`` times the start and no further than the field goes."""
    known = field_of(SECTIONS, field)
    assert known is not None
    most = rule_of(known)["at_most"]
    end = start * reach if most is None else min(start * reach, int(most))
    return range(start, max(start, end) + 1, step)


def with_sequence(run: Run, tokens: int) -> Run:
    """The run with sequences of so many tokens; the model's own limit is lifted where they are more."""
    known = max(run.model.max_seq_len, tokens)
    return replace(run, recipe=replace(run.recipe, seq_len=tokens), model=replace(run.model, max_seq_len=known))


def sequence_step(run: Run) -> int:
    """Tokens of which a sequence is a multiple: for context and tensor ranks, 8-bit tiles and chunks of the loss."""
    recipe, layout = run.recipe, run.layout
    step = 2 * layout.context if layout.context > 1 else 1
    if layout.sequence_parallel:
        step = lcm(step, layout.context * layout.tensor)
    if recipe.precision.float8 is not None:
        step = lcm(step, TILE)
    return lcm(step, recipe.loss.chunks or 1)


def _sequence(run: Run, reach: int, keep_tokens: bool) -> Sweep:
    recipe = run.recipe
    values = _upwards(run, "recipe.seq_len", recipe.seq_len, sequence_step(run), reach)
    unit = whole_batch(run)

    def at(index: int) -> Run:
        longer = with_sequence(run, values[index])
        if not keep_tokens or index == 0:
            return longer
        batch = max(1, recipe.tokens_per_step // (values[index] * unit)) * unit
        return replace(longer, recipe=replace(longer.recipe, global_batch=batch))

    if not keep_tokens:
        return Sweep("recipe.seq_len", values, at, carries="as many sequences in a step, so that its tokens grow")
    each = "micro-batch" if recipe.micro_batch else "sequence"
    carries = f"fewer sequences, so that a step keeps its tokens until a rank has one {each}"
    last = {bisect_right(values, recipe.tokens_per_step // (unit * batches)) - 1 for batches in range(1, _TURNS + 1)}
    turns = sorted(each for place in last for each in (place, place + 1) if 0 < each < len(values))
    return Sweep("recipe.seq_len", values, at, carries=carries, turns=turns)


def whole_batch(run: Run) -> int:
    """Sequences of which a global batch is a multiple: a micro-batch for each data rank."""
    unit = run.layout.data_ranks * (run.recipe.micro_batch or 1)
    return int(unit * run.layout.pipeline if run.layout.schedule == "interleaved" else unit)


def _batch(run: Run, reach: int) -> Sweep:
    values = _upwards(run, "recipe.global_batch", run.recipe.global_batch, whole_batch(run), reach)

    def at(index: int) -> Run:
        return replace(run, recipe=replace(run.recipe, global_batch=values[index]))

    carries = "micro-batches of the planned size" if run.recipe.micro_batch else "all of a device's sequences at once"
    return Sweep("recipe.global_batch", values, at, carries=carries)


def _width(run: Run, reach: int) -> Sweep:
    spec, layout = run.model, run.layout
    tensor, heads = layout.tensor, spec.attention.n_heads
    tile = TILE if run.recipe.precision.float8 is not None else 1
    grows_kv = spec.kv_heads == heads
    more = lcm(tensor, 1 if grows_kv else spec.kv_heads)
    if layout.context > 1 and layout.context_kind == "all-to-all":
        more = lcm(more, layout.context * tensor)
    while (spec.d_model * more) % heads or (more * spec.d_model // heads) % tile:
        more += lcm(tensor, 1 if grows_kv else spec.kv_heads)
    values = _upwards(run, "model.d_model", spec.d_model, spec.d_model * more // heads, reach)
    whole = lcm(tensor, tile)

    def wide(size: int, n_heads: int) -> int:
        return size if n_heads == heads else max(1, round(size * n_heads / heads / whole)) * whole

    def at(index: int) -> Run:
        n = heads + index * more
        kv = n if grows_kv and spec.attention.n_kv_heads is not None else spec.attention.n_kv_heads
        own = None if spec.experts is None else spec.experts.expert_d_ff
        model = with_fields(
            spec,
            {
                "d_model": values[index],
                "attention.n_heads": n,
                "attention.n_kv_heads": kv,
                "feed_forward.d_ff": wide(spec.feed_forward.d_ff, n),
                "feed_forward.expert_d_ff": None if own is None else wide(own, n),
            },
        )
        return replace(run, model=model)

    carries = "heads of the planned width, d_ff in proportion" + ("" if grows_kv else ", key-value heads unchanged")
    return Sweep("model.d_model", values, at, carries=carries)


def _depth(run: Run, reach: int) -> Sweep:
    chunks = run.layout.pipeline * run.layout.virtual_stages
    values = _upwards(run, "model.n_layers", run.model.n_layers, chunks, reach)

    def at(index: int) -> Run:
        layout, layers = run.layout, run.layout.stage_layers
        if layers is not None:
            layout = replace(layout, stage_layers=tuple(layer + index for layer in layers))
        return replace(run, model=replace(run.model, n_layers=values[index]), layout=layout)

    return Sweep("model.n_layers", values, at, carries="as many layers more on each stage" if chunks > 1 else "")


def _devices(run: Run, reach: int) -> Sweep:
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
        k, micro = copies[index], run.device_batch
        left = max(1, each_rank // k)
        micro = max(size for size in range(1, min(micro, left) + 1) if left % size == 0)
        recipe = run.recipe
        if recipe.micro_batch is not None:
            recipe = replace(recipe, micro_batch=micro)
        return _on_devices_of(replace(run, layout=replace(layout, replicate=layout.replicate * k), recipe=recipe))

    values = tuple(layout.devices * k for k in copies)
    carries = "copies of the planned layout, the global batch shared out"
    if run.device_batch > 1 and len(values) > 1 and at(len(values) - 1).device_batch < run.device_batch:
        carries += " (in smaller micro-batches where a rank has fewer sequences)"
    return Sweep("cluster.count", values, at, carries=carries)


def _dataset(run: Run, reach: int) -> Sweep:
    recipe = run.recipe
    if recipe.tokens is None:
        field, values = "recipe.steps", _upwards(run, "recipe.steps", recipe.total_steps, 1, reach)
    else:
        field, values = "recipe.tokens", _upwards(run, "recipe.tokens", recipe.tokens, recipe.tokens_per_step, reach)

    def at(index: int) -> Run:
        longer: dict[str, Any] = {field.partition(".")[2]: values[index]}
        return replace(run, recipe=replace(recipe, **longer))

    return Sweep(field, values, at, carries="steps" if recipe.tokens is not None else "")


def _vocabulary(run: Run, reach: int) -> Sweep:
    """Multiples of what models round their vocabulary to: the head's matmul is far slower at sizes in between."""
    spec = run.model
    step = lcm(spec.vocab_multiple, _ROWS * run.layout.tensor)
    start = spec.vocab_size
    beyond = _upwards(run, "model.vocab_size", start, 1, reach).stop
    values = (start, *range((start // step + 1) * step, beyond, step))

    def at(index: int) -> Run:
        return replace(run, model=replace(spec, vocab_size=values[index]))

    return Sweep("model.vocab_size", values, at, carries=f"embedding and head, in multiples of {step:,} rows")


_GROWTHS: dict[str, Callable[[Run, int], Sweep]] = {
    "batch": _batch,
    "width": _width,
    "depth": _depth,
    "devices": _devices,
    "dataset": _dataset,
    "vocabulary": _vocabulary,
}
AXES = ("sequence", *_GROWTHS)


def models(run: Run, family: Family) -> Sweep:
    """The run with each member of a family as its model."""

    def at(place: int) -> Run:
        return with_sequence(replace(run, model=family[place]), run.recipe.seq_len)

    start = family.nearest(parameters(run.model).total)
    return Sweep("model", range(len(family)), lambda place: _on_devices_of(at(place)), start, _AHEAD)


def sequence_unit(run: Run) -> int:
    """Sequences are tried in steps of so many tokens: 128, or what ranks that split them ask for."""
    layout = run.layout
    return lcm(128, layout.context * (2 if layout.context > 1 else 1) * (layout.tensor if layout.tensor > 1 else 1))


def sequences(run: Run) -> Sweep:
    """The run with longer and longer sequences; the model's own limit is lifted."""
    unit = sequence_unit(run)
    values = range(unit, _MOST_TOKENS // unit * unit + 1, unit)
    start = max(0, run.recipe.seq_len // unit - 1)
    return Sweep("recipe.seq_len", values, lambda place: _on_devices_of(with_sequence(run, values[place])), start)


def micro_batches(run: Run) -> Sweep:
    """The run with larger and larger micro-batches, as many of them in a step as before."""
    values = range(1, 2**20 + 1)

    def at(place: int) -> Run:
        batch = values[place] * run.layout.data_ranks * run.grad_accum
        recipe = replace(run.recipe, micro_batch=values[place], global_batch=batch)
        return _on_devices_of(replace(run, recipe=recipe))

    return Sweep("recipe.micro_batch", values, at, run.device_batch - 1)


def shards(run: Run) -> Sweep:
    """The run with its states sharded over more and more ranks: the memory of a rank falls along it.

    The micro-batch and about the global batch stay, so that fewer ranks take more micro-batches each.
    """
    values = range(1, MOST_SHARDS + 1)
    start = min(run.layout.shard, MOST_SHARDS) - 1
    return Sweep("layout.shard", values, lambda place: _sharded(run, values[place]), start)


def why_not_sharded(run: Run) -> str:
    """The rule that forbids to shard states over two ranks, with its field; empty where none does."""
    each = next(memory_problems(_sharded(run, 2)), None)
    return "" if each is None else f"{each.field} = {shown(each.value)} {each.rule}"


def _sharded(run: Run, ranks: int) -> Run:
    per_step = run.device_batch * ranks
    batch = max(1, run.recipe.global_batch // per_step) * per_step
    recipe = replace(run.recipe, micro_batch=run.device_batch, global_batch=batch)
    return _on_devices_of(replace(run, recipe=recipe, layout=replace(run.layout, replicate=1, shard=ranks)))


def _on_devices_of(run: Run) -> Run:
    """The run on as many devices as its layout takes."""
    if run.layout.alone:
        return run
    return replace(run, cluster=replace(run.cluster, count=run.layout.devices))
