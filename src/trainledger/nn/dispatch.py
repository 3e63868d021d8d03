"""Tokens in the order in which the experts take them, and back, with sizes that do not depend on the routes.

Shapes: N tokens, K experts of a token, R = K N routes (all first choices, then all second choices ...),
E experts, C places of an expert, S places of all experts, D d_model.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


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
    return -(-n_tokens * per_token * factor.numerator // (n_experts * factor.denominator))


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

    As autograd knows nothing of the other way it would add row by row, on a GPU in an order of its own. Each row
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
