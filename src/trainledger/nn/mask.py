"""What is added to the scores of attention: minus infinity where a query may not look, and ALiBi's penalties.

Shapes: H query heads, T queries, S = T keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainledger.spec.layers import windows_of
from trainledger.spec.model import ModelSpec


class Masks(nn.Module):
    """The masks that the layers of a model need, made once in a forward for all layers of a kind.

    The fused kernels know causal attention themselves and need a mask for windows and ALiBi only; attention that is
    written out always needs one, and so does a CPU where attention has dropout, as no fused kernel there has it.
    """

    def __init__(self, spec: ModelSpec, implementation: str, dropout: float) -> None:
        super().__init__()
        self.windows = windows_of(spec)
        self.written_out = implementation == "math"
        self.dropout = dropout > 0
        self.slopes_H: Tensor | None
        slopes_H = (
            torch.tensor(slopes(spec.attention.n_heads), dtype=torch.float32)
            if spec.positions.kind == "alibi"
            else None
        )
        self.register_buffer("slopes_H", slopes_H, persistent=False)

    def forward(self, n_tokens: int, dtype: torch.dtype, device: torch.device) -> dict[int | None, Tensor | None]:
        """By window: None, or what is added to scores, [1, 1 or H, T, S] in ``dtype``."""
        always = self.written_out or self.slopes_H is not None or (self.dropout and device.type == "cpu")
        made: dict[int | None, Tensor | None] = {}
        found: dict[int | None, Tensor | None] = {}
        for window in self.windows:
            narrow = window if window is not None and window < n_tokens else None
            if narrow not in made:
                needed = always or narrow is not None
                made[narrow] = self._mask(n_tokens, narrow, dtype, device) if needed else None
            found[window] = made[narrow]
        return found

    def of_last(self, n_tokens: int, dtype: torch.dtype, device: torch.device) -> dict[int | None, Tensor | None]:
        """By window, for the last of so many tokens as the only query: it sees all keys that there still are.

        ALiBi's penalties, [1, H, 1, S], where the model has them; with windows, whose keys are in no order,
        it has none here.
        """
        if self.slopes_H is None:
            return dict.fromkeys(self.windows)
        assert self.windows == (None,), "ALiBi with windows is not decoded"
        position_S = torch.arange(1 - n_tokens, 1, dtype=torch.float32, device=device)
        bias_HS = (self.slopes_H[:, None] * position_S).to(dtype)
        return {None: bias_HS[None, :, None]}

    def _mask(self, n_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        hidden_TS = torch.full((n_tokens, n_tokens), float("-inf"), dtype=dtype, device=device)
        mask_TS = hidden_TS.triu(1)
        if window is not None:
            mask_TS += hidden_TS.tril(-window)
        del hidden_TS
        if self.slopes_H is None:
            return mask_TS[None, None]
        position_T = torch.arange(n_tokens, dtype=torch.float32, device=device)
        bias_HTS = (self.slopes_H[:, None, None] * (position_T - position_T[:, None])).to(dtype)
        bias_HTS += mask_TS
        return bias_HTS[None]


def slopes(n_heads: int) -> list[float]:
    """ALiBi's penalty per token of distance for each head (Press et al. 2022, section 3).

    2^(-8 h / H) for h = 1 to H. Where H is no power of two: those of the power of two below it, then every other
    one of the next power's, as in the authors' code.

    >>> slopes(8)[0], slopes(8)[-1], slopes(3) == [1 / 16, 1 / 256, 1 / 4]
    (0.5, 0.00390625, True)
    """
    whole = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-8 * each / whole) for each in range(1, whole + 1)]
    return first + [2 ** (-4 * each / whole) for each in range(1, 2 * (n_heads - whole), 2)]
