"""The model: a decoder-only Transformer, told by the sizes and choices that its cost depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainledger.spec.problem import Problem
from trainledger.spec.setting import setting

NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
POSITIONS = ("rope", "learned")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and choices of a GPT-2-style or Llama-style decoder (pre-norm blocks, causal attention).

    >>> tiny = ModelSpec(vocab_size=256, d_model=64, n_layers=2, n_heads=4, d_ff=256, max_seq_len=128)
    >>> tiny.kv_heads, tiny.head_size
    (4, 16)
    """

    name: str = setting("what the model is called in reports", quantity="text", default="model")
    vocab_size: int = setting("tokens in the vocabulary", at_least=1)
    d_model: int = setting("width of the residual stream", at_least=1)
    n_layers: int = setting("Transformer blocks", at_least=1)
    n_heads: int = setting("query heads", at_least=1)
    n_kv_heads: int | None = setting("key-value heads; absent = n_heads (multi-head)", default=None, at_least=1)
    head_dim: int | None = setting("width of a head; absent = d_model / n_heads", default=None, at_least=1)
    d_ff: int = setting("inner width of the MLP", at_least=1)
    max_seq_len: int = setting("longest sequence (rows of learned positions)", at_least=1)
    norm: str = setting("normalization", quantity="text", default="rmsnorm", choices=NORMS)
    norm_eps: float = setting("added to the variance in a norm", quantity="number", default=1e-5, above=0)
    norm_bias: bool = setting("layernorm has a bias", quantity="flag", default=False)
    activation: str = setting("nonlinearity of the MLP", quantity="text", default="silu", choices=ACTIVATIONS)
    gated: bool = setting("the MLP is gated (SwiGLU, GEGLU)", quantity="flag", default=True)
    positions: str = setting("how positions enter", quantity="text", default="rope", choices=POSITIONS)
    rope_theta: float = setting("base of the rotary frequencies", quantity="number", default=10000.0, above=0)
    attention_bias: bool = setting("biases in the attention projections", quantity="flag", default=False)
    mlp_bias: bool = setting("biases in the MLP", quantity="flag", default=False)
    tie_embeddings: bool = setting("input and output embedding are one matrix", quantity="flag", default=False)

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    def problems(self) -> Iterator[Problem]:
        """What the fields say against each other; single fields are checked where they are read."""
        if self.head_dim is None and self.d_model % self.n_heads:
            heads = nearest_divisor(self.d_model, self.n_heads)
            yield Problem(
                "model.n_heads", self.n_heads, f"must divide d_model = {self.d_model} where head_dim is not given", heads
            )
        if self.n_heads % self.kv_heads:
            kv = nearest_divisor(self.n_heads, self.kv_heads)
            yield Problem("model.n_kv_heads", self.kv_heads, f"must divide n_heads = {self.n_heads}", kv)
        if self.positions == "rope" and self.head_size % 2:
            field = "model.head_dim" if self.head_dim is not None else "model.n_heads"
            value = self.head_dim if self.head_dim is not None else self.n_heads
            rule = f"rotary positions turn pairs, so the head width must be even, not {self.head_size}"
            yield Problem(field, value, rule, self.head_size + 1 if self.head_dim is not None else None)
        if self.norm_bias and self.norm == "rmsnorm":
            yield Problem("model.norm_bias", True, "rmsnorm has no bias", False)


def nearest_divisor(whole: int, wanted: int) -> int:
    """The divisor of ``whole`` nearest to ``wanted`` (the larger of two equally near).

    >>> nearest_divisor(64, 7)
    8
    """
    low = next(d for d in range(min(wanted, whole), 0, -1) if whole % d == 0)
    high = next((d for d in range(wanted, min(whole, 2 * wanted) + 1) if whole % d == 0), low)
    return high if high - wanted <= wanted - low else low
