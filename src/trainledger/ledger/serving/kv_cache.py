"""The key-value cache in closed form: the elements that a token leaves in each layer, and the tokens a layer keeps.

Sizes: G key-value heads, K width of keys, W of values, R latent rank, Q rotary width.
"""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.ledger import rules
from trainledger.ledger.entry import Int
from trainledger.spec.layers import segments
from trainledger.spec.model import ModelSpec
from trainledger.spec.serving import CACHE_FORMATS


@frozen
class LayersCache:
    """What so many layers of a kind remember: ``heads`` are (count, width) pairs of a token, ``window`` their reach."""

    layers: Int
    window: int | None
    heads: tuple[tuple[Int, Int], ...]

    def places(self, context: Int) -> Int:
        """Tokens of a sequence that a layer keeps."""
        return rules.keys_seen(context, self.window)


@frozen
class KVCache:
    """The cache of a model in a format."""

    kinds: tuple[LayersCache, ...]
    format: str

    def token_nbytes(self) -> Int:
        """Bytes that one more token takes while every layer still keeps all tokens."""
        return sum(each.layers * self._one(each) for each in self.kinds)

    def nbytes(self, batch: Int, context: Int) -> Int:
        """Bytes of ``batch`` sequences of ``context`` tokens; a layer with a window keeps no more than that.

        >>> from trainledger.api.load import model
        >>> kv_cache(model("llama-2-7b"), "bf16").nbytes(1, 1), kv_cache(model("deepseek-v3"), "bf16").nbytes(1, 1)
        (524288, 70272)
        """
        return sum(batch * each.places(context) * each.layers * self._one(each) for each in self.kinds)

    def _one(self, kind: LayersCache) -> Int:
        format = CACHE_FORMATS[self.format]
        return sum(format.nbytes(count * width, width) for count, width in kind.heads)


def heads_of(spec: ModelSpec) -> tuple[tuple[Int, Int], ...]:
    """(count, width) of what a layer remembers of a token: keys and values of the key-value heads, or of latent
    attention the latent and the one rotary key (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.3, table 1)."""
    if spec.latent:
        return ((1, spec.latent.kv_rank + spec.rotary_size),)
    return ((spec.kv_heads, spec.head_size), (spec.kv_heads, spec.value_size))


def kv_cache(spec: ModelSpec, format: str = "bf16") -> KVCache:
    """The cache of a model, layer by layer kind; multi-token prediction modules have none here."""
    counts: dict[int | None, Int] = {}
    for segment in segments(spec):
        for kind in segment.kinds:
            counts[kind.window] = counts.get(kind.window, 0) + segment.count
    return KVCache(tuple(LayersCache(count, window, heads_of(spec)) for window, count in counts.items()), format)
