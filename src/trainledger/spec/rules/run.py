"""Rules of a run and its recipe and data, each with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from trainledger.spec.model import OF_LOGITS
from trainledger.spec.objective import NextToken
from trainledger.spec.optimizers import STEPS_OF_OWN_SIZE
from trainledger.spec.precision import TILE
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.adapters import adapter_problems, adapter_recipe_problems
from trainledger.spec.rules.data import data_problems, document_problems, length_problems
from trainledger.spec.rules.layout import layout_problems
from trainledger.spec.rules.model import model_problems
from trainledger.spec.run import Run
from trainledger.spec.savings import KEEPABLE, LINEAR, Selective
from trainledger.spec.units import round_up


def run_problems(run: Run) -> Iterator[Problem]:
    """Every contradiction between the fields of a run."""
    yield from model_problems(run.model)
    yield from recipe_problems(run.recipe)
    yield from data_problems(run.data)
    yield from layout_problems(run)
    yield from document_problems(run)
    yield from adapter_problems(run)
    yield from _preferences(run)
    yield from _loss(run)
    yield from _offload(run)
    yield from _maximal_update(run)
    yield from _tiles(run)
    yield from _experts(run)
    yield from length_problems(run)
    if run.model.mixer is not None:
        yield from _mixers(run.recipe)
    if run.model.indexer is not None:
        yield from _indexer(run.recipe)
    if run.recipe.seq_len > run.model.max_seq_len:
        rule = f"is longer than model.max_seq_len = {run.model.max_seq_len}"
        yield Problem("recipe.seq_len", run.recipe.seq_len, rule, run.model.max_seq_len)


def _mixers(recipe: Recipe) -> Iterator[Problem]:
    """What would change a mixer (model.mixer), and is accounted for with other layers only."""
    yet, precision = "is not accounted for with a mixer (model.mixer) yet", recipe.precision
    if recipe.compile:
        yield Problem("recipe.compile", True, yet, False)
    if recipe.lora is not None and recipe.lora.base_format not in (None, precision.parameters):
        rule = f"is not that of mixers (model.mixer), which stay in {precision.parameters} (recipe.precision)"
        yield Problem("recipe.lora.base_format", recipe.lora.base_format, rule, "none")
    if precision.float8 is not None:
        yield Problem("recipe.precision", precision.kind, yet, "bf16-mixed")


def _indexer(recipe: Recipe) -> Iterator[Problem]:
    """What is accounted for only where attention sees all keys, not those that an indexer chooses."""
    yet, again = "is not accounted for with chosen keys (model.attention.indexer)", recipe.activation_checkpointing.kind
    if recipe.compile:
        yield Problem("recipe.compile", True, yet, False)
    if recipe.attention == "math":
        yield Problem("recipe.attention", "math", f"{yet}, whose kernel is one operation", "sdpa")
    if recipe.attention_dropout:
        yield Problem("recipe.attention_dropout", recipe.attention_dropout, yet, 0.0)
    if recipe.of_megatron:
        yield Problem("recipe.framework", recipe.framework, yet, "torch")
    if again in ("attention", "offload"):
        yield Problem("recipe.activation_checkpointing", again, yet, "full")


def memory_problems(run: Run) -> Iterator[Problem]:
    """Problems of a run as far as its memory and its layout go."""
    yield from layout_problems(run)
    yield from document_problems(run)
    yield from adapter_problems(run)
    yield from _preferences(run)
    yield from _loss(run)
    yield from _offload(run)
    yield from _experts(run)
    if run.model.indexer is not None:
        yield from _indexer(run.recipe)


def _offload(run: Run) -> Iterator[Problem]:
    """Contradictions between model states in host memory and the layout and recipe of a run."""
    recipe, layout, field = run.recipe, run.layout, "recipe.offload"
    if recipe.offload is None:
        return
    sought = layout.auto or (layout.alone and run.cluster.count > 1)  # by a search, or all devices as one
    gathers = sought or (layout.zero == 3 and layout.shard * layout.context != 1)
    if recipe.offload == "parameters" and not gathers:
        rule = "are pieces that are gathered before they are used: needs layout.zero = 3 and layout.shard above 1"
        yield Problem(field, recipe.offload, rule, "optimizer")
    yet = "is not accounted for with states on the host (recipe.offload)"
    if recipe.of_megatron:
        yield Problem("recipe.framework", recipe.framework, yet, "torch")
    if recipe.compile:
        yield Problem("recipe.compile", True, yet, False)
    if not layout.auto and layout.expert != 1:
        yield Problem("layout.expert", layout.expert, yet, 1)


def _maximal_update(run: Run) -> Iterator[Problem]:
    if run.recipe.mup is not None and run.model.tie_embeddings:
        rule = (
            "needs an untied head: the head's learning rate and initial weights change with the width, the "
            "embedding's do not"
        )
        yield Problem("model.tie_embeddings", True, rule, False)


def _loss(run: Run) -> Iterator[Problem]:
    recipe = run.recipe
    tokens = run.device_batch * recipe.seq_len
    chunks = recipe.loss.chunks
    if chunks is not None and tokens % chunks:
        rule = f"must divide the {tokens} tokens of a micro-batch"
        yield Problem("recipe.loss.chunks", chunks, rule, _divisor_near(tokens, chunks))


def _divisor_near(whole: int, wanted: int) -> int:
    """The divisor of ``whole`` nearest to ``wanted``, the smaller of two equally near; sought from there outwards."""
    for distance in range(wanted):
        for candidate in (wanted - distance, wanted + distance):
            if whole % candidate == 0:
                return candidate
    return 1


def _tiles(run: Run) -> Iterator[Problem]:
    """Sizes that no 8-bit matmul accepts."""
    spec, recipe = run.model, run.recipe
    if recipe.precision.float8 is None:
        return
    rule = f"8-bit matmuls need multiples of {TILE}"
    widths = {"d_model": spec.d_model, "feed_forward.d_ff": spec.feed_forward.d_ff}
    if spec.latent is not None:
        widths |= {"attention.q_rank": spec.latent.q_rank or 0, "attention.kv_rank": spec.latent.kv_rank}
    for field, size in widths.items():
        if size % TILE:
            yield Problem(f"model.{field}", size, rule, _tiled(size))
    for field, heads in (("n_heads", spec.attention.n_heads), ("n_kv_heads", spec.kv_heads)):
        if heads * spec.head_size % TILE:
            found = f"{rule}, and {field} x head_dim is {heads * spec.head_size}"
            yield Problem("model.attention.head_dim", spec.head_size, found, _tiled(spec.head_size))
            break
    tokens = run.device_batch * recipe.seq_len
    if tokens % TILE:
        found = f"{rule}, and a micro-batch has {tokens} tokens"
        step = TILE // gcd(run.device_batch, TILE)
        yield Problem("recipe.seq_len", recipe.seq_len, found, max(step, recipe.seq_len // step * step))


def _tiled(size: int) -> int:
    return round_up(size, TILE)


def _experts(run: Run) -> Iterator[Problem]:
    """Contradictions between the recipe's choices for experts and multi-token prediction, the model and each other."""
    spec, recipe = run.model, run.recipe
    if spec.experts is None:
        if recipe.expert_dispatch.kind != "dropless":
            yield Problem("recipe.expert_dispatch", recipe.expert_dispatch.kind, "the model has no experts", "dropless")
        if recipe.load_balance_loss:
            yield Problem("recipe.load_balance_loss", recipe.load_balance_loss, "the model has no experts", 0)
    elif spec.experts.imbalance != 1 and recipe.expert_dispatch.kind == "capacity":
        rule = "experts with a capacity have as many places on every rank"
        yield Problem("model.feed_forward.imbalance", spec.experts.imbalance, rule, 1)
    if recipe.expert_dispatch.factor is not None and recipe.expert_dispatch.kind != "capacity":
        rule = f"{recipe.expert_dispatch.kind} experts process all tokens sent to them"
        yield Problem("recipe.expert_dispatch.factor", recipe.expert_dispatch.factor, rule, "none")
    if spec.n_mtp_layers and recipe.seq_len < spec.least_seq_len:
        rule = f"must be at least n_mtp_layers + 2, so that the last of {spec.n_mtp_layers} modules has a token"
        yield Problem("recipe.seq_len", recipe.seq_len, rule, spec.least_seq_len)
    for axis in ("tensor", "context"):
        ranks = getattr(run.layout, axis)
        if spec.n_mtp_layers and isinstance(ranks, int) and ranks > 1 and not (axis == "tensor" and recipe.of_megatron):
            rule = "multi-token prediction modules (model.n_mtp_layers) are not accounted for over such ranks"
            yield Problem(f"layout.{axis}", ranks, rule, 1)
    if spec.n_mtp_layers and run.layout.pipeline > 1 and (spec.positions.kind == "learned" or spec.embedding_norm):
        rule = (
            "multi-token prediction modules (model.n_mtp_layers) are not accounted for on a last stage that has "
            "learned positions or a norm after the embedding"
        )
        yield Problem("layout.pipeline", run.layout.pipeline, rule, 1)


