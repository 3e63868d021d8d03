"""What of a run the engine does not train on several ranks yet, or not at all, each with a nearest value that works."""

from __future__ import annotations

from trainledger.engine.train.parallel.pipeline import layers_of_stages
from trainledger.spec.problem import refuse_given
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

_OF_OTHER_SHAPES = ("adafactor", "adam-8bit", "adamw-8bit")  # whose states are not divided as weights are
_FUSED_OF_PARTS = ("adamw", "adam", "muon")  # whose fused kernel takes parts of parameters (DTensors)
_BY_HEADS = "layout.context_kind = 'all-to-all' takes"
# torch draws a mask from the generator of its process: parts of one tensor would get masks of their own, and a resume
# on another layout would draw others.
_ZERO_BUBBLE = "layout.schedule = 'zero-bubble'"


def refuse_on_ranks(run: Run) -> None:
    """Raise `InvalidInput` for what of a run the engine does not train in its layout."""
    recipe, layout = run.recipe, run.layout
    alone = "is trained in one process only so far"
    divided, tensor = layout.shard_ranks > 1 or layout.tensor > 1, layout.tensor > 1
    precision, optimizer, dropout = recipe.precision, recipe.optimizer.kind, recipe.dropout or recipe.attention_dropout
    fused = optimizer not in _FUSED_OF_PARTS and recipe.optimizer.implementation == "fused"
    of_whole = "is a kernel that PyTorch has for whole parameters of this optimizer"
    of_matrices = "would take parts of tensor ranks for matrices"
    not_alike = "would not be the same on all tensor ranks"
    of_parts = "is not taken of logits of which each tensor rank has a part"
    rules = (
        ("recipe.precision", precision.loss_scaling and precision.kind, alone, "bf16-mixed"),
        ("recipe.precision", divided and precision.master and precision.kind, alone, "bf16-sharded"),
        ("recipe.optimizer", divided and optimizer in _OF_OTHER_SHAPES and optimizer, alone, "adamw"),
        ("recipe.optimizer.implementation", divided and fused and "fused", of_whole, "foreach"),
        ("recipe.optimizer", tensor and optimizer == "muon" and "muon", of_matrices, "adamw"),
        ("recipe.dropout", tensor and dropout, not_alike, 0),
        ("recipe.loss", tensor and recipe.loss.kind != "full" and recipe.loss.kind, of_parts, "full"),
    )
    refuse_given(rules)
    if layout.pipeline > 1:
        refuse_pipeline(run)
    if layout.context > 1:
        refuse_context(run)
    refuse_experts(run)


def refuse_offload(recipe: Recipe, device: str) -> None:
    """Raise `InvalidInput` for model states on the host of an accelerator, whose norms need collectives of the CPU."""
    rule = "is accounted for, and run only where the device is a CPU, whose memory is the host's"
    refuse_given((("recipe.offload", device != "cpu" and recipe.offload, rule, "none"),))


