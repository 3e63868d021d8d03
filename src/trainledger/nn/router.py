"""Which experts a token goes to, and with which weights.

Shapes: B sequences, T tokens, N = B T tokens, D d_model, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainledger.spec.model import ModelSpec

TINY = 1e-20  # keeps scores that all underflow from dividing by zero


@dataclass(frozen=True)
class Routes:
    """The experts of each token, best first, the weights of their outputs, and what the choice was made from."""

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
