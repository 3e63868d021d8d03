"""The model: a decoder-only Transformer as the sizes and choices that determine its cost."""

from __future__ import annotations

from dataclasses import replace

from trainledger.spec.block import (
    Alibi,
    Dense,
    Experts,
    Indexer,
    Latent,
    LayerNorm,
    Learned,
    MultiHead,
    NoPositions,
    RMSNorm,
    Rope,
)
from trainledger.spec.frozen import frozen
from trainledger.spec.mixers import GatedDelta, KimiDelta, Mamba2, Mixer, ShortConv
from trainledger.spec.parts import part
from trainledger.spec.setting import setting
from trainledger.spec.units import round_up

# Of the head of logits, each with the value that a model of scores has.
OF_LOGITS = {"tie_embeddings": False, "head_bias": False, "logit_scale": 1.0, "logit_softcap": None}
NORM_PLACES = ("pre", "post", "sandwich", "after-add")
BLOCKS = ("serial", "parallel", "parallel-two-norms")


@frozen(kw_only=True)
class ModelSpec:
    """Sizes and choices of a decoder with causal attention.

    >>> tiny = ModelSpec(vocab_size=256, d_model=64, n_layers=2, max_seq_len=128, attention=MultiHead(n_heads=4),
    ...     feed_forward=Dense(d_ff=256))
    >>> tiny.kv_heads, tiny.head_size
    (4, 16)
    """

    name: str = setting("name of the model in reports", "model")
    vocab_size: int = setting("tokens in the vocabulary", at_least=1, at_most=10**8)
    vocab_multiple: int = setting(
        "rows of the embedding are padded to a multiple of this", 1, at_least=1, at_most=10**6
    )
    d_model: int = setting("hidden size", at_least=1, at_most=10**7)
    n_layers: int = setting("Transformer blocks", at_least=1, at_most=10**5)
    max_seq_len: int = setting(
        "longest sequence (rows of learned positions)", quantity="length", at_least=1, at_most=10**9
    )
    n_mtp_layers: int = setting(
        "multi-token prediction: additional tokens, each predicted by a separate block", 0, at_least=0, at_most=100
    )
    tie_embeddings: bool = setting("input and output embedding are one matrix", False)
    embedding_scale: float = setting("factor of the embedded tokens", 1.0, above=0)
    embedding_norm: bool = setting("a norm follows the embedding (BLOOM)", False)
    scores: bool = setting(
        "a score of each token in place of logits, of which a sequence's last counts: a reward model, as "
        "AutoModelForSequenceClassification with one label (recipe.objective = reward)",
        False,
    )
    head_bias: bool = setting("a bias in the output head", False)
    logit_scale: float = setting("factor of the logits", 1.0, above=0)
    logit_softcap: float | None = setting("logits become c tanh(logits / c); absent = no cap", None, above=0)
    norm_place: str = setting(
        "pre = before attention and MLP, post = on their outputs, sandwich = both, after-add = on the sum (the first "
        "Transformer)",
        "pre",
        choices=NORM_PLACES,
    )
    block: str = setting(
        "serial; parallel = attention and MLP both read the block's input, through one norm or two",
        "serial",
        choices=BLOCKS,
    )
    norm: RMSNorm | LayerNorm = part("normalization", RMSNorm, LayerNorm, default=RMSNorm())
    attention: MultiHead | Latent = part("attention of each block", MultiHead, Latent)
    positions: Rope | Learned | Alibi | NoPositions = part(
        "how positions enter", Rope, Learned, Alibi, NoPositions, default=Rope()
    )
    feed_forward: Dense | Experts = part("the MLP of each block", Dense, Experts)
    mixer: Mixer | None = part(
        "what some layers have instead of attention or beside it; absent = nothing",
        Mamba2,
        GatedDelta,
        KimiDelta,
        ShortConv,
        default=None,
    )
    layers: str | None = setting(
        "the layers in order, a letter each, repeated: A = attention and MLP, G = the same where attention is global, "
        "R = mixer and MLP, B = both side by side and MLP; with one branch: * = attention, M = mixer, - = MLP, "
        "E = experts; absent = A for all",
        None,
    )

    @property
    def latent(self) -> Latent | None:
        """The attention where keys and values come from a joint latent."""
        return self.attention if isinstance(self.attention, Latent) else None

    @property
    def indexer(self) -> Indexer | None:
        """The choice of keys where latent attention is sparse."""
        return self.latent.indexer if self.latent is not None else None

    def of_layers(self, window: int | None) -> ModelSpec:
        """The spec with the heads of layers with this window, and of local ones the angles: own base, no scaling."""
        heads, rope = self.attention, self.rope
        if isinstance(heads, MultiHead) and heads.in_global is not None and window is None:
            own = {name: value for name, value in vars(heads.in_global).items() if value is not None}
            return replace(self, attention=replace(heads, in_global=None, **own))
        if rope is None or rope.local_theta is None or window is None:
            return self
        dim = rope.dim if rope.local_dim is None else rope.local_dim
        angles = replace(rope, theta=rope.local_theta, dim=dim, local_theta=None, local_dim=None, scaling=None)
        return replace(self, positions=angles)

    @property
    def leading_layers(self) -> int:
        """The layers before those whose kinds repeat: without experts, or with a choice of keys each."""
        dense, part = self.experts.n_dense_layers if self.experts is not None else 0, self.indexer
        return dense if part is None or part.every == 1 else max(dense, part.leading - 1)

    @property
    def experts(self) -> Experts | None:
        """The MLP where layers have experts."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None

    @property
    def expert_d_model(self) -> int:
        """Width of what an expert reads and writes: less than the hidden size where projections are around them."""
        return self.experts.expert_d_model or self.d_model if self.experts is not None else self.d_model

    @property
    def rope(self) -> Rope | None:
        """The positions where they are rotary."""
        return self.positions if isinstance(self.positions, Rope) else None

    @property
    def kv_heads(self) -> int:
        """Key-value heads; latent attention has one for each query head."""
        heads = self.attention
        return heads.n_heads if heads.n_kv_heads is None else heads.n_kv_heads

    @property
    def served(self) -> ModelSpec:
        """The model as it is served: without what training alone has, the modules of multi-token prediction."""
        return replace(self, n_mtp_layers=0)

    @property
    def unserved(self) -> str:
        """The parts that `served` leaves out, in words; empty where that is nothing."""
        return f"{self.n_mtp_layers} modules of multi-token prediction are left out" if self.n_mtp_layers else ""

    @property
    def least_seq_len(self) -> int:
        """The fewest tokens of a sequence: each module of multi-token prediction needs one more."""
        return self.n_mtp_layers + 2 if self.n_mtp_layers else 1

    @property
    def embeds_at_end(self) -> bool:
        """The end of the model reads the embedding too: a tied head, or multi-token prediction."""
        return self.tie_embeddings or self.n_mtp_layers > 0

    @property
    def head_size(self) -> int:
        """Width of a query and key head."""
        heads = self.attention
        if isinstance(heads, Latent):
            return heads.nope_head_dim + heads.rope_head_dim
        return self.d_model // heads.n_heads if heads.head_dim is None else heads.head_dim

    @property
    def value_size(self) -> int:
        """Width of a value head."""
        return self.head_size if self.attention.v_head_dim is None else self.attention.v_head_dim

    @property
    def rotary_size(self) -> int:
        """Width of the part of a head that rope rotates."""
        if isinstance(self.attention, Latent):
            return self.attention.rope_head_dim
        return self.head_size if self.rope is None or self.rope.dim is None else self.rope.dim

    @property
    def output_bias(self) -> bool:
        """The attention's output projection has a bias."""
        heads = self.attention
        return heads.bias if heads.output_bias is None else heads.output_bias

    @property
    def head_rows(self) -> int:
        """Outputs of the head for a token: logits, or one score."""
        return 1 if self.scores else self.padded_vocab

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: the vocabulary, rounded up to a multiple of ``vocab_multiple``."""
        if self.vocab_multiple == 1:
            return self.vocab_size
        return round_up(self.vocab_size, self.vocab_multiple)
