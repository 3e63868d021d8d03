"""Attention: multi-head (with grouped and multi-query), or latent."""

from __future__ import annotations

from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting

QK_NORMS = ("head", "width")


@frozen(kw_only=True)
class MultiHead:
    """Query heads, and as many key-value heads or fewer (Ainslie et al. 2023, GQA, arXiv 2305.13245)."""

    kind: ClassVar[str] = "multi-head"

    n_heads: int = setting("query heads", at_least=1, at_most=10**6)
    n_kv_heads: int | None = setting(
        "key-value heads; absent = n_heads (multi-head)", default=None, at_least=1, at_most=10**6
    )
    head_dim: int | None = setting("head size; absent = d_model / n_heads", default=None, at_least=1, at_most=10**6)
    bias: bool = setting("biases in the query, key and value projections", quantity="flag", default=False)
    output_bias: bool | None = setting(
        "a bias in the output projection; absent = as bias", quantity="flag", default=None
    )
    qk_norm: str | None = setting(
        "norms of queries and keys: over each head, or over all heads together; absent = none",
        quantity="text", default=None, choices=QK_NORMS,
    )  # fmt: skip
    scale: float | None = setting(
        "factor of the scores; absent = 1 / sqrt(head size)", quantity="number", default=None, above=0
    )
    softcap: float | None = setting(
        "scores become c tanh(scores / c); absent = no cap", quantity="number", default=None, above=0
    )
    sinks: bool = setting(
        "a learned logit for each head that takes probability without a value (gpt-oss)", quantity="flag", default=False
    )
    window: int | None = setting(
        "tokens that a local layer sees, itself included; absent = all layers are global", default=None, at_least=1
    )
    global_every: int | None = setting(
        "with a window: every n-th layer is global; absent = none is", default=None, at_least=2, at_most=10**5
    )

    @property
    def custom_scores(self) -> str:
        """The scores that PyTorch's fused kernels do not compute, in words; empty where they compute all."""
        if self.softcap is not None:
            return "capped scores (model.attention.softcap)"
        return "attention sinks (model.attention.sinks)" if self.sinks else ""


@frozen(kw_only=True)
class Latent:
    """Keys and values from a joint latent, with a separate rotary part (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    kind: ClassVar[str] = "latent"
    # Options of multi-head attention that latent attention does not have.
    n_kv_heads: ClassVar[None] = None
    head_dim: ClassVar[None] = None
    qk_norm: ClassVar[None] = None
    softcap: ClassVar[None] = None
    sinks: ClassVar[bool] = False
    custom_scores: ClassVar[str] = ""
    window: ClassVar[None] = None
    global_every: ClassVar[None] = None

    n_heads: int = setting("heads", at_least=1, at_most=10**6)
    kv_rank: int = setting("width of the joint latent of keys and values", at_least=1, at_most=10**7)
    q_rank: int | None = setting(
        "width of the latent of the queries; absent = one projection without a latent",
        default=None,
        at_least=1,
        at_most=10**7,
    )
    nope_head_dim: int = setting("width of a head's part without positions", at_least=1, at_most=10**6)
    rope_head_dim: int = setting("width of a head's rotary part, one key for all heads", at_least=2, at_most=10**6)
    v_head_dim: int = setting("width of a value head", at_least=1, at_most=10**6)
    bias: bool = setting("biases in the projections to the latents", quantity="flag", default=False)
    output_bias: bool | None = setting(
        "a bias in the output projection; absent = as bias", quantity="flag", default=None
    )
    scale: float | None = setting(
        "factor of the scores; absent = 1 / sqrt(head size)", quantity="number", default=None, above=0
    )
