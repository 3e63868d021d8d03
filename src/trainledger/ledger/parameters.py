"""The parameters of a model: which there are, how large, and what they add up to.

Sizes: D d_model, H query heads, G key-value heads, K head width, F d_ff, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.frozen import frozen
from trainledger.ledger.array import Leaf
from trainledger.ledger.entry import Int
from trainledger.spec.model import ModelSpec


@frozen
class ParameterCount:
    """Trained elements of a model. ``active`` are those that one token passes through: all of a dense model's."""

    total: Int
    active: Int
    by_component: dict[str, Int]


def parameters(spec: ModelSpec) -> ParameterCount:
    """The parameters of a model by component, a tied embedding counted once (as ``embedding``).

    >>> from trainledger.api import model
    >>> parameters(model("gpt2")).total
    124439808
    >>> parameters(model("llama-3-8b")).total
    8030261248
    """
    leaves = leaves_of(spec)
    block, layers = leaves.block, spec.n_layers

    def elements(*each: Leaf | None) -> Int:
        return sum(leaf.elements for leaf in each if leaf is not None)

    attention = elements(block.q, block.k, block.v, block.o, *block.attention_biases)
    norms = elements(block.norm1, block.norm1_bias, block.norm2, block.norm2_bias)
    by_component = {
        "embedding": elements(leaves.tokens),
        "positions": elements(leaves.positions),
        "attention": layers * attention,
        "mlp": layers * elements(block.gate, block.up, block.down, *block.mlp_biases),
        "norms": layers * norms + elements(leaves.norm, leaves.norm_bias),
        "head": 0 if spec.tie_embeddings else elements(leaves.head),
    }
    total = sum(by_component.values())
    return ParameterCount(total, total, by_component)


@frozen
class BlockLeaves:
    """The parameters of one block; absent where the spec has none."""

    norm1: Leaf
    norm1_bias: Leaf | None
    q: Leaf
    k: Leaf
    v: Leaf
    o: Leaf
    attention_biases: tuple[Leaf | None, ...]
    norm2: Leaf
    norm2_bias: Leaf | None
    gate: Leaf | None
    up: Leaf
    down: Leaf
    mlp_biases: tuple[Leaf | None, ...]

    def all(self) -> Iterator[Leaf]:
        """In the order in which torch names them."""
        q_bias, k_bias, v_bias, o_bias = self.attention_biases
        gate_bias, up_bias, down_bias = self.mlp_biases
        ordered = (
            self.norm1, self.norm1_bias, self.q, q_bias, self.k, k_bias, self.v, v_bias, self.o, o_bias,
            self.norm2, self.norm2_bias, self.gate, gate_bias, self.up, up_bias, self.down, down_bias,
        )  # fmt: skip
        return (each for each in ordered if each is not None)


@frozen
class ModelLeaves:
    """The parameters of a model; one `BlockLeaves` stands for each of the equal blocks."""

    tokens: Leaf
    positions: Leaf | None
    block: BlockLeaves
    norm: Leaf
    norm_bias: Leaf | None
    head: Leaf
    n_layers: Int

    def outside(self) -> tuple[list[Leaf], list[Leaf]]:
        """Those before the blocks and those after, in torch's order, a tied head not counted again."""
        before = [each for each in (self.tokens, self.positions) if each is not None]
        after = [each for each in (self.norm, self.norm_bias) if each is not None]
        return before, after if self.head is self.tokens else [*after, self.head]

    def elements(self) -> Int:
        before, after = self.outside()
        in_block = sum(each.elements for each in self.block.all())
        return sum(each.elements for each in (*before, *after)) + self.n_layers * in_block

    def tensors(self) -> Int:
        before, after = self.outside()
        return len(before) + len(after) + self.n_layers * len(list(self.block.all()))


def leaves_of(spec: ModelSpec) -> ModelLeaves:
    """The parameters that a spec has."""
    D, K, V = spec.d_model, spec.head_size, spec.vocab_size
    H, G, F = spec.n_heads, spec.kv_heads, spec.d_ff

    def matrix(path: str, elements: Int, uses: int = 1) -> Leaf:
        return Leaf(path, elements, decayed=True, uses=uses)

    def vector(path: str, elements: Int, exists: bool = True) -> Leaf | None:
        return Leaf(path, elements, decayed=False) if exists else None

    def scale(path: str) -> Leaf:
        return Leaf(path, D, decayed=False)

    attention, mlp = "self_attn", "mlp"
    block = BlockLeaves(
        norm1=scale("input_layernorm.weight"),
        norm1_bias=vector("input_layernorm.bias", D, spec.norm_bias),
        q=matrix(f"{attention}.q_proj.weight", D * H * K),
        k=matrix(f"{attention}.k_proj.weight", D * G * K),
        v=matrix(f"{attention}.v_proj.weight", D * G * K),
        o=matrix(f"{attention}.o_proj.weight", H * K * D),
        attention_biases=tuple(
            vector(f"{attention}.{name}_proj.bias", size, spec.attention_bias)
            for name, size in (("q", H * K), ("k", G * K), ("v", G * K), ("o", D))
        ),
        norm2=scale("post_attention_layernorm.weight"),
        norm2_bias=vector("post_attention_layernorm.bias", D, spec.norm_bias),
        gate=matrix(f"{mlp}.gate_proj.weight", D * F) if spec.gated else None,
        up=matrix(f"{mlp}.up_proj.weight", D * F),
        down=matrix(f"{mlp}.down_proj.weight", F * D),
        mlp_biases=(
            vector(f"{mlp}.gate_proj.bias", F, spec.mlp_bias and spec.gated),
            vector(f"{mlp}.up_proj.bias", F, spec.mlp_bias),
            vector(f"{mlp}.down_proj.bias", D, spec.mlp_bias),
        ),
    )
    tokens = matrix("embed_tokens.weight", V * D, uses=2 if spec.tie_embeddings else 1)
    return ModelLeaves(
        tokens=tokens,
        positions=matrix("embed_positions.weight", spec.max_seq_len * D) if spec.positions == "learned" else None,
        block=block,
        norm=scale("norm.weight"),
        norm_bias=vector("norm.bias", D, spec.norm_bias),
        head=tokens if spec.tie_embeddings else matrix("lm_head.weight", D * V),
        n_layers=spec.n_layers,
    )
