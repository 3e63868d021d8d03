"""The parts of a block: norms, attention, positions and MLP, a class for each kind."""

from __future__ import annotations

from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.parts import part
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class RMSNorm:
    """Division by the root mean square, then a weight (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    kind: ClassVar[str] = "rmsnorm"
    weight: ClassVar[bool] = True
    bias: ClassVar[bool] = False

    eps: float = setting("added to the mean square", 1e-5, above=0)
    plus_one: bool = setting("multiplies by 1 + its weight, in fp32 (Gemma)", False)


@frozen(kw_only=True)
class LayerNorm:
    """Normalization to mean 0 and variance 1, then weight and bias if set (Ba et al. 2016, arXiv 1607.06450)."""

    kind: ClassVar[str] = "layernorm"
    plus_one: ClassVar[bool] = False

    eps: float = setting("added to the variance", 1e-5, above=0)
    weight: bool = setting("the norm has a weight (OLMo's first has none)", True)
    bias: bool = setting("the norm has a bias", False)


QK_NORMS = ("head", "width", "turned")


@frozen(kw_only=True)
class GlobalHeads:
    """The heads of global layers where those of local ones are others (Gemma 4, MiMo-V2, Step 3.5)."""

    n_heads: int | None = setting("query heads; absent = as in local layers", None, at_least=1, at_most=10**6)
    n_kv_heads: int | None = setting("key-value heads; absent = as in local layers", None, at_least=1, at_most=10**6)
    head_dim: int | None = setting("head size; absent = as in local layers", None, at_least=1, at_most=10**6)
    keys_as_values: bool | None = setting("as attention.keys_as_values; absent = as in local layers", None)
    sinks: bool | None = setting("as attention.sinks; absent = as in local layers", None)


@frozen(kw_only=True)
class MultiHead:
    """Query heads, and as many key-value heads or fewer (Ainslie et al. 2023, GQA, arXiv 2305.13245)."""

    kind: ClassVar[str] = "multi-head"

    n_heads: int = setting("query heads", at_least=1, at_most=10**6)
    n_kv_heads: int | None = setting("key-value heads; absent = n_heads (multi-head)", None, at_least=1, at_most=10**6)
    head_dim: int | None = setting("head size; absent = d_model / n_heads", None, at_least=1, at_most=10**6)
    v_head_dim: int | None = setting("width of a value head; absent = head size", None, at_least=1, at_most=10**6)
    keys_as_values: bool = setting("values are the keys before norm and positions, without a projection", False)
    value_norm: bool = setting("values are normed over each head, without a weight (Gemma 4)", False)
    value_scale: float = setting("factor of the values (MiMo-V2)", 1.0, above=0)
    bias: bool = setting("biases in the query, key and value projections", False)
    output_bias: bool | None = setting("a bias in the output projection; absent = as bias", None)
    qk_norm: str | None = setting(
        "norms of queries and keys: over each head, over all heads together, or over each head once it is turned and "
        "without a weight (Llama 4); absent = none",
        None,
        choices=QK_NORMS,
    )
    scale: float | None = setting("factor of the scores; absent = 1 / sqrt(head size)", None, above=0)
    softcap: float | None = setting("scores become c tanh(scores / c); absent = no cap", None, above=0)
    gated: bool = setting("a sigmoid gate for each element of the output, as wide as the queries (Qwen3-Next)", False)
    sinks: bool = setting("a learned logit for each head that takes probability without a value (gpt-oss)", False)
    window: int | None = setting(
        "tokens that a local layer sees, itself included; absent = all layers are global", None, at_least=1
    )
    chunked: bool = setting("a local layer sees its chunk of window tokens, not the last window tokens", False)
    global_every: int | None = setting(
        "with a window: every n-th layer is global; absent = none is", None, at_least=2, at_most=10**5
    )
    in_global: GlobalHeads | None = part(
        "heads of global layers that are others than those of local ones; absent = they are the same",
        GlobalHeads,
        default=None,
    )

    @property
    def custom_scores(self) -> str:
        """The scores that PyTorch's fused kernels do not compute, in words; empty where they compute all."""
        if self.softcap is not None:
            return "capped scores (model.attention.softcap)"
        return "attention sinks (model.attention.sinks)" if self.sinks else ""


@frozen(kw_only=True)
class Indexer:
    """A choice of the keys that each query attends to, by few narrow heads that read the latent of the queries
    (DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1). It has no gradient here: DeepSeek trains it by a loss of its own."""

    n_heads: int = setting("heads that score the keys", at_least=1, at_most=10**6)
    head_dim: int = setting("width of these heads", at_least=2, at_most=10**6)
    top_k: int = setting("keys that a query attends to", quantity="length", at_least=1, at_most=10**9)
    interleaved: bool = setting("rotary pairs are neighbouring dims instead of dims of the two halves", False)
    every: int = setting(
        "behind the leading layers every n-th chooses keys, the others attend to those that it chose",
        1,
        at_least=1,
        at_most=10**5,
    )
    leading: int = setting("leading layers that each choose keys", 1, at_least=1, at_most=10**5)