def _preferences(run: Run) -> Iterator[Problem]:
    """Contradictions between an objective with pairs or a second model, and the model, recipe and layout of a run."""
    recipe, layout, rows = run.recipe, run.layout, run.device_batch
    yield from _scores(run)
    yield from _teacher(run)
    if recipe.objective.kind == "next-token":
        return
    if isinstance(rows, int) and recipe.objective.answers and rows % recipe.objective.answers:
        field = "micro_batch" if recipe.micro_batch is not None else "global_batch"
        rule = f"a micro-batch of {rows} is not of pairs, a chosen and a rejected sequence each (recipe.objective)"
        yield Problem(f"recipe.{field}", getattr(recipe, field), rule, getattr(recipe, field) + layout.data_ranks)
    what = "preferences" if recipe.objective.answers else "distillation"
    yet, precision = f"is not accounted for with {what} (recipe.objective)", recipe.precision
    losses = ("full",) if recipe.objective.kind in ("reward", "distillation") else ("full", "chunked")
    axes = () if layout.auto else ("tensor", "context", "pipeline", "expert")
    spread = f"{yet}, which layout.replicate and layout.shard spread"
    refused = (
        ("recipe.framework", recipe.framework != "torch" and recipe.framework, yet, "torch"),
        ("recipe.loss", recipe.loss.kind not in losses and recipe.loss.kind, yet, losses[-1]),
        ("recipe.precision", precision.float8 and precision.kind, yet, "bf16-mixed"),
        ("recipe.compile", recipe.compile, yet, False),
        ("recipe.documents", recipe.documents, yet, "none"),
        ("recipe.dropout", recipe.dropout, yet, 0),
        ("recipe.attention_dropout", recipe.attention_dropout, yet, 0),
        ("recipe.load_balance_loss", recipe.load_balance_loss, yet, 0),
        ("model.n_mtp_layers", run.model.n_mtp_layers, yet, 0),
        *((f"layout.{axis}", getattr(layout, axis) != 1 and getattr(layout, axis), spread, 1) for axis in axes),
    )
    yield from (Problem(*refusal) for refusal in refused if refusal[1])


