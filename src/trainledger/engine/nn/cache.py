"""Keys and values of the tokens so far, so that one more token costs one position and not all again.

Shapes: B sequences, T new tokens, S places, G key-value heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from trainledger.spec.layers import kind_of
from trainledger.spec.model import ModelSpec


class LayerCache:
    """The keys and values of one layer; of latent attention the latent and the rotated key.

    A layer with a window has no more places than it sees tokens; a new token replaces the oldest.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], batch: int, places: int, like: Tensor) -> None:
        self.parts_BSGK = [like.new_empty(batch, places, count, width) for count, width in heads]
        self.places = places
        self.past = 0
        self._next = 0

    def remember(self, *new_BTGK: Tensor) -> Sequence[Tensor]:
        """Write new tokens; what attention reads: these themselves at first, later all that the layer still sees.

        ValueError for several tokens at once after others.
        """
        n_tokens = new_BTGK[0].shape[1]
        if self.past and n_tokens > 1:
            raise ValueError(f"after {self.past} cached tokens one token at a time is taken, not {n_tokens}")
        kept = min(n_tokens, self.places)
        for part_BSGK, each_BTGK in zip(self.parts_BSGK, new_BTGK, strict=True):
            part_BSGK[:, self._next : self._next + kept].copy_(each_BTGK[:, n_tokens - kept :])
        self._next = (self._next + kept) % self.places
        first, self.past = self.past == 0, self.past + n_tokens
        return new_BTGK if first else [tensor[:, : min(self.past, self.places)] for tensor in self.parts_BSGK]


class Cache:
    """The caches of all layers of a model, for ``batch`` sequences of at most ``n_tokens``."""

    def __init__(self, spec: ModelSpec, like: Tensor, batch: int, n_tokens: int) -> None:
        """A cache of ``like``'s dtype and device."""
        windows = [kind_of(spec, layer).window for layer in range(spec.n_layers)]
        places = [n_tokens if window is None else min(window, n_tokens) for window in windows]
        self.layers = [LayerCache(heads_of(spec), batch, place, like) for place in places]
        self.n_tokens = n_tokens

    @property
    def past(self) -> int:
        """Tokens of each sequence that are in it."""
        return self.layers[0].past

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer.parts_BSGK)

    @contextmanager
    def used_by(self, blocks: nn.ModuleList) -> Iterator[None]:
        """Inside, the blocks of a model write their keys and values here."""
        attentions = [block.self_attn for block in blocks]
        for attention, layer in zip(attentions, self.layers, strict=True):
            attention.cache = layer  # type: ignore[union-attr]
        try:
            yield
        finally:
            for attention in attentions:
                attention.cache = None  # type: ignore[union-attr]


def heads_of(spec: ModelSpec) -> list[tuple[int, int]]:
    """Heads and their width of each tensor that a layer remembers."""
    if spec.latent:
        assert spec.latent.kv_rank is not None
        return [(1, spec.latent.kv_rank + spec.rotary_size)]
    return [(spec.kv_heads, spec.head_size), (spec.kv_heads, spec.value_size)]
