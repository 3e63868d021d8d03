"""One forward of a served model in closed form: the cost rules of training, with no graph kept, and a key-value cache.

Prefill reads the tokens of a prompt and fills the cache; decode reads one new token of each sequence against it. Of a
layout only tensor parallelism counts here.
"""

from __future__ import annotations

from dataclasses import replace

from trainledger.ledger.core.graph import Array, Leaf, ModelLeaves, component_of
from trainledger.ledger.core.sizes import Sizes, is_one, sizes_of
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.attention import kv_cache
from trainledger.ledger.model.attention_core import masks, masks_of_last
from trainledger.ledger.model.forward import all_angles, buffers_nbytes, embed, head, run_layers
from trainledger.ledger.ops.norms import norm
from trainledger.ledger.optimizers.states import set_formats
from trainledger.ledger.parallel.rank_plan import RankPlan, rank_plan
from trainledger.ledger.parallel.tensor import enter, tensor_group
from trainledger.spec.device import fused_attention
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import windows_of
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import PRECISIONS
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.savings import is_linear
from trainledger.spec.serving import WEIGHT_FORMATS, WHOLE, Serving


@frozen
class WeightBytes:
    """Bytes of a rank's weights: codes and scales of the quantized ones, and what stays whole."""

    codes: Int
    scales: Int
    whole: Int

    @property
    def nbytes(self) -> Int:
        return self.codes + self.scales + self.whole


def serving_rank(run: Run, serving: Serving, *, backend: str = "cpu") -> RankPlan:
    """The tensor rank that serves: the run's served model, under a recipe of forwards only.

    Raises `InvalidInput` where the serving is no choice, or the ranks do not go evenly into the model.
    """
    spec = run.model.served
    recipe = Recipe(
        seq_len=serving.new_tokens,
        global_batch=serving.batch,
        micro_batch=serving.batch,
        steps=1,
        precision=PRECISIONS[serving.compute](),
        attention=_attention(run, backend, serving.compute),
    )
    inner = Run(model=spec, recipe=recipe, layout=Layout(tensor=run.layout.tensor), cluster=run.cluster)
    problems = list(serving.problems())
    if not problems and isinstance(serving.context, int):
        problems = [
            run_problem
            for run_problem in run_problems(inner)
            if run_problem.field.startswith(("layout", "recipe.seq_len"))
        ]
    if problems:
        raise InvalidInput(problems)
    return rank_plan(inner)


def _attention(run: Run, backend: str, compute: str) -> str:
    """Serving kernels of accelerators have windows and all kinds of scores in 16 bits; other attention is unfused."""
    if run.recipe.attention == "math":
        return "math"
    if "flash" in fused_attention(backend) and compute != "fp32":
        return "flash"
    return "math" if run.model.attention.custom_scores else "sdpa"


def account_serving(run: Run, serving: Serving, *, backend: str = "cpu", all_experts: bool = False) -> Ledger:
    """The ledger of one forward of one tensor rank.

    Weights are read in the bytes of their format by the matmul itself, as fused kernels do. Of the experts those are
    read that have a token, counted as the mean over even routes; ``all_experts`` counts every one, as a trace does.
    """
    rank = serving_rank(run, serving, backend=backend)
    spec, precision = rank.run.model, rank.run.recipe.precision
    tape = Tape(precision, backend)
    cached_tokens = serving.context if serving.phase == "decode" else None
    sizes = replace(sizes_of(rank.run, backend), cache=serving.cache, cached_tokens=cached_tokens)
    leaves = rank.owned
    set_formats(leaves, precision)
    weights = weight_bytes(leaves, serving)
    share = 1.0 if all_experts or spec.experts is None else experts_met(spec, sizes.rows)
    for leaf in leaves.every():
        leaf.trained = False
        of_experts = component_of(leaf.path) == "experts" and len(leaf.shape) == 3
        if serving.weights != serving.compute or of_experts:
            codes, scales = _nbytes(leaf, serving)
            nbytes = codes + scales
            leaf.copy = Array(leaf.elements, leaf.dtype, None, nbytes=round(share * nbytes) if of_experts else nbytes)
    ids = Array(sizes.rows, "int64", None)
    _forward(tape, sizes, leaves, ids, rank.run.recipe)
    local = kv_cache(spec, serving.cache)
    resident = (
        ("frozen weights", weights.nbytes),
        ("cache", local.nbytes(serving.batch, serving.context)),
        ("buffers", buffers_nbytes(spec)),
        ("batch", 8 * sizes.rows),
    )
    elements = sum(count * sum(each.elements for each in pattern) for pattern, count in leaves.in_order())
    return tape.ledger(
        resident=tuple((name, nbytes) for name, nbytes in resident if not (isinstance(nbytes, int) and nbytes == 0)),
        parameters=elements,
        tokens=sizes.rows,
        micro_batches=1,
    )