def refuse_pipeline(run: Run) -> None:
    """Raise `InvalidInput` for what of a run no pipeline of the engine trains."""
    layout, recipe, model = run.layout, run.recipe, run.model
    alone = "is trained without a pipeline only so far"
    batches, stages, schedule, loss = run.grad_accum, layout.pipeline, layout.schedule, recipe.loss.kind
    sizes = [len(layers) for layers in layers_of_stages(layout, model.n_layers)]
    rounds = max(1, batches // stages)
    bubble, again = schedule == "zero-bubble", recipe.activation_checkpointing.kind != "none"
    dropout, precision = recipe.dropout or recipe.attention_dropout, recipe.precision
    copies = precision.copies == "gathered" and layout.shard_ranks == 1
    one_matrix = "would be one matrix on two stages of a pipeline"
    other_numbers = "would not be that of one process on several stages of a pipeline"
    compiled = f"does not divide a compiled backward as {_ZERO_BUBBLE} needs it"
    one_backward = f"has one backward, which {_ZERO_BUBBLE} runs in two parts"
    no_layer = "leaves a stage in the middle without a layer"
    accounted = "is accounted for, but not applied to a model yet"
    once = "is accounted for in a pipeline, but torch's schedules gather once for a step"
    few = f"takes at least as many micro-batches as stages, {stages}, and a rank has {batches}"
    twice = "runs a checkpointed block again for each group of its weights"
    uneven = f"takes micro-batches in {rounds} equal rounds, and a rank has {batches}"
    rules = (
        ("model.tie_embeddings", model.tie_embeddings, one_matrix, False),
        ("model.n_mtp_layers", model.n_mtp_layers, alone, 0),
        ("recipe.dropout", dropout, other_numbers, 0),
        ("recipe.precision", copies and precision.kind, f"{alone}, or with layout.shard above 1", "bf16-mixed"),
        ("recipe.compile", recipe.compile and bubble, compiled, False),
        ("recipe.loss", bubble and loss == "fused" and "fused", one_backward, "chunked"),
        ("layout.stage_layers", 0 in sizes[1:-1] and sizes, no_layer, None),
        ("layout.split_sends", layout.split_sends, accounted, False),
        ("layout.reshard_after_forward", layout.shard_ranks > 1 and layout.reshards, once, False),
        ("layout.schedule", schedule == "1f1b" and batches < stages and schedule, few, "gpipe"),
        ("layout.schedule", bubble and again and schedule, twice, "1f1b"),
        ("layout.schedule", bubble and batches % rounds and schedule, uneven, "1f1b"),
    )
    refuse_given(rules)


def refuse_context(run: Run) -> None:
    """Raise `InvalidInput` for what of a run no context ranks of the engine train."""
    recipe, model, ring = run.recipe, run.model, run.layout.context_kind == "ring"
    yet = "is not trained on context ranks yet"
    again, positions = recipe.activation_checkpointing.kind, model.positions.kind
    learned, latent = ring and positions == "learned", ring and model.latent is not None
    in_a_row = f"are rows in a row, and each rank of a ring has an early and a late part; {_BY_HEADS} them"
    two_widths = f"has keys and values of two widths, which do not go round; {_BY_HEADS} them"
    written_over = f"would keep what a ring writes over; {_BY_HEADS} it"
    alike = "would be the same on all context ranks"
    rules = (
        ("model.n_mtp_layers", model.n_mtp_layers, f"{yet}: a module reads tokens of another rank", 0),
        ("model.positions", positions == "alibi" and "alibi", yet, "rope"),
        ("model.positions", learned and "learned", in_a_row, "rope"),
        ("model.attention.window", model.attention.window, yet, "none"),
        ("model.attention", latent and model.attention.kind, two_widths, "multi-head"),
        ("recipe.attention", ring and recipe.attention == "cudnn" and "cudnn", "has no parts that are joined", "sdpa"),
        ("recipe.activation_checkpointing", again in ("attention", "offload") and again, yet, "full"),
        ("recipe.activation_checkpointing", ring and again == "selective" and again, written_over, "full"),
        ("recipe.dropout", recipe.dropout or recipe.attention_dropout, alike, 0),
        ("recipe.compile", recipe.compile, yet, False),
    )
    refuse_given(rules)


def refuse_experts(run: Run) -> None:
    """Raise `InvalidInput` for what of a run several ranks do not train yet with experts."""
    layout, recipe = run.layout, run.recipe
    yet = "is not trained with layout.expert above 1 yet"
    spread, again, precision = layout.expert > 1, recipe.activation_checkpointing.kind, recipe.precision
    factor = run.model.experts is not None and layout.context > 1 and recipe.expert_dispatch.factor
    of_all = "counts places over all tokens of a sequence, and context ranks see their own"
    kernels = "needs kernels that copy tokens inside of a node (DeepEP), which PyTorch has not"
    send = layout.expert_send
    rules = (
        ("recipe.expert_dispatch", factor, of_all, "dropless"),
        ("layout.expert_send", spread and send != "copies" and send, kernels, "copies"),
        ("layout.zero", spread and layout.zero < 3 and layout.zero, yet, 3),
        ("recipe.precision", spread and precision.float8 is not None and precision.kind, yet, "bf16-mixed"),
        ("recipe.activation_checkpointing", spread and again == "selective" and again, yet, "full"),
        ("recipe.compile", spread and recipe.compile, yet, False),
    )
    refuse_given(rules)
