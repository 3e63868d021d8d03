"""Which experts a token goes to, with which weights, and the tokens' way to the experts and back.

Sizes do not depend on the routes. Shapes: B sequences, T tokens, N = B T tokens, D d_model, E experts, K experts of a
token, G groups of experts, R = K N routes (all first choices, then all second choices ...), C places of an expert, S
places of all experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

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

    def route(self, x_BTD: Tensor) -> Routes:
        """The routes of tokens [B, T, D], taken as N = B T in a row."""
        logits_NE = self(x_BTD).flatten(0, 1)
        logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        match self.choice.scores:
            case "softmax":
                scores_NE = logits_NE.softmax(-1)
            case "sigmoid":
                scores_NE = logits_NE.sigmoid()
            case _:
                scores_NE = logits_NE
        chosen_NK = self._choose(scores_NE.detach())
        weights_NK = scores_NE.gather(1, chosen_NK)
        if self.choice.scores == "softmax-of-chosen":
            weights_NK = weights_NK.softmax(-1)
        elif self.choice.normalize:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + TINY)
        if self.choice.scale != 1:
            weights_NK = weights_NK * self.choice.scale
        return Routes(chosen_NK, weights_NK, scores_NE)

    def _choose(self, scores_NE: Tensor) -> Tensor:
        if self.correction is not None:
            scores_NE = scores_NE + self.correction
        if self.choice.top_groups < self.choice.groups:
            scores_NE = best_groups(scores_NE, self.choice.groups, self.choice.top_groups, self.of_best)
        return scores_NE.topk(self.experts.per_token, dim=-1).indices

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
