"""Multi-token prediction: further tokens, each predicted by a separate block (DeepSeek-V3, section 2.2).

Shapes: B sequences, T tokens, S tokens of a module (T - 1 less how far it looks ahead), D d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.engine.nn.loss import next_token_loss, with_loss
from trainledger.engine.nn.norm import norm_of
from trainledger.spec.model import ModelSpec

MTP = "mtp."  # names of parameters of these modules begin so

Run = Callable[[nn.Module, Tensor], Tensor]


class Module(nn.Module):
    """What the module before it made of each token, and the embedding of the next one, through a block."""

    def __init__(self, spec: ModelSpec, block: nn.Module, *, upcast: bool) -> None:
        super().__init__()
        self.enorm = norm_of(spec)
        self.hnorm = norm_of(spec)
        self.eh_proj = nn.Linear(2 * spec.d_model, spec.d_model, bias=False)
        self.block = block
        self.norm = norm_of(spec)
        self.loss = Loss(upcast=upcast)

    def forward(self, h_BSD: Tensor, e_BSD: Tensor, run: Run) -> Tensor:
        """[B, S, D] twice in, and once out; ``run`` runs the block."""
        return run(self.block, self.eh_proj(_joined(self.enorm(e_BSD), self.hnorm(h_BSD))))


def _joined(*parts: Tensor) -> Tensor:
    """Both along the last dim, in the wider format: autocast copies to it on a CPU, and CUDA's kernel reads two."""
    wide = torch.promote_types(parts[0].dtype, parts[1].dtype)
    return torch.cat([each.to(wide) for each in parts], dim=-1)


class Loss(nn.Module):
    """The mean loss of one module's predictions, with the model's own head."""

    def __init__(self, *, upcast: bool) -> None:
        super().__init__()
        self.upcast = upcast

    def forward(self, x_BSD: Tensor, targets_BS: Tensor, head: nn.Module) -> Tensor:
        """A scalar in nats."""
        return next_token_loss(head(x_BSD), targets_BS, upcast=self.upcast)


class MultiTokenPrediction(nn.ModuleList):
    """All modules of a model; their mean loss is added, times ``weight``, to that of the next token."""

    def __init__(self, spec: ModelSpec, block: Callable[[], nn.Module], *, weight: float, upcast: bool) -> None:
        super().__init__(Module(spec, block(), upcast=upcast) for _ in range(spec.n_mtp_layers))
        self.weight = weight

    def with_losses(self, h_BTD: Tensor, e_BTD: Tensor, ids_BT: Tensor, head: nn.Module, run: Run) -> Tensor:
        """The hidden states after the last layer, and with them the losses over tokens that the sequence itself holds.

        The first module says of token t, whose hidden state it reads with the embedding of t + 1, what t + 2 is; each
        further one looks one token further. ``run`` runs a block.
        """
        return with_loss(h_BTD, self._total(h_BTD, e_BTD, ids_BT, head, run) * (self.weight / len(self)))

    def _total(self, h_BTD: Tensor, e_BTD: Tensor, ids_BT: Tensor, head: nn.Module, run: Run) -> Tensor:
        total: Tensor | None = None
        for ahead, module in enumerate(self, start=1):
            each: Any = module
            n_tokens = ids_BT.shape[1] - 1 - ahead
            h_BTD = each(h_BTD[:, :n_tokens], e_BTD[:, ahead : ahead + n_tokens], run)
            loss = each.loss(each.norm(h_BTD), ids_BT[:, ahead + 1 :], head)
            total = loss if total is None else total + loss
        assert total is not None, "there is no module"
        return total
