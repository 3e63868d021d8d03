"""Rules of a layout: what must divide what, each with the nearest layout that works."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from trainledger.spec.layout import AXES, MOST_CHUNKS, OVERLAPS, Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import TILE
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.rules.model import nearest_divisor
from trainledger.spec.run import Run

BESIDE_ANOTHER = ("interleaved", "zero-bubble")  # Megatron Core's; and the one that is nearest to DualPipe
_SPREAD = "is not split over such ranks yet; layout.shard, pipeline and expert spread it"
_NEEDED = {
    "tensor": "only what sequence-parallel ranks gather and scatter is cut into parts; set layout.sequence_parallel",
    "input-gradients": "only tensor ranks have gradients of inputs to add up; set layout.tensor",
}


def layout_problems(run: Run) -> Iterator[Problem]:
    """Every contradiction between the layout of a run and its model, recipe and cluster."""
    if run.layout.auto:  # there is none yet
        yield from _overlap_names(run.layout)
        return
    yield from _batch(run)
    yield from _overlap(run)
    if run.layout.sequence_gather != "kept":
        yield from _sequence_gather(run)
    if run.layout.split_sends:
        yield from _split_sends(run)
    if run.layout.expert_send != "copies":
        yield from _expert_send(run)
    if run.layout.alone and run.layout.stage_layers is None and not run.layout.folds:
        if run.layout.virtual_stages > 1:
            yield Problem("layout.virtual_stages", run.layout.virtual_stages, "needs layout.pipeline", 1)
        if run.layout.expert > 1:
            yield Problem(
                "layout.expert", run.layout.expert, "needs layout.shard or layout.context to take ranks from", 1
            )
        return
    axes = [*tensor_problems(run), *_pipeline(run), *_context(run), *_expert(run), *_sharding(run)]
    if not any(
        axis.field.removeprefix("layout.") in AXES for axis in axes
    ):  # else the problem is reported for the resulting layout
        yield from _devices(run)
    yield from axes


def _batch(run: Run) -> Iterator[Problem]:
    """The batch in whole micro-batches on every data rank."""
    recipe, ranks = run.recipe, run.layout.data_ranks
    if recipe.micro_batch is None:
        if recipe.global_batch % ranks:
            rule = f"must be a multiple of the {ranks} data ranks (layout.replicate x layout.shard)"
            yield Problem("recipe.global_batch", recipe.global_batch, rule, _multiple(recipe.global_batch, ranks))
        return
    whole = recipe.micro_batch * ranks
    if recipe.global_batch % whole:
        rule = f"must be a multiple of micro_batch = {recipe.micro_batch}"
        if ranks > 1:
            rule += f" x {ranks} data ranks (layout.replicate x layout.shard)"
        yield Problem("recipe.global_batch", recipe.global_batch, rule, _multiple(recipe.global_batch, whole))


def _overlap_names(layout: Layout) -> Iterator[Problem]:
    for name in layout.overlap or ():
        if name not in OVERLAPS:
            yield Problem("layout.overlap", name, f"must be among {', '.join(OVERLAPS)}", nearest_text(name, OVERLAPS))


def _overlap(run: Run) -> Iterator[Problem]:
    yield from _overlap_names(run.layout)
    names = list(run.layout.overlap or ())
    for name, rule in _NEEDED.items():
        if name in names and not can_overlap(run, name):
            others = [other for other in names if other != name]
            yield Problem("layout.overlap", names, f"{name}: {rule}", others or "none")
    if "experts" in names and not can_overlap(run, "experts"):
        yield from _beside_another(run)


def can_overlap(run: Run, what: str) -> bool:
    """A layout has what one of OVERLAPS is about, and what that overlaps with."""
    layout = run.layout
    if what == "tensor":
        return layout.sequence_parallel
    if what == "input-gradients":
        return layout.tensor > 1
    if what == "experts":
        several = layout.schedule in BESIDE_ANOTHER if layout.pipeline > 1 else run.grad_accum > 1
        return layout.expert > 1 and bool(several)
    return True


def _beside_another(run: Run) -> Iterator[Problem]:
    """Overlap of what experts send with another micro-batch that goes the other way."""
    layout, said = run.layout, list(run.layout.overlap or ())
    rest = [name for name in said if name != "experts"] or "none"
    if layout.expert == 1:
        yield Problem("layout.overlap", said, "experts: needs layout.expert above 1, else they send nothing", rest)
    elif layout.pipeline > 1:
        rule = (
            f"overlap of experts needs a schedule that runs a forward together with another micro-batch's backward: "
            f"{' or '.join(BESIDE_ANOTHER)}"
        )
        yield Problem("layout.schedule", layout.schedule, rule, BESIDE_ANOTHER[-1])
    else:
        rule = "overlap of experts needs two micro-batches of a rank, and it has one"
        yield _more_micro_batches(run, 2, rule)


def _more_micro_batches(run: Run, multiple: int, rule: str) -> Problem:
    """The refusal of a rank's micro-batches, whose number must be a ``multiple`` of this."""
    recipe, ranks = run.recipe, run.layout.data_ranks
    if recipe.micro_batch is None and run.device_batch % multiple == 0:
        return Problem("recipe.micro_batch", None, rule, run.device_batch // multiple)
    if recipe.micro_batch is None:  # that they are all in one micro-batch is refused next
        return Problem("recipe.global_batch", recipe.global_batch, rule, _multiple(run.device_batch, multiple) * ranks)
    near = _multiple(run.grad_accum, multiple) * recipe.micro_batch * ranks
    return Problem("recipe.global_batch", recipe.global_batch, rule, near)


def _expert_send(run: Run) -> Iterator[Problem]:
    rule = ""
    if run.layout.expert == 1:
        rule = "needs layout.expert above 1"
    elif run.layout.expert_send == "all" and not run.recipe.of_megatron:
        rule = "is Megatron-LM's way (recipe.framework = 'megatron-core')"
    elif run.recipe.expert_dispatch.kind == "capacity":
        rule = "sends every token to its experts, which recipe.expert_dispatch = 'capacity' does not"
    if rule:
        yield Problem("layout.expert_send", run.layout.expert_send, rule, "copies")


def _multiple(wanted: int, of: int) -> int:
    """The multiple nearest to a number, at least one."""
    return max(1, round(wanted / of)) * of


def _devices(run: Run) -> Iterator[Problem]:
    needed = run.layout.devices
    if run.cluster.count != needed:
        sizes = " x ".join(f"{axis} {size}" for axis in AXES if (size := getattr(run.layout, axis)) > 1)
        found = "; layout=auto finds the other axes" if sizes and needed < run.cluster.count else ""
        rule = f"the layout ({sizes or 'one device'}) takes {needed}{found}"
        yield Problem("cluster.count", run.cluster.count, rule, needed)


def _pipeline(run: Run) -> Iterator[Problem]:
    spec, layout = run.model, run.layout
    stages, chunks = layout.pipeline, layout.pipeline * layout.virtual_stages
    interleaved = layout.schedule == "interleaved" and stages > 1
    if stages > 1 and spec.indexer is not None and spec.indexer.every > 1:
        rule = "sends no choice of keys to later stages, whose layers share one (model.attention.indexer.every)"
        yield Problem("layout.pipeline", stages, rule, 1)
    if layout.virtual_stages > 1 and not interleaved:
        yield Problem("layout.virtual_stages", layout.virtual_stages, "needs layout.schedule = 'interleaved'", 1)
        return
    if chunks > MOST_CHUNKS:
        rule = f"times layout.pipeline = {stages} must be at most {MOST_CHUNKS} chunks"
        yield Problem("layout.virtual_stages", layout.virtual_stages, rule, MOST_CHUNKS // stages)
        return
    if layout.stage_layers is not None:
        if len(layout.stage_layers) != chunks:
            rule = f"must have {chunks} numbers, one for each of pipeline x virtual_stages"
            yield Problem("layout.stage_layers", list(layout.stage_layers), rule, str(_even(spec.n_layers, chunks)))
        elif sum(layout.stage_layers) != spec.n_layers:
            rule = f"must add up to model.n_layers = {spec.n_layers}, not {sum(layout.stage_layers)}"
            yield Problem("layout.stage_layers", list(layout.stage_layers), rule, str(_even(spec.n_layers, chunks)))
    elif spec.n_layers % chunks:
        whole = nearest_divisor(spec.n_layers, chunks)
        rule = f"the {spec.n_layers} layers cannot be divided evenly among {chunks} chunks; "
        some = _even(spec.n_layers, chunks)
        rule += f"layout.stage_layers sets another division{f', such as {some}' if some else ''}"
        yield Problem("layout.pipeline", stages, rule, whole if layout.virtual_stages == 1 and whole > 1 else None)
    if interleaved and run.grad_accum % stages:
        rule = f"interleaving takes micro-batches in rounds of {stages} stages, and a rank has {run.grad_accum}"
        yield _more_micro_batches(run, stages, rule)


def _sequence_gather(run: Run) -> Iterator[Problem]:
    layout, float8 = run.layout, run.recipe.precision.float8
    rule = ""
    if not layout.sequence_parallel:
        rule = "is for what sequence-parallel ranks gather; it needs layout.sequence_parallel"
    elif float8 is not None and float8.scaling == "block":
        rule = f"matmuls of precision {run.recipe.precision.kind} keep separate 8-bit copies of what was gathered"
    if rule:
        yield Problem("layout.sequence_gather", layout.sequence_gather, rule, "kept")


def _split_sends(run: Run) -> Iterator[Problem]:
    layout, width = run.layout, run.rank_tokens * run.model.d_model
    rule = ""
    if layout.pipeline == 1 or layout.tensor == 1:
        rule = "needs layout.tensor and layout.pipeline above 1"
    elif layout.sequence_parallel:
        rule = "is for whole activations: with layout.sequence_parallel tensor ranks have and send only their part"
    elif width % layout.tensor:
        rule = f"the {width} numbers of a sequence cannot be divided evenly among {layout.tensor} tensor ranks"
    if rule:
        yield Problem("layout.split_sends", True, rule, False)


def _even(layers: int, chunks: int) -> list[int]:
    """The layers as evenly as they go, the first chunks one more."""
    if chunks > 64:
        return []
    return [layers // chunks + (chunk < layers % chunks) for chunk in range(chunks)]


def _context(run: Run) -> Iterator[Problem]:
    layout, recipe = run.layout, run.recipe
    ranks = layout.context
    if ranks == 1:
        return
    if layout.context_kind == "ring":
        if recipe.seq_len % (2 * ranks):
            rule = (
                f"each rank takes an early and a late part of the {recipe.seq_len} tokens, so twice it must divide them"
            )
            near = nearest_divisor(recipe.seq_len // 2, ranks) if recipe.seq_len % 2 == 0 else 1
            yield Problem("layout.context", ranks, rule, near)
    else:
        others = run.model.attention.in_global
        kv = run.model.kv_heads if others is None else gcd(run.model.kv_heads, others.n_kv_heads or 0)
        heads = gcd(run.model.attention.n_heads // layout.tensor, max(1, kv // layout.tensor))
        if recipe.seq_len % ranks:
            near = nearest_divisor(recipe.seq_len, ranks)
            yield Problem("layout.context", ranks, f"must divide recipe.seq_len = {recipe.seq_len}", near)
        elif heads % ranks:
            rule = f"must divide the {heads} key-value heads of a tensor rank, which all-to-all splits"
            yield Problem("layout.context", ranks, rule, nearest_divisor(gcd(heads, recipe.seq_len), ranks))
    spec = run.model
    if whole := _kept_whole(spec):
        yield Problem("layout.context", ranks, f"{whole} {_SPREAD}", 1)
    windows = spec.attention.window is not None or spec.positions.kind == "alibi"
    if not recipe.precision.low and (windows or spec.attention.custom_scores):
        has = spec.attention.custom_scores or "windows or ALiBi"
        rule = f"in fp32 no kernel between context ranks has {has}"
        yield Problem("layout.context", ranks, rule, 1)
    elif recipe.attention == "math":
        rule = "context ranks combine attention from parts, which unfused attention does not do"
        yield Problem("recipe.attention", recipe.attention, rule, "sdpa")
    elif recipe.attention != "flash" and windows:
        rule = "between context ranks only the flash kernel has windows and ALiBi without a mask of all tokens"
        yield Problem("recipe.attention", recipe.attention, rule, "flash")


def _expert(run: Run) -> Iterator[Problem]:
    layout, experts = run.layout, run.model.experts
    ranks = layout.expert
    if ranks == 1 and not layout.folds:
        return
    if experts is None:
        field, value = ("layout.expert", ranks) if ranks > 1 else ("layout.expert_tensor", layout.expert_tensor)
        yield Problem(field, value, "the model has no experts (model.feed_forward)", 1 if ranks > 1 else "none")
        return
    whole, count, among = layout.shard * layout.context, experts.n_experts, "shard x context"
    if layout.folds:
        rule = _folding(run, experts.width)
        if rule:
            yield Problem("layout.expert_tensor", layout.expert_tensor, rule, layout.tensor)
            return
        whole, among = whole * layout.tensor // layout.splits_expert, "shard x context x tensor / expert_tensor"
    if whole % ranks or count % ranks:
        rule = f"must divide n_experts = {count} and the {whole} ranks of {among}"
        yield Problem("layout.expert", ranks, rule, nearest_divisor(gcd(count, whole), ranks))


def _folding(run: Run, width: int) -> str:
    """The rule that ranks of experts which are not ranks of all else break; empty where they obey all."""
    layout, split = run.layout, run.layout.splits_expert
    ranks = layout.shard * layout.context * layout.tensor
    for name, size in {"an expert's width": width, "the ranks of shard x context x tensor": ranks}.items():
        if size % split:
            return f"must divide {name} = {size}"
    needs = {
        "recipe.framework = 'megatron-core' (this is Megatron-LM's way)": not run.recipe.of_megatron,
        "layout.zero below 3": layout.zero == 3,
        "layout.sequence_parallel, so that tensor ranks have other tokens each": (
            layout.tensor > 1 and not layout.sequence_parallel
        ),
    }
    lacks = [need for need, lacking in needs.items() if lacking]
    return f"other than layout.tensor needs {', '.join(lacks)}" if lacks else ""


def _sharding(run: Run) -> Iterator[Problem]:
    layout, again = run.layout, run.recipe.activation_checkpointing.kind
    if layout.zero == 3 and layout.shard_ranks > 1 and again in ("segments", "from-start"):
        rule = "blocks that are recomputed together are not accounted for with sharded parameters (zero = 3)"
        yield Problem("recipe.activation_checkpointing", again, rule, "full")
    if run.recipe.precision.weight_caching and layout.zero == 3 and layout.shard_ranks > 1:
        rule = "keeps whole weights in 8 bits, and parameters sharded at zero = 3 are gathered for each use and freed "
        rule += "(Transformer Engine keeps none with FSDP2 either); zero = 1 and 2 have them whole"
        yield Problem("recipe.precision.weight_caching", True, rule, False)
    optimizer = run.recipe.optimizer.kind
    by_layers = run.recipe.of_megatron and layout.zero == 1  # whole matrices, each with one rank
    in_pieces = optimizer == "adafactor" or (optimizer == "muon" and layout.zero < 3 and not by_layers)
    if layout.shard_ranks > 1 and in_pieces:
        rule = "works on whole matrices, and sharded ranks have pieces of them (replicate, tensor and pipeline do not)"
        if optimizer == "muon":
            rule += "; at zero = 3 they are rows, and are gathered"
        yield Problem("recipe.optimizer", optimizer, rule, "adamw")
    if layout.zero != 3 and layout.reshard_after_forward is not None:
        rule = f"parameters are whole at zero = {layout.zero}"
        yield Problem("layout.reshard_after_forward", layout.reshard_after_forward, rule, "none")
    if layout.reshard_after_forward and layout.schedule == "interleaved" and layout.pipeline > 1:
        rule = "must be false: an interleaved pipeline gathers once a step"
        yield Problem("layout.reshard_after_forward", True, rule, False)


_FARTHEST = 4096  # ranks from those that are asked for, among which the nearest is searched


def tensor_problems(run: Run) -> Iterator[Problem]:
    """Rules that the tensor ranks of a layout break."""
    spec, ranks = run.model, run.layout.tensor
    if ranks == 1:
        if run.layout.sequence_parallel:
            yield Problem("layout.sequence_parallel", True, "needs layout.tensor above 1", False)
        return
    rule = _broken(run, ranks)
    if rule:
        yield Problem("layout.tensor", ranks, rule, _nearest(run, ranks))
    if run.recipe.loss.kind != "full" and not run.recipe.of_megatron:
        rule = "tensor ranks compute the loss of all logits at once, each over its columns"
        if run.recipe.loss.kind == "compiled":
            rule = "tensor ranks each compute the loss over their columns, which is not accounted for when compiled"
        yield Problem("recipe.loss", run.recipe.loss.kind, rule, "full")
    names = ("expert_d_model", "own_norms") if spec.experts is not None else ()
    parts = [f"model.feed_forward.{name}" for name in names if getattr(spec.experts, name)]
    if whole := _kept_whole(spec) or (f"what is around experts ({parts[0]})" if parts else ""):
        yield Problem("layout.tensor", ranks, f"{whole} {_SPREAD}", 1)
    if spec.attention.qk_norm == "width":
        yield Problem("layout.tensor", ranks, "norms over the width of all heads (qk_norm) cannot be split by heads", 1)


def _kept_whole(spec: ModelSpec) -> str:
    """What neither tensor nor context ranks split; empty where they split all."""
    if spec.mixer is not None:
        return "a mixer (model.mixer)"
    return "a choice of keys (model.attention.indexer)" if spec.indexer is not None else ""


def _broken(run: Run, ranks: int) -> str:
    """The first rule that so many ranks break; empty where they obey all."""
    spec = run.model
    split = {"model.attention.n_heads": spec.attention.n_heads, "the embedding's rows": spec.padded_vocab}
    if spec.experts is None or spec.experts.n_dense_layers or spec.experts.every > 1:
        split["model.feed_forward.d_ff"] = spec.feed_forward.d_ff
    if spec.experts is not None:
        if not run.layout.folds:
            split["an expert's width"] = spec.experts.width
        if spec.experts.shared_d_ff is not None:
            split["model.feed_forward.shared_d_ff"] = spec.experts.shared_d_ff
    for name, size in split.items():
        if size % ranks:
            return f"must divide {name} = {size}"
    kv, others = spec.kv_heads, spec.attention.in_global
    if others is not None and gcd(kv, others.n_kv_heads or kv, others.n_heads or kv) % ranks:
        return "must divide the key-value heads of local and of global layers (model.attention.in_global)"
    if not spec.latent and kv % ranks and ranks % kv:
        return f"must divide model.attention.n_kv_heads = {kv}, or be a multiple of it"
    tokens = run.rank_tokens
    if run.layout.sequence_parallel and tokens % ranks:
        return f"sequence parallelism splits the {tokens} tokens of a rank, so it must divide them"
    return "" if run.recipe.precision.float8 is None else _untiled(run, ranks)


def _untiled(run: Run, ranks: int) -> str:
    """The part of a rank of a size that can be tiled whole, and not in parts."""
    spec = run.model
    kv = spec.kv_heads if spec.kv_heads % ranks == 0 else ranks  # of fewer heads than ranks each rank has one
    sizes = {
        "d_ff": spec.feed_forward.d_ff,
        "n_heads x head_dim": spec.attention.n_heads * spec.head_size,
        "n_kv_heads x head_dim": kv * spec.head_size,
    }
    if any(size % TILE or size % ranks for size in sizes.values()):
        return ""
    for name, size in sizes.items():
        if size // ranks % TILE:
            has = f"each tensor rank has {size // ranks} of {name} = {size}"
            return f"8-bit matmuls need multiples of {TILE}, and {has}"
    return ""


def _nearest(run: Run, wanted: int) -> int:
    """The number nearest to ``wanted`` (the smaller of two equally near) that breaks no rule; 1 never does."""
    for distance in range(min(wanted, _FARTHEST)):
        for candidate in (wanted - distance, wanted + distance):
            if candidate >= 1 and not _broken(run, candidate):
                return candidate
    return 1
