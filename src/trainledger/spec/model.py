"""The model: a decoder-only Transformer, told by the sizes and choices that its cost depends on."""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.spec.setting import setting

NORMS = ("rmsnorm", "layernorm")
NORM_PLACES = ("pre", "post", "sandwich", "after-add")
BLOCKS = ("serial", "parallel", "parallel-two-norms")
QK_NORMS = ("head", "width")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swish")
POSITIONS = ("rope", "learned", "alibi", "none")
ROPE_SCALINGS = ("llama3", "linear", "yarn", "longrope")
ROUTERS = ("softmax", "sigmoid", "softmax-of-chosen")


@frozen(kw_only=True)
class ModelSpec:
    """Sizes and choices of a decoder with causal attention.

    >>> tiny = ModelSpec(vocab_size=256, d_model=64, n_layers=2, n_heads=4, d_ff=256, max_seq_len=128)
    >>> tiny.kv_heads, tiny.head_size
    (4, 16)
    """

    name: str = setting("what the model is called in reports", quantity="text", default="model")
    vocab_size: int = setting("tokens in the vocabulary", at_least=1, at_most=10**8)
    vocab_multiple: int = setting(
        "rows of the embedding are padded to a multiple of this", default=1, at_least=1, at_most=10**6
    )
    d_model: int = setting("width of the residual stream", at_least=1, at_most=10**7)
    n_layers: int = setting("Transformer blocks", at_least=1, at_most=10**5)
    d_ff: int = setting("inner width of the MLP", at_least=1, at_most=10**8)
    max_seq_len: int = setting("longest sequence (rows of learned positions)", at_least=1, at_most=10**9)
    tie_embeddings: bool = setting("input and output embedding are one matrix", quantity="flag", default=False)
    embedding_scale: float = setting(
        "the embedded tokens are multiplied by this", quantity="number", default=1.0, above=0
    )
    embedding_norm: bool = setting("a norm follows the embedding (BLOOM)", quantity="flag", default=False)
    head_bias: bool = setting("a bias in the output head", quantity="flag", default=False)
    logit_scale: float = setting("the logits are multiplied by this", quantity="number", default=1.0, above=0)
    logit_softcap: float | None = setting(
        "logits become c tanh(logits / c); absent = no cap", quantity="number", default=None, above=0
    )

    norm: str = setting("normalization", quantity="text", default="rmsnorm", choices=NORMS)
    norm_eps: float = setting("added to the variance in a norm", quantity="number", default=1e-5, above=0)
    norm_bias: bool = setting("layernorm has a bias", quantity="flag", default=False)
    norm_weight: bool = setting("the norm has a weight (OLMo's first has none)", quantity="flag", default=True)
    norm_plus_one: bool = setting(
        "the norm multiplies by 1 + its weight, in fp32 (Gemma)", quantity="flag", default=False
    )
    norm_place: str = setting(
        "pre = before a branch, post = on its output, sandwich = both, after-add = on the sum (the first Transformer)",
        quantity="text",
        default="pre",
        choices=NORM_PLACES,
    )
    block: str = setting(
        "serial, or attention and MLP both read the block's input: through one norm, or through two",
        quantity="text",
        default="serial",
        choices=BLOCKS,
    )

    n_heads: int = setting("query heads", at_least=1, at_most=10**6)
    n_kv_heads: int | None = setting(
        "key-value heads; absent = n_heads (multi-head)", default=None, at_least=1, at_most=10**6
    )
    head_dim: int | None = setting(
        "width of a head; absent = d_model / n_heads", default=None, at_least=1, at_most=10**6
    )
    attention_bias: bool = setting("biases in the query, key and value projections", quantity="flag", default=False)
    attention_output_bias: bool | None = setting(
        "a bias in the output projection; absent = as attention_bias", quantity="flag", default=None
    )
    qk_norm: str | None = setting(
        "queries and keys are normalized: each head, or the whole width; absent = not",
        quantity="text",
        default=None,
        choices=QK_NORMS,
    )
    attention_scale: float | None = setting(
        "scores are multiplied by this; absent = 1 / sqrt(head width)", quantity="number", default=None, above=0
    )
    attention_softcap: float | None = setting(
        "scores become c tanh(scores / c); absent = no cap", quantity="number", default=None, above=0
    )
    attention_sinks: bool = setting(
        "a learned logit for each head that takes probability and gives nothing", quantity="flag", default=False
    )
    window: int | None = setting(
        "tokens that a local layer sees, itself included; absent = all layers are global", default=None, at_least=1
    )
    global_every: int | None = setting(
        "with a window: every so many-th layer is global; absent = none is", default=None, at_least=2, at_most=10**5
    )

    kv_rank: int | None = setting(
        "latent attention: width of the joint latent of keys and values; absent = ordinary heads",
        default=None,
        at_least=1,
        at_most=10**7,
    )
    q_rank: int | None = setting(
        "latent attention: width of the latent of the queries; absent = projected at once",
        default=None,
        at_least=1,
        at_most=10**7,
    )
    nope_head_dim: int | None = setting(
        "latent attention: width of a head's part without positions", default=None, at_least=1, at_most=10**6
    )
    rope_head_dim: int | None = setting(
        "latent attention: width of a head's rotary part, one key for all heads",
        default=None,
        at_least=2,
        at_most=10**6,
    )
    v_head_dim: int | None = setting("latent attention: width of a value head", default=None, at_least=1, at_most=10**6)

    positions: str = setting("how positions enter", quantity="text", default="rope", choices=POSITIONS)
    extra_positions: int = setting("unused rows before the learned positions (OPT has 2)", default=0, at_least=0)
    rotary_dim: int | None = setting(
        "leading part of a head that rope turns; absent = all of it", default=None, at_least=2, at_most=10**6
    )
    rope_interleaved: bool = setting("rope turns neighbours, not the two halves", quantity="flag", default=False)
    rope_skip_every: int | None = setting(
        "every so many-th layer has no positions; absent = all have", default=None, at_least=1, at_most=10**5
    )
    rope_theta: float = setting("base of the rotary frequencies", quantity="number", default=10000.0, above=0)
    rope_local_theta: float | None = setting(
        "base of the rotary frequencies in local layers; absent = rope_theta", quantity="number", default=None, above=0
    )
    rope_scaling: str | None = setting(
        "how rope_factor stretches the rotary waves; absent = llama3",
        quantity="text",
        default=None,
        choices=ROPE_SCALINGS,
    )
    rope_factor: float | None = setting(
        "long rotary waves are stretched this many times; absent = none", quantity="number", default=None, at_least=1
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
    rope_attention_factor: float = setting(
        "cosines and sines are multiplied by this (yarn, longrope)", quantity="number", default=1.0, above=0
    )
    rope_truncate: bool = setting(
        "the ends of yarn's ramp are rounded outwards to whole pairs", quantity="flag", default=True
    )

    activation: str = setting("nonlinearity of the MLP", quantity="text", default="silu", choices=ACTIVATIONS)
    gated: bool = setting("the MLP is gated (SwiGLU, GEGLU)", quantity="flag", default=True)
    mlp_bias: bool = setting("biases in the MLP", quantity="flag", default=False)

    n_experts: int | None = setting(
        "experts of a mixture-of-experts layer; absent = every layer is dense", default=None, at_least=2, at_most=10**5
    )
    experts_per_token: int = setting("experts that a token passes through", default=2, at_least=1, at_most=10**5)
    expert_d_ff: int | None = setting(
        "inner width of an expert; absent = d_ff", default=None, at_least=1, at_most=10**8
    )
    n_shared_experts: int = setting(
        "experts that every token passes through, as one MLP", default=0, at_least=0, at_most=10**4
    )
    shared_expert_gate: bool = setting(
        "the shared expert's output is gated by a sigmoid", quantity="flag", default=False
    )
    n_dense_layers: int = setting("leading layers that stay dense", default=0, at_least=0, at_most=10**5)
    expert_every: int = setting("every so many-th layer has experts", default=1, at_least=1, at_most=10**5)
    router: str = setting(
        "scores of the experts: softmax over all, sigmoid, or softmax over the chosen",
        quantity="text",
        default="softmax",
        choices=ROUTERS,
    )
    router_bias: bool = setting("the router has a bias", quantity="flag", default=False)
    router_normalize: bool = setting("the chosen scores are made to sum to one", quantity="flag", default=True)
    router_scale: float = setting("the chosen scores are multiplied by this", quantity="number", default=1.0, above=0)
    router_correction: bool = setting(
        "a bias outside the gradient balances the choice (DeepSeek-V3)", quantity="flag", default=False
    )
    router_groups: int = setting(
        "groups of experts, of which the best are chosen first", default=1, at_least=1, at_most=10**5
    )
    router_top_groups: int = setting("groups that are chosen", default=1, at_least=1, at_most=10**5)

    n_predict_ahead: int = setting(
        "multi-token prediction: further tokens, each predicted by a block of its own",
        default=0,
        at_least=0,
        at_most=100,
    )

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def capped_or_sinking(self) -> bool:
        """Whether scores are capped or have sinks, which PyTorch's own fused attention has neither of."""
        return self.attention_softcap is not None or self.attention_sinks

    @property
    def latent(self) -> bool:
        """Whether keys and values come from a joint latent (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""
        return self.kv_rank is not None

    @property
    def head_size(self) -> int:
        """Width of a query and key head."""
        if self.latent and self.nope_head_dim is not None and self.rope_head_dim is not None:
            return self.nope_head_dim + self.rope_head_dim
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """Width of a value head."""
        return self.v_head_dim if self.latent and self.v_head_dim is not None else self.head_size

    @property
    def rotary_size(self) -> int:
        """Width of the part of a head that rope turns."""
        if self.latent and self.rope_head_dim is not None:
            return self.rope_head_dim
        return self.head_size if self.rotary_dim is None else self.rotary_dim

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: the vocabulary, up to the next ``vocab_multiple``."""
        if self.vocab_multiple == 1:
            return self.vocab_size
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.d_ff if self.expert_d_ff is None else self.expert_d_ff