def _teacher(run: Run) -> Iterator[Problem]:
    """What a teacher must be beside its student, and as a model of a run."""
    spec, objective, beside = run.teacher, run.recipe.objective, run.reference
    distils = objective.kind == "distillation"
    if spec is None:
        if distils:
            rule = "is missing: the frozen model whose logits are learned, by a name of the catalog or its fields"
            yield Problem("teacher", None, rule, "teacher.preset=NAME")
        return
    if not distils or beside is None:
        yield Problem("recipe.objective", objective.kind, "has no teacher, and [teacher] names one", "distillation")
        return
    if spec.head_rows != run.model.head_rows:
        rule = f"must be that of the student, with whose {run.model.head_rows:,} logits of a token its own are compared"
        more = spec.head_rows - run.model.head_rows
        alike = 0 < more < run.model.head_rows // 100  # one tokenizer, and rows that pad it
        nearest = f"model.vocab_size = {spec.vocab_size}" if alike else "a teacher with the student's tokenizer"
        yield Problem("teacher.vocab_size", spec.vocab_size, rule, nearest)
    known = {str(problem) for problem in run_problems(replace(run, teacher=None, recipe=_next_token(run.recipe)))}
    for problem in run_problems(replace(beside, teacher=None, recipe=_next_token(beside.recipe))):
        if str(problem) not in known:
            section, _, field = problem.field.partition(".")
            of_teacher = section == "model" or field == "seq_len"
            rule = problem.rule.replace("model.", "teacher.") + ("" if of_teacher else " (of the teacher)")
            yield replace(problem, field=f"teacher.{field}" if section == "model" else problem.field, rule=rule)


