"""Keys and values of the tokens so far, so that one more token costs one position and not all again.

Shapes: B sequences, T new tokens, S places, G key-value heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, float32, nn

from trainledger.spec.layers import kind_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem


class LayerCache:
    """The keys and values of one layer; of latent attention the latent and the rotated key.

    A layer with a window has no more places than it sees tokens; a new token replaces the oldest.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], batch: int, places: int, like: Tensor) -> None:
        self.parts_BSGK = [like.new_empty(batch, places, count, width) for count, width in heads]
        self.places = places
        self.past = 0
        self._next = 0

    @property
    def tensors(self) -> list[Tensor]:
        return self.parts_BSGK

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


class MixerCache:
    """What a mixer keeps of the tokens so far, in fp32: its state, and the last inputs of its convolution."""

    def __init__(self, spec: ModelSpec, batch: int, like: Tensor) -> None:
        part = spec.mixer
        assert part is not None
        sizes = part.sizes(spec.d_model)
        self.state = like.new_zeros(batch, *sizes.state, dtype=float32) if sizes.state else None
        self.tail_BWC = like.new_zeros(batch, part.conv_width - 1, sizes.channels, dtype=float32)
        self.past = 0

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tail_BWC] if self.state is None else [self.state, self.tail_BWC]


class Cache:
    """The caches of all layers of a model, for ``batch`` sequences of at most ``n_tokens``."""

    def __init__(self, spec: ModelSpec, like: Tensor, batch: int, n_tokens: int) -> None:
        """A cache of ``like``'s dtype and device."""
        if spec.attention.chunked and n_tokens > (spec.attention.window or n_tokens):
            rule = "is not decoded beyond its first chunk: a cache here keeps the last tokens, not those of a chunk"
            raise InvalidInput([Problem("model.attention.chunked", True, rule, False)])
        kinds = [kind_of(spec, layer) for layer in range(spec.n_layers)]
        places = [n_tokens if kind.window is None else min(kind.window, n_tokens) for kind in kinds]
        self.layers: list[dict[str, LayerCache | MixerCache]] = [{} for _ in kinds]
        for layer, kind, place in zip(self.layers, kinds, places, strict=True):
            if kind.attends:
                layer["self_attn"] = LayerCache(heads_of(spec.of_layers(kind.window)), batch, place, like)
            if kind.chooses and spec.indexer is not None:
                layer["self_attn.indexer"] = LayerCache([(1, spec.indexer.head_dim)], batch, place, like)
            if kind.mixes:
                layer["mixer"] = MixerCache(spec, batch, like)
        self.n_tokens = n_tokens

    @property
    def past(self) -> int:
        """Tokens of each sequence that are in it."""
        return max(part.past for layer in self.layers for part in layer.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for kept in layer.values() for part in kept.tensors)

    @contextmanager
    def used_by(self, blocks: nn.ModuleList) -> Iterator[None]:
        """Inside, the blocks of a model write their keys, values and states here."""
        modules: list[tuple[Any, LayerCache | MixerCache]] = []
        for block, layer in zip(blocks, self.layers, strict=True):
            modules += [(block.get_submodule(name), kept) for name, kept in layer.items()]
        for module, kept in modules:
            module.cache = kept
        try:
            yield
        finally:
            for module, _ in modules:
                module.cache = None


def heads_of(spec: ModelSpec) -> list[tuple[int, int]]:
    """Heads and their width of each tensor that a layer remembers."""
    if spec.latent:
        assert spec.latent.kv_rank is not None
        return [(1, spec.latent.kv_rank + spec.rotary_size)]
    return [(spec.kv_heads, spec.head_size), (spec.kv_heads, spec.value_size)]
