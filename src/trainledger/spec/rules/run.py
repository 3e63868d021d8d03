"""What the parts of a run must obey together, each rule with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from trainledger.spec.layout import AXES
from trainledger.spec.lora import ATTENTION, MLP, is_target
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import TILE
from trainledger.spec.problem import Problem
from trainledger.spec.rules.data import data_problems
from trainledger.spec.rules.documents import document_problems
from trainledger.spec.rules.layout import layout_problems
from trainledger.spec.rules.model import model_problems
from trainledger.spec.rules.recipe import recipe_problems
from trainledger.spec.run import Run
from trainledger.spec.units import round_up


def run_problems(run: Run) -> Iterator[Problem]:
    """Every contradiction between the fields of a run."""
    yield from model_problems(run.model)
    yield from recipe_problems(run.recipe)
    yield from data_problems(run.data)
    yield from layout_problems(run)
    yield from document_problems(run)
    yield from _adapters(run)
    yield from _loss(run)
    yield from _maximal_update(run)
    yield from _tiles(run)
    yield from _experts(run)
    if run.recipe.seq_len > run.model.max_seq_len:
        rule = f"is longer than model.max_seq_len = {run.model.max_seq_len}"
        yield Problem("recipe.seq_len", run.recipe.seq_len, rule, run.model.max_seq_len)


def memory_problems(run: Run) -> Iterator[Problem]:
    """What is wrong with a run as far as its memory and its layout go."""
    yield from layout_problems(run)
    yield from document_problems(run)
    yield from _adapters(run)
    yield from _loss(run)
    yield from _experts(run)


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
        for each in (wanted - distance, wanted + distance):
            if whole % each == 0:
                return each
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
    if recipe.expert_dispatch.factor is not None and recipe.expert_dispatch.kind != "capacity":
        rule = f"{recipe.expert_dispatch.kind} experts process all tokens sent to them"
        yield Problem("recipe.expert_dispatch.factor", recipe.expert_dispatch.factor, rule, "none")
    if spec.n_mtp_layers and recipe.seq_len < spec.least_seq_len:
        rule = f"must be at least n_mtp_layers + 2, so that the last of {spec.n_mtp_layers} modules has a token"
        yield Problem("recipe.seq_len", recipe.seq_len, rule, spec.least_seq_len)
    for axis in ("tensor", "context"):
        ranks = getattr(run.layout, axis)
        if spec.n_mtp_layers and isinstance(ranks, int) and ranks > 1:
            rule = "multi-token prediction modules (model.n_mtp_layers) are not accounted for over such ranks"
            yield Problem(f"layout.{axis}", ranks, rule, 1)
    if spec.n_mtp_layers and run.layout.pipeline > 1 and (spec.positions.kind == "learned" or spec.embedding_norm):
        rule = (
            "multi-token prediction modules (model.n_mtp_layers) are not accounted for on a last stage that has "
            "learned positions or a norm after the embedding"
        )
        yield Problem("layout.pipeline", run.layout.pipeline, rule, 1)


def _adapters(run: Run) -> Iterator[Problem]:
    """Contradictions between adapters and the model and layout of a run."""
    lora, spec = run.recipe.lora, run.model
    if lora is None:
        return
    if spec.experts is not None:
        rule = "there are no adapters for experts (model.feed_forward): train all weights with recipe.lora = none"
        yield Problem("recipe.lora.rank", lora.rank, rule)
    elif not any(is_target(each, lora.targets) for each in _linear_layers(spec)):
        rule = f"names no linear layer of this model: {', '.join(each.split('.')[1] for each in _linear_layers(spec))}"
        yield Problem("recipe.lora.targets", list(lora.targets), rule, "linear")
    if spec.n_mtp_layers:
        rule = "there are no adapters for modules of multi-token prediction: train all weights with recipe.lora = none"
        yield Problem("recipe.lora.rank", lora.rank, rule)
    if any(getattr(run.layout, each) != 1 for each in AXES):
        rule = "is accounted for on one device only: leave [layout] out, or train all weights with recipe.lora = none"
        yield Problem("recipe.lora.rank", lora.rank, rule)


def _linear_layers(spec: ModelSpec) -> list[str]:
    """The weights of a block's linear layers by name."""
    attend: tuple[str, ...] = ATTENTION[:4]
    if spec.latent is not None:
        queries = ("q_proj",) if spec.latent.q_rank is None else ("q_a_proj", "q_b_proj")
        attend = (*queries, *ATTENTION[-2:], "o_proj")
    feed = MLP if spec.feed_forward.gated else MLP[1:]
    return [f"self_attn.{each}.weight" for each in attend] + [f"mlp.{each}.weight" for each in feed]