@frozen(kw_only=True)
class Latent:
    """Keys and values from a joint latent, with a separate rotary part (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    kind: ClassVar[str] = "latent"
    # Options of multi-head attention that latent attention does not have.
    n_kv_heads: ClassVar[None] = None
    head_dim: ClassVar[None] = None
    qk_norm: ClassVar[None] = None
    keys_as_values: ClassVar[bool] = False
    value_norm: ClassVar[bool] = False
    value_scale: ClassVar[float] = 1.0
    in_global: ClassVar[None] = None
    gated: ClassVar[bool] = False
    softcap: ClassVar[None] = None
    sinks: ClassVar[bool] = False
    custom_scores: ClassVar[str] = ""
    window: ClassVar[None] = None
    chunked: ClassVar[bool] = False
    global_every: ClassVar[None] = None

    n_heads: int = setting("heads", at_least=1, at_most=10**6)
    kv_rank: int = setting("width of the joint latent of keys and values", at_least=1, at_most=10**7)
    q_rank: int | None = setting(
        "width of the latent of the queries; absent = one projection without a latent", None, at_least=1, at_most=10**7
    )
    nope_head_dim: int = setting("width of a head's part without positions", at_least=1, at_most=10**6)
    rope_head_dim: int = setting("width of a head's rotary part, one key for all heads", at_least=2, at_most=10**6)
    v_head_dim: int = setting("width of a value head", at_least=1, at_most=10**6)
    bias: bool = setting("biases in the projections to the latents", False)
    output_bias: bool | None = setting("a bias in the output projection; absent = as bias", None)
    scale: float | None = setting("factor of the scores; absent = 1 / sqrt(head size)", None, above=0)
    indexer: Indexer | None = part("which keys a query attends to; absent = all before it", Indexer, default=None)


@frozen(kw_only=True)
class Llama3:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""

    kind: ClassVar[str] = "llama3"

    factor: float = setting("factor by which long rotary wavelengths are stretched", at_least=1)
    low_freq_factor: float = setting("wavelengths above original_seq_len over this are stretched in full", 1.0, above=0)
    high_freq_factor: float = setting("wavelengths below original_seq_len over this are kept", 4.0, above=0)
    original_seq_len: int = setting("longest sequence before the scaling", 8192, at_least=1, at_most=10**9)


@frozen(kw_only=True)
class Linear:
    """All wavelengths are stretched (Chen et al. 2023, Position Interpolation, arXiv 2306.15595)."""

    kind: ClassVar[str] = "linear"

    factor: float = setting("factor by which rotary wavelengths are stretched", at_least=1)


@frozen(kw_only=True)
class Yarn:
    """Long wavelengths are stretched, short ones kept, a ramp between (Peng et al. 2023, YaRN, arXiv 2309.00071)."""

    kind: ClassVar[str] = "yarn"

    factor: float = setting("factor by which long rotary wavelengths are stretched", at_least=1)
    beta_slow: float = setting(
        "wavelengths that fit at most this often into original_seq_len are stretched in full", 1.0, above=0
    )
    beta_fast: float = setting("wavelengths that fit at least this often into original_seq_len are kept", 32.0, above=0)
    original_seq_len: int = setting("longest sequence before the scaling", 8192, at_least=1, at_most=10**9)
    attention_factor: float = setting("factor of cosines and sines", 1.0, above=0)
    truncate: bool = setting("the ends of the ramp are rounded outwards to whole pairs of dims", True)


@frozen(kw_only=True)
class LongRope:
    """A factor for each wavelength, which is not kept here (Ding et al. 2024, LongRoPE, arXiv 2402.13753)."""

    kind: ClassVar[str] = "longrope"

    factor: float = setting("factor by which the longest rotary wavelengths are stretched", at_least=1)
    original_seq_len: int = setting("longest sequence before the scaling", 8192, at_least=1, at_most=10**9)
    attention_factor: float = setting("factor of cosines and sines", 1.0, above=0)


@frozen(kw_only=True)
class Proportional:
    """The shortest waves turn, the other pairs do not (Gemma 4)."""

    kind: ClassVar[str] = "proportional"

    factor: float = setting("factor by which rotary wavelengths are stretched", 1.0, at_least=1)
    turned: float = setting("share of the pairs that turn", 1.0, above=0, at_most=1)


@frozen(kw_only=True)
class Rope:
    """Rotary positions (Su et al. 2021, RoFormer, arXiv 2104.09864)."""

    kind: ClassVar[str] = "rope"

    theta: float = setting("base of the rotary frequencies", 10000.0, above=0)
    local_theta: float | None = setting(
        "base of the rotary frequencies in local layers, without scaling; absent = as in all layers", None, above=0
    )
    dim: int | None = setting("leading dims of a head that rotate; absent = all", None, at_least=2, at_most=10**6)
    local_dim: int | None = setting(
        "leading dims of a head that rotate in local layers; absent = as in all layers", None, at_least=2, at_most=10**6
    )
    interleaved: bool = setting("pairs are neighbouring dims instead of dims of the two halves", False)
    skip_every: int | None = setting(
        "every n-th layer has no positions; absent = all have", None, at_least=1, at_most=10**5
    )
    scaling: Llama3 | Linear | Yarn | LongRope | Proportional | None = part(
        "how rotary wavelengths are stretched for longer sequences; absent = not",
        Llama3,
        Linear,
        Yarn,
        LongRope,
        Proportional,
        default=None,
    )


@frozen(kw_only=True)
class Learned:
    """A learned vector for each position."""

    kind: ClassVar[str] = "learned"

    extra_rows: int = setting("unused rows before the learned positions (OPT has 2)", 0, at_least=0)


@frozen(kw_only=True)
class Alibi:
    """Scores fall linearly with the distance, with one slope per head (Press et al. 2022, ALiBi, arXiv 2108.12409)."""

    kind: ClassVar[str] = "alibi"


@frozen(kw_only=True)
class NoPositions:
    """No positions: only the causal mask orders the tokens."""

    kind: ClassVar[str] = "none"


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swish")
ROUTER_SCORES = ("softmax", "sigmoid", "softmax-of-chosen")


@frozen(kw_only=True)
class Dense:
    """One MLP for all tokens."""

    kind: ClassVar[str] = "dense"

    d_ff: int = setting("inner size of the MLP", at_least=1, at_most=10**8)
    activation: str = setting("nonlinearity of the MLP", "silu", choices=ACTIVATIONS)
    gated: bool = setting("the MLP is gated (SwiGLU, GEGLU)", True)
    bias: bool = setting("biases in the MLP", False)


@frozen(kw_only=True)
class Router:
    """The choice of experts and their weights for a token."""

    scores: str = setting(
        "scores of the experts: softmax over all, sigmoid, or softmax over the chosen", "softmax", choices=ROUTER_SCORES
    )
    bias: bool = setting("the router has a bias", False)
    normalize: bool = setting("the chosen scores are divided by their sum", True)
    scale: float = setting("factor of the chosen scores", 1.0, above=0)
    correction: bool = setting("a bias without gradient balances the load (DeepSeek-V3)", False)
    groups: int = setting("groups of experts; the best groups are chosen before experts", 1, at_least=1, at_most=10**5)
    top_groups: int = setting("chosen groups", 1, at_least=1, at_most=10**5)


@frozen(kw_only=True)
class Experts(Dense):
    """Mixtures of experts in all layers or some; the others have the dense MLP."""

    kind: ClassVar[str] = "experts"

    n_experts: int = setting("experts of a layer", at_least=2, at_most=10**5)
    per_token: int = setting("experts for each token (top k)", 2, at_least=1, at_most=10**5)
    expert_d_ff: int | None = setting("inner size of an expert; absent = d_ff", None, at_least=1, at_most=10**8)
    expert_d_model: int | None = setting(
        "width of what experts read and write, between two projections of all tokens; absent = d_model",
        None,
        at_least=1,
        at_most=10**7,
    )
    n_shared: int = setting("shared experts, which every token uses, as one MLP", 0, at_least=0, at_most=10**4)
    shared_d_ff: int | None = setting(
        "inner size of all shared experts together; absent = n_shared times that of one expert",
        None,
        at_least=1,
        at_most=10**8,
    )
    shared_gate: bool = setting("the shared expert's output is gated by a sigmoid", False)
    own_norms: bool = setting(
        "experts, router and shared expert each norm the stream, experts and shared expert also what they make of it, "
        "and each expert's weight has a learned factor (Gemma 4)",
        False,
    )
    n_dense_layers: int = setting("leading layers with a dense MLP", 0, at_least=0, at_most=10**5)
    every: int = setting("every n-th layer has experts", 1, at_least=1, at_most=10**5)
    imbalance: float = setting(
        "tokens that the expert rank with the most of them gets, over the mean; 1 = even routing",
        1.0,
        at_least=1.0,
        at_most=1000.0,
    )
    router: Router = part("how experts are chosen for a token", Router, default=Router())

    @property
    def width(self) -> int:
        """Inner size of one expert."""
        return self.d_ff if self.expert_d_ff is None else self.expert_d_ff

    @property
    def shared_width(self) -> int:
        """Inner size of all shared experts together; 0 without any."""
        if not self.n_shared or self.shared_d_ff is None:
            return self.n_shared * self.width
        return self.shared_d_ff