def _forward(tape: Tape, sizes: Sizes, leaves: ModelLeaves, ids: Array, recipe: Recipe) -> None:
    """Token ids to the logits of each sequence's last token."""
    spec = sizes.spec
    x = embed(tape, sizes, leaves, ids)
    angles = all_angles(tape, sizes)
    make = masks if sizes.cached_tokens is None else masks_of_last
    seen = make(tape, sizes, windows_of(spec))
    first = [x]
    del x
    x = run_layers(tape, sizes, leaves, first.pop(), angles, seen, recipe)
    del angles, seen
    x = x.view(sizes.B * spec.d_model)
    if spec.norm_place != "after-add":
        x = norm(tape, sizes, x, leaves.after, "norm", rows=sizes.B)
    if is_one(sizes.layout.tensor):
        head(tape, sizes, leaves, x, sizes.B)
        return
    logits = head(tape, sizes, leaves, enter(tape, sizes, x), sizes.B)
    with tape.at("lm_head"):
        tape.all_gather(tensor_group(sizes), logits, category="logits and loss")


def is_quantized(leaf: Leaf, serving: Serving) -> bool:
    """Whether a parameter has the format of the weights: a matrix of a linear layer of the blocks, or of experts."""
    if serving.weights in WHOLE:
        return False
    if component_of(leaf.path) == "experts":
        return len(leaf.shape) == 3
    return serving.quantized == "linear" and is_linear(leaf.path) and len(leaf.shape) == 2


def _nbytes(leaf: Leaf, serving: Serving) -> tuple[Int, Int]:
    """Bytes of codes and scales of a parameter."""
    name = serving.weights if is_quantized(leaf, serving) or serving.weights in WHOLE else serving.compute
    return WEIGHT_FORMATS[name].nbytes(leaf.shape if len(leaf.shape) > 1 else (1, *leaf.shape))


def weight_bytes(leaves: ModelLeaves, serving: Serving) -> WeightBytes:
    """Bytes of all parameters of the served model."""
    codes: Int = 0
    scales: Int = 0
    whole: Int = 0
    for pattern, count in leaves.in_order():
        for leaf in pattern:
            elements, beside = _nbytes(leaf, serving)
            if is_quantized(leaf, serving):
                codes, scales = codes + count * elements, scales + count * beside
            else:
                whole = whole + count * elements
    return WeightBytes(codes, scales, whole)


def experts_met(spec: ModelSpec, tokens: Int) -> float:
    """The share of a layer's experts that have a token, in the mean over even and independent routes.

    1 - (1 - K / E)^tokens: each token leaves an expert out with probability 1 - K / E.

    >>> from trainledger.answers.load import model
    >>> spec = model("mixtral-8x7b")  # 2 of 8 experts
    >>> experts_met(spec, 1), round(experts_met(spec, 8), 3)
    (0.25, 0.9)
    """
    assert spec.experts is not None
    return float(1 - (1 - spec.experts.per_token / spec.experts.n_experts) ** tokens)


def weights_read(leaves: ModelLeaves, spec: ModelSpec, serving: Serving) -> Int:
    """Bytes of weights that one forward reads: of embeddings the rows of its tokens, of experts those with a token."""
    share = 1.0 if spec.experts is None else experts_met(spec, serving.batch * serving.new_tokens)
    total: Int = 0
    for pattern, count in leaves.in_order():
        for leaf in pattern:
            nbytes = sum(_nbytes(leaf, serving))
            if component_of(leaf.path) == "experts" and len(leaf.shape) == 3:
                nbytes = round(share * nbytes)
            elif component_of(leaf.path) in ("embedding", "positions"):
                rows = serving.batch * serving.new_tokens
                if component_of(leaf.path) == "positions":
                    rows = serving.new_tokens
                read = rows * (nbytes // leaf.shape[0])
                nbytes = read + (nbytes if leaf is leaves.head else 0)
            total = total + count * nbytes
    return total
