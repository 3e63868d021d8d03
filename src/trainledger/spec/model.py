"""The model: a decoder-only Transformer, told by the sizes and choices that its cost depends on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import isqrt
from typing import Any

from trainledger.frozen import frozen
from trainledger.spec.problem import Problem
from trainledger.spec.setting import setting

NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
POSITIONS = ("rope", "learned")


@frozen(kw_only=True)
class ModelSpec:
    """Sizes and choices of a GPT-2-style or Llama-style decoder (pre-norm blocks, causal attention).

    >>> tiny = ModelSpec(vocab_size=256, d_model=64, n_layers=2, n_heads=4, d_ff=256, max_seq_len=128)
    >>> tiny.kv_heads, tiny.head_size
    (4, 16)
    """

    name: str = setting("what the model is called in reports", quantity="text", default="model")
    vocab_size: int = setting("tokens in the vocabulary", at_least=1, at_most=10**8)
    d_model: int = setting("width of the residual stream", at_least=1, at_most=10**7)
    n_layers: int = setting("Transformer blocks", at_least=1, at_most=10**5)
    n_heads: int = setting("query heads", at_least=1, at_most=10**6)
    n_kv_heads: int | None = setting(
        "key-value heads; absent = n_heads (multi-head)", default=None, at_least=1, at_most=10**6
    )
    head_dim: int | None = setting(
        "width of a head; absent = d_model / n_heads", default=None, at_least=1, at_most=10**6
    )
    d_ff: int = setting("inner width of the MLP", at_least=1, at_most=10**8)
    max_seq_len: int = setting("longest sequence (rows of learned positions)", at_least=1, at_most=10**9)
    norm: str = setting("normalization", quantity="text", default="rmsnorm", choices=NORMS)
    norm_eps: float = setting("added to the variance in a norm", quantity="number", default=1e-5, above=0)
    norm_bias: bool = setting("layernorm has a bias", quantity="flag", default=False)
    activation: str = setting("nonlinearity of the MLP", quantity="text", default="silu", choices=ACTIVATIONS)
    gated: bool = setting("the MLP is gated (SwiGLU, GEGLU)", quantity="flag", default=True)
    positions: str = setting("how positions enter", quantity="text", default="rope", choices=POSITIONS)
    rope_theta: float = setting("base of the rotary frequencies", quantity="number", default=10000.0, above=0)
    rope_factor: float | None = setting(
        "Llama 3.1's scaling: long rotary waves are stretched this many times; absent = none",
        quantity="number",
        default=None,
        at_least=1,
    )
    rope_low_freq_factor: float = setting(
        "waves longer than rope_original_seq_len over this are stretched in full",
        quantity="number",
        default=1.0,
        above=0,
    )
    rope_high_freq_factor: float = setting(
        "waves shorter than rope_original_seq_len over this are left as they are",
        quantity="number",
        default=4.0,
        above=0,
    )
    rope_original_seq_len: int = setting("longest sequence before the scaling", default=8192, at_least=1, at_most=10**9)
    attention_bias: bool = setting("biases in the attention projections", quantity="flag", default=False)
    mlp_bias: bool = setting("biases in the MLP", quantity="flag", default=False)
    tie_embeddings: bool = setting("input and output embedding are one matrix", quantity="flag", default=False)

    @classmethod
    def from_hf(cls, config: str | os.PathLike[str] | dict[str, Any]) -> ModelSpec:
        """The spec of a Hugging Face config.json (its path or its contents); raises `InvalidInput`."""
        from pathlib import Path

        from trainledger.spec.huggingface import from_config, read_json

        if isinstance(config, dict):
            return from_config(config)
        return from_config(read_json(Path(config)), os.fspath(config))

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    def problems(self) -> Iterator[Problem]:
        """What the fields say against each other; single fields are checked where they are read."""
        rotary = "rotary positions turn pairs, so the head width must be even"
        odd = self.positions == "rope" and self.head_size % 2
        if self.head_dim is not None:
            if odd:
                yield Problem("model.head_dim", self.head_dim, rotary, self.head_dim + 1)
        elif self.d_model % self.n_heads:
            rule = f"must divide d_model = {self.d_model} where head_dim is not given"
            yield Problem("model.n_heads", self.n_heads, rule, self._nearest_heads())
        elif odd:
            yield Problem("model.n_heads", self.n_heads, f"{rotary}, not {self.head_size}", self._nearest_heads())
        if self.n_heads % self.kv_heads:
            kv = nearest_divisor(self.n_heads, self.kv_heads)
            yield Problem("model.n_kv_heads", self.kv_heads, f"must divide n_heads = {self.n_heads}", kv)
        if self.rope_factor is not None and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            rule = f"must be above rope_low_freq_factor = {self.rope_low_freq_factor}"
            yield Problem(
                "model.rope_high_freq_factor", self.rope_high_freq_factor, rule, 4 * self.rope_low_freq_factor
            )
        if self.norm_bias and self.norm == "rmsnorm":
            yield Problem("model.norm_bias", True, "rmsnorm has no bias", False)

    def _nearest_heads(self) -> int | None:
        """The number of heads nearest to ``n_heads`` that d_model allows, or None where d_model is odd."""
        if self.positions != "rope":
            return nearest_divisor(self.d_model, self.n_heads)
        return None if self.d_model % 2 else nearest_divisor(self.d_model // 2, self.n_heads)


def nearest_divisor(whole: int, wanted: int) -> int:
    """The divisor of ``whole`` nearest to ``wanted`` (the larger of two equally near).

    >>> nearest_divisor(64, 7)
    8
    """
    small = [each for each in range(1, isqrt(whole) + 1) if whole % each == 0]
    return min((*small, *(whole // each for each in small)), key=lambda each: (abs(each - wanted), -each))