def _next_token(recipe: Recipe) -> Recipe:
    return replace(recipe, objective=NextToken())


def _scores(run: Run) -> Iterator[Problem]:
    """A reward model has a score in place of logits, and no other model has."""
    spec, lora, rewards = run.model, run.recipe.lora, run.recipe.objective.kind == "reward"
    if rewards != spec.scores:
        rule = "is of a reward model: recipe.objective = reward, and model.scores = true"
        yield Problem("model.scores", spec.scores, rule, rewards)
    if not spec.scores:
        return
    for field, usual in OF_LOGITS.items():
        if getattr(spec, field) != usual:
            rule = "is of logits, and model.scores has one score"
            yield Problem(f"model.{field}", getattr(spec, field), rule, "none" if usual is None else usual)
    if lora is not None and "lm_head" not in (lora.whole or ()):
        rule = "must have lm_head: scores (recipe.objective = reward) have a new matrix, which is trained"
        yield Problem("recipe.lora.whole", list(lora.whole or ()) or None, rule, [*(lora.whole or ()), "lm_head"])


def recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    """Every contradiction between the fields of a recipe."""
    if (recipe.tokens is None) == (recipe.steps is None):
        rule = "give either tokens or steps"
        if recipe.steps is not None:
            rule += ", not both (--set recipe.steps= removes one)"
        yield Problem("recipe.tokens", recipe.tokens, rule)
    elif recipe.schedule.warmup_steps > recipe.total_steps:
        rule = f"is longer than the run of {recipe.total_steps} steps"
        yield Problem("recipe.schedule.warmup_steps", recipe.schedule.warmup_steps, rule, recipe.total_steps)
    if recipe.precision.gradient_dtype is not None and not recipe.precision.master_weights:
        rule = "belongs to 16-bit parameters with an fp32 copy: recipe.precision.master_weights = true"
        yield Problem("recipe.precision.gradient_dtype", recipe.precision.gradient_dtype, rule, "none")
    yield from _framework(recipe)
    yield from _launches(recipe)
    yield from _guard(recipe)
    yield from _average(recipe)
    yield from _maximal_update_recipe(recipe)
    yield from _recomputation(recipe)
    yield from adapter_recipe_problems(recipe)


def _launches(recipe: Recipe) -> Iterator[Problem]:
    if recipe.cuda_graphs and recipe.launch_blocking:
        rule = "launches nothing that recipe.launch_blocking could wait for"
        yield Problem("recipe.cuda_graphs", True, rule, False)


