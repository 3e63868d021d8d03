"""FLOPs of operators that meet each of some vectors with each of others: distances, and forms of two vectors.

x: [..., P, D], y: [..., R, D].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainledger.ledger import rules

Args = tuple[Any, ...]
Flops = tuple[int, int]


def _all_distances(args: Args, out: Any) -> Flops:
    """Each of some vectors from each of others, by one product of both with their squares appended."""
    flops = rules.matmul_flops(1, out.numel(), args[0].shape[-1] + 2)
    return flops, flops


def _trilinear(args: Args, out: Any) -> Flops:
    """Two products and a sum for each term of three tensors that are expanded to each other."""
    terms, dims = 1, args[0].dim() + len(args[3])
    shapes = [iter(each.shape) for each in args[:3]]
    for dim in range(dims):
        terms *= max(1 if dim in new else next(shape) for shape, new in zip(shapes, args[3:6], strict=True))
    return 3 * terms, 3 * terms


def _each_distance(args: Args, out: Any) -> Flops:
    """A difference, its power and a sum for each coordinate."""
    x, y = (args[0], args[1]) if args[0].shape[-1] == args[1].shape[-1] else (args[1], args[2])
    return 3 * x.numel() * y.shape[-2], 0


RULES: dict[str, tuple[str, Callable[[Args, Any], Flops]]] = {
    "aten::_trilinear": ("matmul", _trilinear),
    "aten::_euclidean_dist": ("matmul", _all_distances),
    "aten::_cdist_forward": ("reduction", _each_distance),
    "aten::_cdist_backward": ("reduction", _each_distance),
}
