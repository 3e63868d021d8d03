"""The experts of a token with their weights, the tokens' way there and back, and matmuls of many experts at once.

Sizes do not depend on the routes. Shapes: B sequences, T tokens, N = B T tokens, D d_model, E experts, K experts of a
token, G groups of experts, R = K N routes (all first choices, then all second choices ...), C places of an expert, S
places of all experts. Of matmuls: R rows sorted by expert, C rows of one expert, D width in, M width out; ``ends_E``
holds, for each expert, how many rows it and those before it have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from trainledger.engine.nn.norm import norm_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.units import ceil_div

TINY = 1e-20  # keeps scores that all underflow from dividing by zero


@dataclass(frozen=True)
class Routes:
    """The experts of each token, best first, the weights of their outputs, and the scores behind the choice."""

    chosen_NK: Tensor
    weights_NK: Tensor
    scores_NE: Tensor


class Router(nn.Linear):
    """A linear score of each expert in fp32, and the choice of the best.

    ``softmax`` scores over all experts (Shazeer et al. 2017; Jiang et al. 2024, Mixtral), ``sigmoid`` scores each
    alone (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2), ``softmax-of-chosen`` chooses by logits and then takes
    the softmax of what was chosen (OpenAI 2025, gpt-oss). ``correction`` is added to the scores for the choice
    only and is no parameter: nothing here changes it.
    """

    correction: Tensor | None

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.experts is not None
        super().__init__(spec.d_model, spec.experts.n_experts, bias=spec.experts.router.bias)
        self.experts, self.choice = spec.experts, spec.experts.router
        self.register_buffer("correction", torch.zeros(self.experts.n_experts) if self.choice.correction else None)
        self.norm = norm_of(spec) if self.experts.own_norms else None
        self.expert_scale = nn.Parameter(torch.ones(self.experts.n_experts)) if self.experts.own_norms else None

    def route(self, x_BTD: Tensor) -> Routes:
        """The routes of tokens [B, T, D], taken as N = B T in a row."""
        logits_NE = self(x_BTD if self.norm is None else self.norm(x_BTD)).flatten(0, 1)
        logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        if self.norm is not None:
            logits_NE = logits_NE * self.in_features**-0.5
        match self.choice.scores:
            case "softmax":
                scores_NE = logits_NE.softmax(-1)
            case "sigmoid":
                scores_NE = logits_NE.sigmoid()
            case _:
                scores_NE = logits_NE
        best_NE = scores_NE.detach() if self.correction is None else scores_NE.detach() + self.correction
        if self.choice.top_groups < self.choice.groups:
            best_NE = best_groups(best_NE, self.choice.groups, self.choice.top_groups, self.of_best)
        chosen_NK = best_NE.topk(self.experts.per_token, dim=-1).indices
        del best_NE  # its memory is free before the weights are made, as the account has it
        weights_NK = scores_NE.gather(1, chosen_NK)
        if self.choice.scores == "softmax-of-chosen":
            weights_NK = weights_NK.softmax(-1)
        elif self.choice.normalize:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + TINY)
        if self.choice.scale != 1:
            weights_NK = weights_NK * self.choice.scale
        if self.expert_scale is not None:
            weights_NK = weights_NK * F.embedding(chosen_NK, self.expert_scale[:, None]).squeeze(-1)
        return Routes(chosen_NK, weights_NK, scores_NE)

    @property
    def of_best(self) -> int:
        """A group is as good as this many of its best together: DeepSeek-V3 takes two, DeepSeek-V2 one."""
        return min(2 if self.choice.scores == "sigmoid" else 1, self.experts.n_experts // self.choice.groups)


def best_groups(scores_NE: Tensor, groups: int, top: int, of_best: int) -> Tensor:
    """The scores with all but the ``top`` best groups at minus infinity (DeepSeek-V2, section 2.2.2)."""
    scores_NGJ = scores_NE.view(scores_NE.shape[0], groups, -1)
    if of_best == 1:
        best_NG = scores_NGJ.amax(-1)
    else:
        best_NG = scores_NGJ.topk(of_best, dim=-1).values.sum(-1)
    shut_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter_(1, best_NG.topk(top, dim=-1).indices, False)
    return scores_NGJ.masked_fill(shut_NG[..., None], float("-inf")).flatten(-2)


def balance_loss(routes: Routes, share_E: Tensor, spec: ModelSpec) -> Tensor:
    """E times the sum over experts of their share of the routes and their mean probability, 1 where all are equal.

    Fedus et al. 2021, Switch Transformers, equations 4 to 6; of sigmoid scores the probability is the score over
    the sum of all (DeepSeek-V3, equations 17 to 20). Of the softmax of the chosen it is the softmax over all.
    """
    assert spec.experts is not None
    probabilities_NE = routes.scores_NE
    if spec.experts.router.scores == "sigmoid":
        probabilities_NE = probabilities_NE / (probabilities_NE.sum(-1, keepdim=True) + TINY)
    elif spec.experts.router.scores == "softmax-of-chosen":
        probabilities_NE = probabilities_NE.softmax(-1)
    return (probabilities_NE.mean(0) * share_E).sum() * spec.experts.n_experts


@dataclass(frozen=True)
class Dispatch:
    """Who is where: ``route_S`` is the route in each place, ``place_R`` the place of each route.

    Without a capacity S = R and both are permutations; ``expert_S`` is the expert of each place. With one, some
    places are ``empty_S`` and some routes ``dropped_R``; what the maps say of these is not to be used.
    ``starts_E`` and ``ends_E`` are the first and end routes of each expert in the order of experts.
    """

    route_S: Tensor
    place_R: Tensor
    starts_E: Tensor
    ends_E: Tensor
    expert_S: Tensor | None = None
    empty_S: Tensor | None = None
    dropped_R: Tensor | None = None


def capacity(n_tokens: int, per_token: int, n_experts: int, factor: Fraction) -> int:
    """Places of each expert: its even share of the routes times ``factor``, rounded up (Switch, equation 3).

    >>> capacity(10, 2, 4, Fraction("1.1"))
    6
    """
    return ceil_div(n_tokens * per_token * factor.numerator, n_experts * factor.denominator)


def dispatch(chosen_NK: Tensor, n_experts: int, places: int | None) -> Dispatch:
    """Where the routes go; ``places`` of each expert, or None for as many as it is sent.

    Of an expert's routes the first choices come first, and within them earlier tokens (Lepikhin et al. 2020, GShard).
    """
    expert_R, route_R = chosen_NK.t().flatten().sort(stable=True)
    place_R = route_R.argsort()
    experts_E = torch.arange(n_experts, device=chosen_NK.device)
    starts_E = torch.searchsorted(expert_R, experts_E)
    ends_E = torch.searchsorted(expert_R, experts_E, right=True)
    if places is None:
        return Dispatch(route_R, place_R, starts_E, ends_E, expert_S=expert_R)
    n_routes = expert_R.shape[0]
    behind_R = torch.arange(n_routes, device=chosen_NK.device) - starts_E.index_select(0, expert_R)
    kept_R = expert_R * places + behind_R.clamp(max=places - 1)
    route_EC = starts_E[:, None] + torch.arange(places, device=chosen_NK.device)
    return Dispatch(
        route_R.index_select(0, route_EC.clamp(max=n_routes - 1).flatten()),
        kept_R.index_select(0, place_R),
        starts_E,
        ends_E,
        empty_S=(route_EC >= ends_E[:, None]).flatten(),
        dropped_R=(behind_R >= places).index_select(0, place_R),
    )


def to_experts(x_ND: Tensor, where: Dispatch) -> Tensor:
    """The token of each place, [S, D]; zeros in empty places."""
    n_tokens = x_ND.shape[0]
    copies = where.place_R.shape[0] // n_tokens
    moved: Tensor = Moved.apply(  # type: ignore[no-untyped-call]
        x_ND, where.route_S % n_tokens, where.empty_S, where.place_R, where.dropped_R, copies
    )
    return moved


def from_experts(y_SD: Tensor, where: Dispatch) -> Tensor:
    """What the experts made of each route, [R, D]; zeros for dropped ones."""
    moved: Tensor = Moved.apply(  # type: ignore[no-untyped-call]
        y_SD, where.place_R, where.dropped_R, where.route_S, where.empty_S, 1
    )
    return moved


class Moved(Function):
    """Rows by an index, zero where ``blank``; backward by the index the other way.

    As autograd knows nothing of the other way it would add row by row, on a GPU in its own order. Each row
    of x is read ``copies`` times: its gradients come one whole set after the other and are summed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, blank: Tensor | None, back: Tensor, blank_back: Tensor | None, copies: int
    ) -> Tensor:
        ctx.save_for_backward(back, blank_back)
        ctx.copies = copies
        return _rows(x, index, blank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back, blank_back = ctx.saved_tensors
        g = _rows(gradients[0], back, blank_back)
        if ctx.copies > 1:
            g = g.view(ctx.copies, -1, g.shape[-1]).sum(0)
        return g, None, None, None, None, None


def _rows(x: Tensor, index: Tensor, blank: Tensor | None) -> Tensor:
    rows = x.index_select(0, index)
    return rows if blank is None else rows.masked_fill_(blank[:, None], 0)


# Matmuls of many experts at once, as operations that a trace sees whole and knows the FLOPs of. torch's own grouped
# matmul takes few formats and sizes (rows of whole 16 bytes; traced, only bf16), so these surround it: each runs it
# where it can and else loops over the experts, with the same FLOPs. Output shapes never depend on the data.


@torch.library.custom_op("trainledger::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows of a times its matrix: [R, D] @ [E, D, M] -> [R, M].

    With a [M, R] and b [R, D] the rows are what is summed over: one [M, D] of each expert's rows, [E, M, D].
    """
    # torch's grouped kernel runs bf16 on CUDA, with one dim of stride 1 and the others of whole 16 bytes.
    if a.is_cuda and a.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and _aligned(a) and _aligned(b):
        return F.grouped_mm(a, b, offs=ends_E.to(torch.int32))
    out = a.new_empty(_grouped_shape(a, b, ends_E))
    for expert, (first, end) in enumerate(_ranges(ends_E)):
        if b.dim() == 3:
            torch.mm(a[first:end], b[expert], out=out[first:end])
        else:
            torch.mm(a[:, first:end], b[first:end], out=out[expert])
    return out


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    return a.new_empty(_grouped_shape(a, b, ends_E))


@torch.library.custom_op("trainledger::group_sums", mutates_args=())
def group_sums(x_RM: Tensor, ends_E: Tensor) -> Tensor:
    """The sum of each expert's rows, [E, M]."""
    sums_EM = x_RM.new_empty(ends_E.shape[0], x_RM.shape[1])
    for expert, (first, end) in enumerate(_ranges(ends_E)):
        torch.sum(x_RM[first:end], 0, out=sums_EM[expert])
    return sums_EM


@group_sums.register_fake
def _(x_RM: Tensor, ends_E: Tensor) -> Tensor:
    return x_RM.new_empty(ends_E.shape[0], x_RM.shape[1])


@torch.library.custom_op("trainledger::padded_mm", mutates_args=())
def padded_mm(a: Tensor, b: Tensor, routed: int, places: int) -> Tensor:
    """[E, m, k] @ [E, k, n]; of the experts' ``places`` rows in all, at most ``routed`` hold a token."""
    return torch.bmm(a, b)


@padded_mm.register_fake
def _(a: Tensor, b: Tensor, routed: int, places: int) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


class GroupedLinear(Function):
    """x W^T + b with the weight and bias of each row's expert; ``expert_R`` is which, ascending."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_EMD: Tensor, b_EM: Tensor | None, expert_R: Tensor, ends_E: Tensor) -> Tensor:
        y_RM: Tensor = grouped_mm(x_RD, w_EMD.transpose(1, 2), ends_E)
        if b_EM is not None:
            y_RM += b_EM.index_select(0, expert_R)
        _save(ctx, x_RD, w_EMD, ends_E)
        return y_RM

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, w_EMD, ends_E = ctx.saved_tensors
        (g_RM,) = gradients
        x_wanted, w_wanted, b_wanted = ctx.needs_input_grad[:3]
        return (
            grouped_mm(g_RM, w_EMD, ends_E) if x_wanted else None,
            grouped_mm(g_RM.t(), x_RD, ends_E) if w_wanted else None,
            group_sums(g_RM, ends_E) if b_wanted else None,
            None,
            None,
        )


class PaddedLinear(Function):
    """x W^T + b of each expert's C places; ``routed`` as in `padded_mm`."""

    @staticmethod
    def forward(ctx: Any, x_ECD: Tensor, w_EMD: Tensor, b_EM: Tensor | None, routed: int) -> Tensor:
        ctx.routed, ctx.places = routed, x_ECD.shape[0] * x_ECD.shape[1]
        y_ECM: Tensor = padded_mm(x_ECD, w_EMD.transpose(1, 2), routed, ctx.places)
        if b_EM is not None:
            y_ECM += b_EM[:, None]
        _save(ctx, x_ECD, w_EMD)
        return y_ECM

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ECD, w_EMD = ctx.saved_tensors
        (g_ECM,) = gradients
        x_wanted, w_wanted, b_wanted = ctx.needs_input_grad[:3]
        return (
            padded_mm(g_ECM, w_EMD, ctx.routed, ctx.places) if x_wanted else None,
            padded_mm(g_ECM.transpose(1, 2), x_ECD, ctx.routed, ctx.places) if w_wanted else None,
            g_ECM.sum(1) if b_wanted else None,
            None,
        )


def _save(ctx: Any, x: Tensor, w: Tensor, *others: Tensor) -> None:
    """Save what the wanted gradients need: that of the weights the input, that of the input the weights."""
    x_wanted, w_wanted = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if w_wanted else None, w if x_wanted else None, *others)


def _grouped_shape(a: Tensor, b: Tensor, ends_E: Tensor) -> tuple[int, ...]:
    if b.dim() == 3:
        return a.shape[0], b.shape[2]
    return ends_E.shape[0], a.shape[0], b.shape[1]


def _ranges(ends_E: Tensor) -> Iterator[tuple[int, int]]:
    """First and end row of each expert; waits for the device."""
    first = 0
    for end in ends_E.tolist():
        yield first, end
        first = end


def _aligned(x: Tensor) -> bool:
    """Whether a kernel that loads 16 bytes at a time may read x."""
    step = 16 // x.element_size()
    return 1 in x.stride()[-2:] and x.data_ptr() % 16 == 0 and sum(each % step != 0 for each in x.stride()) == 1
