"""Rotary positions, and what is added to scores: minus infinity where a query may not look, and ALiBi's penalties.

Rotary: Su et al. 2021, RoFormer, section 3.4; of whole heads or a part, of halves or of neighbours.
Shapes: B sequences, T tokens (queries), S = T keys, H heads, K head width, R width that is turned, J = R / 2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainledger.spec.block import Linear, Llama3, LongRope, Proportional, Yarn
from trainledger.spec.layers import windows_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem

NO_TOKEN = -1  # equal to no token's id
Angles = tuple[Tensor, Tensor]  # cosines and sines, each [T, 1, J]


class Rotary(nn.Module):
    """The cosines and sines of each position, made once: two fp32 buffers of max_seq_len x rotary_size / 2.

    `InvalidInput` for longrope, whose factors (one for each pair) a spec does not hold.
    """

    cos_TJ: Tensor
    sin_TJ: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        angle_TJ = torch.outer(torch.arange(spec.max_seq_len, dtype=torch.float32), frequencies(spec))
        scaling = None if spec.rope is None else spec.rope.scaling
        grown = scaling.attention_factor if isinstance(scaling, Yarn) else 1.0
        self.register_buffer("cos_TJ", angle_TJ.cos() * grown, persistent=False)
        self.register_buffer("sin_TJ", angle_TJ.sin() * grown, persistent=False)

    def forward(self, n_tokens: int, dtype: torch.dtype, past: int = 0) -> Angles:
        """Cosines and sines of ``n_tokens`` positions after ``past`` others, each [T, 1, J] in ``dtype``."""
        end = past + n_tokens
        return self.cos_TJ[past:end, None].to(dtype), self.sin_TJ[past:end, None].to(dtype)


def frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair, [J], fp32: theta ** (-2j / R), those of long waves less where they are scaled.

    linear slows every wave ``factor`` times (Chen et al. 2023, Position Interpolation). llama3 (Llama 3.1) and yarn
    (Peng et al. 2023, section 3.2, NTK-by-parts) slow those that fit at most ``low_freq_factor`` (``beta_slow``) times
    into ``original_seq_len``, leave those that fit ``high_freq_factor`` (``beta_fast``) times or more, and blend
    between: llama3 linearly in how often a wave fits, yarn linearly in the number of its pair.
    """
    assert spec.rope is not None
    scaling = spec.rope.scaling
    pair_J = torch.arange(0, spec.rotary_size, 2, dtype=torch.float32)
    frequency_J: Tensor = 1.0 / spec.rope.theta ** (pair_J / spec.rotary_size)
    match scaling:
        case None:
            return frequency_J
        case LongRope():
            rule = "has a factor for each pair of a head, which the model's fields do not hold; it can be planned, not "
            raise InvalidInput([Problem("model.positions.scaling", "longrope", f"{rule}built")])
        case Linear():
            return frequency_J / scaling.factor
        case Proportional():
            turned = int(scaling.turned * spec.rotary_size // 2)
            return frequency_J * (pair_J < 2 * turned) / scaling.factor
        case Yarn():
            kept_J = _kept_by_yarn(scaling, spec.rope.theta, spec.rotary_size)
        case Llama3():
            fits_J = scaling.original_seq_len * frequency_J / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept_J = ((fits_J - low) / max(high - low, 1e-6)).clamp(0, 1)  # the two are one in Llama 4 Scout
    return (1 - kept_J) * (frequency_J / scaling.factor) + kept_J * frequency_J


def _kept_by_yarn(scaling: Yarn, theta: float, width: int) -> Tensor:
    """How much of each pair's own frequency stays, [J]: a ramp, between whole pairs as in the authors' code or not."""

    def pair_that_fits(times: float) -> float:
        wave = scaling.original_seq_len / (2 * math.pi * times)
        return width * math.log(wave) / (2 * math.log(theta))

    first, last = pair_that_fits(scaling.beta_fast), pair_that_fits(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pair_J = torch.arange(width // 2, dtype=torch.float32)
    return 1 - ((pair_J - first) / max(last - first, 0.001)).clamp(0, 1)


def rotate(x_BTHK: Tensor, angles: Angles, *, begin: int = 0, interleaved: bool = False) -> Tensor:
    """2 J elements of each head from ``begin`` on turned by their position's angle; [B, T, H, K] in and out.

    A pair is (x[j], x[j + J]), or two neighbours where ``interleaved``. Turned pairs come out in halves in either
    case: scores stay what they are as long as queries and keys change their order alike.
    """
    cos_T1J, sin_T1J = angles
    half = cos_T1J.shape[-1]
    width = x_BTHK.shape[-1]
    turned = (2 * half,) if interleaved else (half, half)
    sizes = [each for each in (begin, *turned, width - begin - 2 * half) if each]
    parts = list(torch.split(x_BTHK, sizes, dim=-1)) if len(sizes) > 1 else [x_BTHK]
    at = 1 if begin else 0
    if interleaved:
        parts[at : at + 1] = parts[at].unflatten(-1, (half, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    a_BTHJ, b_BTHJ = parts[at : at + 2]
    parts[at : at + 2] = (a_BTHJ * cos_T1J - b_BTHJ * sin_T1J, b_BTHJ * cos_T1J + a_BTHJ * sin_T1J)
    return torch.cat(parts, dim=-1)


class Masks(nn.Module):
    """The masks that the layers of a model need, made once in a forward for all layers of a kind.

    The fused kernels know causal attention themselves and need a mask for windows and ALiBi only; attention that is
    unfused always needs one, and so does a CPU where attention has dropout, as no fused kernel there has it.
    With ``documents`` each sequence has its own mask: a token attends only to its document. A document begins
    with the token ``end_id`` that ends the one before; until that is set, a sequence is one document.
    """

    def __init__(self, spec: ModelSpec, implementation: str, dropout: float, *, documents: bool = False) -> None:
        super().__init__()
        self.documents, self.end_id = documents, NO_TOKEN
        self.windows, self.chunked = windows_of(spec), spec.attention.chunked
        self.written_out = implementation == "math"
        self.dropout = dropout > 0
        self.slopes_H: Tensor | None
        slopes_H = (
            torch.tensor(slopes(spec.attention.n_heads), dtype=torch.float32)
            if spec.positions.kind == "alibi"
            else None
        )
        self.register_buffer("slopes_H", slopes_H, persistent=False)

    def forward(
        self, n_tokens: int, dtype: torch.dtype, device: torch.device, ids_BT: Tensor | None = None
    ) -> dict[int | None, Tensor | None]:
        """By window: None, or what is added to scores, [1 or B, 1 or H, T, S] in ``dtype``."""
        others = self._of_other_documents(ids_BT) if self.documents else None
        always = self.written_out or self.slopes_H is not None or (self.dropout and device.type == "cpu")
        always = always or others is not None
        made: dict[int | None, Tensor | None] = {}
        tensors: dict[int | None, Tensor | None] = {}
        for window in self.windows:
            narrow = window if window is not None and window < n_tokens else None
            if narrow not in made:
                needed = always or narrow is not None
                made[narrow] = self._mask(n_tokens, narrow, dtype, device, others) if needed else None
            tensors[window] = made[narrow]
        return tensors

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

    def _of_other_documents(self, ids_BT: Tensor | None) -> Tensor:
        """Which keys are of another document than the query, [B, 1, T, S]."""
        assert ids_BT is not None, "documents are found by their token ids"
        document_BT = (ids_BT == self.end_id).cumsum(1)
        return document_BT[:, None, :, None] != document_BT[:, None, None]

    def _mask(
        self, n_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device, others_B1TS: Tensor | None
    ) -> Tensor:
        mask_1HTS = self._of_all_sequences(n_tokens, window, dtype, device)
        return mask_1HTS if others_B1TS is None else mask_1HTS.masked_fill(others_B1TS, float("-inf"))

    def _of_all_sequences(self, n_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        hidden_TS = torch.full((n_tokens, n_tokens), float("-inf"), dtype=dtype, device=device)
        mask_TS = hidden_TS.triu(1)
        if window is not None and self.chunked:
            chunk_T = torch.arange(n_tokens, device=device) // window
            mask_TS = mask_TS.masked_fill(chunk_T[:, None] != chunk_T, float("-inf"))
        elif window is not None:
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
    first = [2 ** (-8 * index / whole) for index in range(1, whole + 1)]
    return first + [2 ** (-4 * head / whole) for head in range(1, 2 * (n_heads - whole), 2)]