def _framework(recipe: Recipe) -> Iterator[Problem]:
    if recipe.loss.kind == "in-place" and recipe.framework != "megatron-core":
        rule = "is a kernel of Transformer Engine, for recipe.framework = megatron-core only"
        yield Problem("recipe.loss", "in-place", rule, "full")
    if recipe.gradient_fusion and (recipe.framework != "megatron-core" or not recipe.precision.gradient_buffers):
        rule = "is Transformer Engine's, for recipe.framework = megatron-core and precision.gradient_dtype = fp32 only"
        yield Problem("recipe.gradient_fusion", True, rule, False)
    if recipe.grouped_experts and recipe.framework != "megatron-core":
        rule = "is Transformer Engine's, for recipe.framework = megatron-core only"
        yield Problem("recipe.grouped_experts", True, rule, False)
    if recipe.of_megatron and recipe.loss.kind in ("chunked", "fused"):
        yield Problem("recipe.loss", recipe.loss.kind, "is not available in Megatron-LM (recipe.framework)", "compiled")
    if recipe.of_xla:
        torchs = {"fused": "chunked", "compiled": "full"}
        if recipe.loss.kind in torchs:
            rule = "is a loss of PyTorch's programs; XLA compiles the step whole (recipe.framework = jax)"
            yield Problem("recipe.loss", recipe.loss.kind, rule, torchs[recipe.loss.kind])
        if recipe.lora is not None:
            rule = "is not accounted for in a step that XLA compiles (recipe.framework = jax)"
            yield Problem("recipe.lora.rank", recipe.lora.rank, rule, "recipe.framework = torch")
    if recipe.of_megatron and recipe.lora is not None:
        rule = "is not accounted for in Megatron-LM (recipe.framework)"
        yield Problem("recipe.lora.rank", recipe.lora.rank, rule, "recipe.framework = torch")


def _guard(recipe: Recipe) -> Iterator[Problem]:
    guard = recipe.guard
    if guard.skips >= guard.window:
        rule = f"must be below recipe.guard.window = {guard.window}, or the limit is never exceeded"
        yield Problem("recipe.guard.skips", guard.skips, rule, guard.window - 1)
    if guard.beyond.kind == "roll-back" and recipe.checkpoints.every is None:
        rule = "needs checkpoints to return to, and recipe.checkpoints.every is absent"
        yield Problem("recipe.guard.beyond", "roll-back", rule, "stop")


def _average(recipe: Recipe) -> Iterator[Problem]:
    if recipe.ema is not None and recipe.precision.updated != "fp32":
        rule = f"would not change in {recipe.precision.updated}, whose rounding is larger than a step of the average"
        yield Problem("recipe.ema", recipe.ema.decay, rule, "none, or recipe.precision.master_weights = true")


def _maximal_update_recipe(recipe: Recipe) -> Iterator[Problem]:
    if recipe.mup is None:
        return
    width, kind = recipe.mup.base_width, recipe.optimizer.kind
    if kind not in STEPS_OF_OWN_SIZE:
        rule = f"scales learning rates for optimizers with normalized steps, and recipe.optimizer is {kind}"
        yield Problem("recipe.mup.base_width", width, rule, "recipe.optimizer = adamw")
    if recipe.lora is not None:
        yield Problem(
            "recipe.mup.base_width", width, "has no rule here for adapters (recipe.lora)", "recipe.mup = none"
        )


def _recomputation(recipe: Recipe) -> Iterator[Problem]:
    again, precision = recipe.activation_checkpointing, recipe.precision
    if again.kind == "from-start" and precision.copies != "none":
        rule = f"recomputation of the blocks before would leave low-precision copies (precision {precision.kind})"
        yield Problem("recipe.activation_checkpointing", again.kind, rule, "full")
    if recipe.loss.kind == "fused" and (precision.copies == "gathered" or precision.loss_scaling):
        rule = f"computes gradients in forward, which precision {precision.kind} scales or gathers afterwards"
        yield Problem("recipe.loss", "fused", rule, "chunked")
    keepable = (*KEEPABLE, *LINEAR) if recipe.of_xla else KEEPABLE
    for field in ("keep", "offload") if isinstance(again, Selective) else ():
        for name in getattr(again, field) or ():
            if name not in keepable:
                rule = f"must be of {', '.join(keepable)}"
                yield Problem(f"recipe.activation_checkpointing.{field}", name, rule, nearest_text(name, keepable))
    if again.offload and not recipe.of_xla:
        rule = "go to host memory in a step that XLA compiles: recipe.framework = jax"
        yield Problem("recipe.activation_checkpointing.offload", list(again.offload), rule, [])
