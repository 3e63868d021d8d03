"""FLOPs of a forward by component, from the shapes of a model alone: equal to those of a step's account.

Sizes: T tokens of a sequence, H query heads, K and W widths of a key's and a value's head.
"""

from __future__ import annotations

from trainledger.ledger import rules
from trainledger.ledger.core.leaves import component_of
from trainledger.ledger.entry import Int
from trainledger.ledger.model.parameters import MTP, mtp_modules, named_shapes
from trainledger.spec.layers import LayerKind, last_kind, segments
from trainledger.spec.model import ModelSpec

SCORES = "attention scores"  # queries times keys, and probabilities times values
_LOOKED_UP = ("embedding", "positions", "norms")  # no matmuls


def forward_flops(spec: ModelSpec, tokens: Int, *, attention: str = "sdpa") -> dict[str, Int]:
    """FLOPs of the matmuls and of attention in the forward of one sequence, by component (`component_of`, `SCORES`).

    Attention is counted dense; ``flash`` kernels know windows and compute no more than those. A token passes through
    ``per_token`` experts. Modules of multi-token prediction are one component with their attention, without their head.

    >>> from trainledger.answers.load import model
    >>> found = forward_flops(model("gpt2"), 1024)
    >>> found["mlp"] == 2 * 1024 * 12 * 8 * 768**2
    True
    """
    found: dict[str, Int] = {}
    for name, shape, times in named_shapes(spec):
        if not name.startswith("mtp."):
            _add(found, component_of(name), times * _matmul(spec, name, shape, tokens))
    if spec.tie_embeddings:
        _add(found, "head", _head(spec, tokens))
    for segment in segments(spec):
        for kind in segment.kinds:
            _add(found, SCORES, segment.count * _scores(spec, kind, tokens, attention))
    for index in range(spec.n_mtp_layers):
        left = tokens - 2 - index
        _add(found, MTP, _mtp(spec, index, left, attention))
        _add(found, "head", _head(spec, left))
    return {name: flops for name, flops in found.items() if not isinstance(flops, int) or flops}


def _mtp(spec: ModelSpec, index: int, tokens: Int, attention: str) -> Int:
    """One module of multi-token prediction, without the head that it shares."""
    prefix = f"mtp.{index}."
    matmuls = sum(_matmul(spec, name, shape, tokens) for name, shape in mtp_modules(spec) if name.startswith(prefix))
    return matmuls + _scores(spec, last_kind(spec), tokens, attention)


def _head(spec: ModelSpec, tokens: Int) -> Int:
    return rules.matmul_flops(tokens, spec.padded_vocab, spec.d_model)


def _matmul(spec: ModelSpec, name: str, shape: tuple[Int, ...], tokens: Int) -> Int:
    """FLOPs of the matmul with a parameter: none for vectors and embeddings."""
    if len(shape) < 2 or component_of(name) in _LOOKED_UP or name.endswith("bias"):
        return 0
    *stacked, d_out, d_in = shape
    if stacked:
        assert spec.experts is not None
        tokens = tokens * spec.experts.per_token
    return rules.matmul_flops(tokens, d_out, d_in)


def _scores(spec: ModelSpec, kind: LayerKind, tokens: Int, attention: str) -> Int:
    keys = rules.keys_seen(tokens, kind.window if attention == "flash" else None)
    return rules.attention_flops(1, spec.attention.n_heads, tokens, keys, spec.head_size, spec.value_size)


def _add(found: dict[str, Int], component: str, flops: Int) -> None:
    found[component] = found.get(component, 0) + flops
