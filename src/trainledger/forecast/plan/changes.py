"""Changes that may make a run faster or smaller: what each sets, what it does to the result, and what it costs.

Whether one works and what it gains, `forecast.plan.advise` finds by predicting the changed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainledger.ledger.memory.compiled_blocks import uncovered
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.spec.device import fused_attention
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import AXES, SCHEDULES, Layout, overlaps
from trainledger.spec.optimizers import IMPLEMENTATIONS
from trainledger.spec.parts import field_at, with_fields
from trainledger.spec.precision import FP8Tensorwise
from trainledger.spec.recipe import OFFLOADS
from trainledger.spec.rules.layout import can_overlap
from trainledger.spec.run import Run
from trainledger.spec.savings import BASE_FORMATS, CHECKPOINTING, LOSSES
from trainledger.spec.units import round_up

SAME, ROUNDING, RESULT = "same", "rounding", "result"
EFFECTS = {
    SAME: "the same result",
    ROUNDING: "the same mathematics, rounded in another order",
    RESULT: "CHANGES what is trained",
}
_ORDINALS = {2: "second", 3: "third", 4: "fourth"}
LOSS_CHUNKS = 8
RESHARDS = {
    True: "parameters gathered again in backward",
    False: "parameters kept gathered between forward and backward",
}
_OVERLAPS = {  # communication that compute can hide, the effect, and programs that do so
    "gradients": ("overlap the sum of gradients with the last backward", SAME, "DDP, Megatron-LM"),
    "parameters": ("overlap the gather of parameters with the next forward", SAME, "Megatron-LM"),
    "tensor": ("split matmuls of tensor ranks to overlap what they send", ROUNDING, "Megatron-LM, torchtitan"),
    "input-gradients": ("overlap the sum of input gradients with weight gradients", SAME, "Megatron-LM, nanotron"),
    "experts": ("overlap sends to experts with another micro-batch", SAME, "Megatron Core, DualPipe"),
}


@frozen
class Change:
    """Fields and their new values, in words, the effect (one of EFFECTS) and its costs other than time and memory."""

    what: str
    fields: tuple[tuple[str, Any], ...]
    effect: str
    cost: str = ""
    timed: bool = True  # whether the forecast has all of its time


def value_of(run: Run, field: str) -> Any:
    """The value of a field by its name in a run file (``recipe.micro_batch``)."""
    section, _, path = field.partition(".")
    return field_at(getattr(run, section), path)


def made(run: Run, change: Change) -> Run:
    """The run with a change made; whether it obeys the rules of the run file is not checked."""
    sections: dict[str, dict[str, Any]] = {}
    for field, value in change.fields:
        section, _, path = field.partition(".")
        sections.setdefault(section, {})[path] = value
    new: dict[str, Any] = {section: with_fields(getattr(run, section), each) for section, each in sections.items()}
    return replace(run, **new)


def changes(run: Run, *, backend: str = "cuda", short: bool = False) -> Iterator[Change]:
    """Every change that is considered for a run, alone; some will break a rule of the run file.

    ``backend`` (of `spec.device`) says whose kernels run it; model states go to the host where a run is ``short`` of
    memory, and is none of a CPU, which has them there.
    """
    yield from _recomputation(run, backend)
    yield from _micro_batch(run)
    yield from _kernels(run, backend)
    yield from _loss(run)
    yield from _precision(run, backend)
    yield from _optimizer(run)
    yield from _saving(run)
    yield from _sizes(run)
    if run.recipe.launch_blocking:
        yield _one("launch kernels without waiting (no CUDA_LAUNCH_BLOCKING)", "recipe.launch_blocking", False, SAME)
    yield from _sharding(run)
    yield from _mesh(run)
    yield from _pipeline(run)
    if short and run.recipe.offload is None and backend != "cpu":
        for states in OFFLOADS if run.layout.zero == 3 and run.layout.shard_ranks > 1 else OFFLOADS[:1]:
            what = "the optimizer on the host" if states == "optimizer" else "all model states on the host"
            yield _one(what, "recipe.offload", states, SAME, "needs host memory; the host updates the weights")


def memory_savings(run: Run) -> Iterator[Change]:
    """Changes that need less memory for the same result, in the order in which they are made one after the other.

    States sharded in full (ZeRO-3), parameters resharded after forward, one sequence at a time, recomputation of every
    block, and the loss of a part of the tokens at a time. All but the first cost time.
    """
    layout, recipe = run.layout, run.recipe
    if layout.replicate > 1 or (layout.shard_ranks > 1 and layout.zero < 3):
        shard = (("layout.replicate", 1), ("layout.shard", layout.replicate * layout.shard), ("layout.zero", 3))
        yield Change("states sharded in full", shard, SAME)
    if layout.shard_ranks > 1 and not layout.reshards:
        yield _one(RESHARDS[True], "layout.reshard_after_forward", True, SAME)
    if run.device_batch > 1:
        yield _one("micro-batches of 1", "recipe.micro_batch", 1, SAME)
    again = recipe.activation_checkpointing
    if again.kind not in ("full", "from-start", "segments") or again.every > 1:
        full = (("recipe.activation_checkpointing", "full"), ("recipe.activation_checkpointing.every", 1))
        yield Change("activation checkpointing full", full, SAME)
    if recipe.loss.chunks is None and layout.tensor == 1:
        chunked = (("recipe.loss", "chunked"), ("recipe.loss.chunks", LOSS_CHUNKS))
        yield Change("loss chunked", chunked, SAME)


def _one(what: str, field: str, value: Any, effect: str, cost: str = "") -> Change:
    return Change(what, ((field, value),), effect, cost)


def _recomputation(run: Run, backend: str) -> Iterator[Change]:
    again, field = run.recipe.activation_checkpointing, "recipe.activation_checkpointing"
    now = again.kind
    for kind in CHECKPOINTING:
        if kind != now and not (kind == "offload" and backend == "cpu"):  # it is on the host already
            timed = kind != "offload" or not run.layout.alone
            cost = "" if kind != "offload" else "needs host memory"
            cost += "" if timed else "; its copies to the host are not timed"
            what = "keep all activations" if kind == "none" else f"activation checkpointing {kind}"
            clear = ((f"{field}.every", 1),) if again.every > 1 and kind in ("full", "selective") else ()
            yield Change(what, ((field, kind), *clear), SAME, cost, timed)
    for every in (2, 3, 4):
        if now in ("none", "full", "selective") and not (now == "full" and again.every == every):
            what = f"recompute every {_ORDINALS[every]} block"
            yield Change(what, ((field, "full"), (f"{field}.every", every)), SAME)


def _micro_batch(run: Run) -> Iterator[Change]:
    each_rank, now = run.recipe.global_batch // run.layout.data_ranks, run.device_batch
    recipe = run.recipe
    # Experts' places and their balance are counted in a micro-batch.
    alone = run.model.experts is not None and (
        recipe.expert_dispatch.kind == "capacity" or recipe.load_balance_loss > 0
    )
    cost = "other draws of dropout" if recipe.dropout or recipe.attention_dropout else ""
    sizes = {size for k in (2, 4, 8) for size in (now * k, now // k)} | {1}
    for size in sorted(sizes):
        if size != now and size >= 1 and each_rank % size == 0:
            yield _one(f"micro-batches of {size}", "recipe.micro_batch", size, RESULT if alone else ROUNDING, cost)


def _kernels(run: Run, backend: str) -> Iterator[Change]:
    own = fused_attention(backend)
    for kernel in ("sdpa", "flash", "efficient"):
        has = kernel == "sdpa" or (kernel in own and (kernel != "flash" or run.recipe.precision.low))  # flash: no fp32
        if has and kernel != run.recipe.attention:
            yield _one(f"attention by {kernel}", "recipe.attention", kernel, ROUNDING)
    if not run.recipe.compile and not run.recipe.of_xla and not run.recipe.of_megatron:
        cost = "compiles at every start"
        if uncovered(rank_plan(replace(run, recipe=replace(run.recipe, compile=True)))):
            cost += "; its memory is counted as that of eager blocks"
        yield _one("compile each block", "recipe.compile", True, ROUNDING, cost)


def _loss(run: Run) -> Iterator[Change]:
    tokens = run.device_batch * run.recipe.seq_len
    chunks = next((each for each in (8, 4, 16, 2) if tokens % each == 0), None)
    megatrons = ("full", "compiled", *(("in-place",) if run.recipe.framework == "megatron-core" else ()))
    for kind in megatrons if run.recipe.of_megatron else (loss for loss in LOSSES if loss != "in-place"):
        whole = kind in megatrons
        if kind != run.recipe.loss.kind and (whole or chunks is not None):
            more = (
                () if whole or chunks == (run.recipe.loss.chunks or LOSS_CHUNKS) else (("recipe.loss.chunks", chunks),)
            )
            what = "the loss of all logits at once" if kind == "full" else f"loss {kind}"
            cost = "compiles at every start" if kind == "compiled" else ""
            yield Change(what, (("recipe.loss", kind), *more), ROUNDING, cost)
    if run.recipe.loss.upcast and run.recipe.precision.low:
        yield _one(
            "the loss in 16 bits", "recipe.loss.upcast", False, RESULT, "rounds the loss and its gradient to 16 bits"
        )


def _precision(run: Run, backend: str) -> Iterator[Change]:
    now, field = run.recipe.precision.kind, "recipe.precision"
    wanted = ["bf16-mixed"]
    if backend != "cpu":
        wanted += [f"fp8-{each}{'' if run.layout.alone else '-sharded'}" for each in ("rowwise", "tensorwise", "block")]
    if now == "fp32" and backend != "cpu":
        wanted.insert(0, "tf32")
    if not run.layout.alone:
        wanted.insert(0, "bf16-sharded")
    if isinstance(run.recipe.precision, FP8Tensorwise):
        once = not run.recipe.precision.weight_caching
        what = "cast weights to 8 bits once a step" if once else "cast weights to 8 bits before each matmul"
        cost = "a program that does so (Transformer Engine)" if once else ""
        yield _one(what, f"{field}.weight_caching", once, SAME, cost)
    for name in wanted:
        if name != now and not run.recipe.precision.master_weights:
            than_now = "finer" if run.recipe.precision.scaled and "fp8" not in name else "coarser"
            yield _one(f"precision {name}", field, name, RESULT, f"{than_now} numbers: compare a short run's loss")
    if backend == "cpu" and now == "bf16-mixed":  # processors without matmuls in bf16 are faster so
        yield _one("precision fp32", field, "fp32", RESULT, "finer numbers")
    if run.recipe.lora is not None:
        yield from _frozen(run)
    megatron = ((field, "bf16"), (f"{field}.master_weights", True), (f"{field}.gradient_dtype", "fp32"))
    if not run.recipe.precision.master_weights and now in ("bf16-mixed", "bf16-sharded", "fp32"):
        yield Change("bf16 weights with an fp32 master copy", megatron, RESULT, "norms and the stream in bf16 too")


def _frozen(run: Run) -> Iterator[Change]:
    """Smaller dtypes of the frozen weights."""
    recipe = run.recipe
    for format in BASE_FORMATS:
        if recipe.lora is not None and format != recipe.lora.base_format:
            cost = "coarser frozen weights"
            yield _one(f"frozen weights in {format}", "recipe.lora.base_format", format, RESULT, cost)
    if recipe.precision.kind in ("fp32", "bf16-mixed"):
        yield _one("all in bf16, adapters too", "recipe.precision", "bf16", RESULT, "coarser adapters and moments")


def _optimizer(run: Run) -> Iterator[Change]:
    recipe = run.recipe
    fastest = IMPLEMENTATIONS[recipe.optimizer.kind][0]
    if "8bit" not in recipe.optimizer.kind and recipe.optimizer.implementation != fastest:
        yield _one(f"{fastest} optimizer", "recipe.optimizer.implementation", fastest, ROUNDING)
    if recipe.optimizer.kind in ("adamw", "adam"):
        fields = (("recipe.optimizer", f"{recipe.optimizer.kind}-8bit"), ("recipe.optimizer.implementation", "fused"))
        yield Change("moments in 8 bits", fields, RESULT, "coarser moments, as bitsandbytes has them")
        if recipe.precision.moment_dtype is None and recipe.precision.moments == "fp32":
            yield _one("moments in bf16", "recipe.precision.moment_dtype", "bf16", RESULT, "coarser moments")


def _saving(run: Run) -> Iterator[Change]:
    if not run.recipe.checkpoints.asynchronous:
        yield _one(
            "write checkpoints asynchronously", "recipe.checkpoints.asynchronous", True, SAME, "needs host memory"
        )
    if run.recipe.checkpoints.every is not None:
        what = "checkpoints at the interval that loses least (Daly 2006)"
        yield _one(what, "recipe.checkpoints.every", None, SAME)


def _sizes(run: Run) -> Iterator[Change]:
    """Sizes that kernels like better; each is another model, so none is offered without saying so."""
    spec = run.model
    seen: set[int] = set()
    for multiple in (64, 128):
        padded = round_up(spec.vocab_size, multiple)
        if spec.padded_vocab % multiple and padded not in seen:
            seen.add(padded)
            cost = f"{padded - spec.padded_vocab:,} more rows, which no text asks for but the softmax sums over"
            yield _one(f"vocabulary padded to a multiple of {multiple}", "model.vocab_multiple", multiple, RESULT, cost)
    if not spec.latent and spec.attention.head_dim is None and spec.head_size % 64:
        for size in (64, 128):
            if spec.d_model % size == 0 and spec.kv_heads in (spec.attention.n_heads, 1):
                fields: list[tuple[str, Any]] = [("model.attention.n_heads", spec.d_model // size)]
                if spec.attention.n_kv_heads is not None and spec.attention.n_kv_heads == spec.attention.n_heads:
                    fields.append(("model.attention.n_kv_heads", spec.d_model // size))
                yield Change(f"heads of width {size}", tuple(fields), RESULT, "another model of as many parameters")
    whole = 128 * run.layout.tensor
    if spec.feed_forward.d_ff % whole:
        wide = round_up(spec.feed_forward.d_ff, whole)
        cost = "another, slightly larger model"
        yield _one(f"d_ff a multiple of {whole}", "model.feed_forward.d_ff", wide, RESULT, cost)


def _sharding(run: Run) -> Iterator[Change]:
    layout = run.layout
    if layout.alone:
        return
    if layout.shard_ranks > 1:
        for stage in (1, 2, 3):
            if stage != layout.zero:
                fields: tuple[tuple[str, Any], ...] = (("layout.zero", stage),)
                if layout.reshard_after_forward is not None:
                    fields += (("layout.reshard_after_forward", None),)
                yield Change(f"shard as ZeRO {stage}", fields, ROUNDING)
        if layout.zero == 3:
            reshard = not layout.reshards
            yield _one(RESHARDS[reshard], "layout.reshard_after_forward", reshard, SAME)
            for ahead in (0, 1, 2):
                if ahead != layout.prefetch:
                    yield _one(f"gather {ahead} blocks ahead", "layout.prefetch", ahead, SAME)
    if layout.tensor > 1:
        what = "no sequence parallelism" if layout.sequence_parallel else "sequence parallelism"
        other: list[tuple[str, Any]] = [("layout.sequence_parallel", not layout.sequence_parallel)]
        if layout.split_sends:
            other.append(("layout.split_sends", False))
        if layout.gathers_again:
            other.append(("layout.sequence_gather", "kept"))
        yield Change(what, tuple(other), ROUNDING)
    # The second gather has the dtype of the matmuls.
    precision = run.recipe.precision
    effect = SAME if precision.stream == precision.compute else ROUNDING
    if layout.gathers_again:
        yield _one("keep gathered activations of tensor ranks for backward", "layout.sequence_gather", "kept", effect)
    elif layout.sequence_parallel:
        what = "gather activations of tensor ranks again in backward"
        yield _one(what, "layout.sequence_gather", "again", effect, "a program that does so (Megatron-LM)")
    if layout.expert > 1 and layout.expert_send == "copies" and run.recipe.expert_dispatch.factor is None:
        what = "send tokens once to each node of their experts"
        yield _one(what, "layout.expert_send", "nodes", ROUNDING, "a program that does so (DeepEP)")
    yield from _overlap(run)


def _overlap(run: Run) -> Iterator[Change]:
    layout = run.layout
    now = layout.overlap or ()
    once = layout.shard_ranks == 1 or layout.zero == 1  # gradients are summed once a step
    may = {
        "gradients": once and layout.replicate * layout.shard_ranks > 1,
        "parameters": layout.shard_ranks > 1 and layout.zero < 3,
        "tensor": layout.sequence_parallel,
        "input-gradients": layout.tensor > 1 and not overlaps(layout, "tensor"),
        "experts": can_overlap(run, "experts"),
    }
    for name, (what, effect, programs) in _OVERLAPS.items():
        if may[name] and name not in now:
            yield _one(what, "layout.overlap", (*now, name), effect, f"a program that does so ({programs})")


def _mesh(run: Run) -> Iterator[Change]:
    """The same devices on other axes: a factor of two from one axis to another, or a first layout."""
    layout = run.layout
    if layout.alone:
        if run.cluster.count > 1:
            count = run.cluster.count
            for first in (Layout(replicate=count), Layout(shard=count), Layout(tensor=count)):
                yield from _moved(run, first, f"a layout over all {count:,} devices")
        return
    for source in AXES:
        for target in AXES:
            if source == target or getattr(layout, source) % 2 or getattr(layout, source) == 1:
                continue
            halved, doubled = getattr(layout, source) // 2, getattr(layout, target) * 2
            sizes: dict[str, Any] = {source: halved, target: doubled}
            moved = replace(layout, **sizes)
            yield from _moved(run, moved, f"{target} {doubled} and {source} {halved}")


def _moved(run: Run, layout: Layout, what: str) -> Iterator[Change]:
    if layout.tensor == 1 and layout.sequence_parallel:
        layout = replace(layout, sequence_parallel=False, sequence_gather="kept")
    if layout.tensor == 1 and layout.overlap is not None:
        left = tuple(each for each in layout.overlap if each not in ("tensor", "input-gradients"))
        layout = replace(layout, overlap=left or None)
    if layout.split_sends and not layout.sends_whole:
        layout = replace(layout, split_sends=False)
    if layout.pipeline != run.layout.pipeline:
        layout = replace(layout, stage_layers=None)
        if layout.pipeline == 1:
            layout = replace(layout, virtual_stages=1, schedule="1f1b")
    if layout.shard_ranks == 1 and layout.reshard_after_forward is not None:
        layout = replace(layout, reshard_after_forward=None)
    fields = [(f"layout.{name}", value) for name, value in vars(layout).items() if value != getattr(run.layout, name)]
    each_rank, uneven = divmod(run.recipe.global_batch, layout.data_ranks)
    if uneven:
        return
    micro = run.recipe.micro_batch
    if micro is not None and each_rank % micro:
        fields.append(("recipe.micro_batch", next(size for size in range(micro, 0, -1) if each_rank % size == 0)))
    yield Change(what, tuple(fields), ROUNDING)


def _pipeline(run: Run) -> Iterator[Change]:
    layout = run.layout
    if layout.pipeline == 1:
        return
    if layout.sends_whole and not layout.split_sends:
        yield _one("send parts of activations between stages", "layout.split_sends", True, SAME)
    for schedule in SCHEDULES:
        if schedule not in (layout.schedule, "interleaved"):
            fields: list[tuple[str, Any]] = [("layout.schedule", schedule)]
            if layout.virtual_stages > 1:
                fields += [("layout.virtual_stages", 1), ("layout.stage_layers", None)]
            yield Change(f"pipeline schedule {schedule}", tuple(fields), ROUNDING)
    for virtual in (2, 3, 4, 8):
        if not (layout.schedule == "interleaved" and layout.virtual_stages == virtual):
            fields = [("layout.schedule", "interleaved"), ("layout.virtual_stages", virtual)]
            if layout.stage_layers is not None:
                fields.append(("layout.stage_layers", None))
            yield Change(f"interleaved pipeline with {virtual} virtual stages", tuple(fields), ROUNDING)
