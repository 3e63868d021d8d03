"""How many nodes a token goes to, where it is sent once to each node that has experts of it (`Layout.expert_send`).

Sizes: E experts, K of them for a token, on M nodes; G groups of experts, of which the router takes g for a token
(DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2: node-limited routing, where a group is what one node has). Experts are
taken to be chosen with equal chances.
"""

from __future__ import annotations

from math import comb
from typing import Any

from trainledger.spec.model import ModelSpec

Number = Any  # a number, or an array of them


def other_nodes(spec: ModelSpec, nodes: Number) -> Number:
    """The expected number of nodes, its own left out, that a token is sent to; ``nodes`` may be an array.

    >>> sizes = {"vocab_size": 8, "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8, "max_seq_len": 8}
    >>> spec = ModelSpec(n_experts=256, experts_per_token=8, **sizes)
    >>> other_nodes(spec, 1), round(other_nodes(spec, 8), 3)
    (0.0, 4.635)
    """
    if not hasattr(nodes, "shape"):
        return (nodes - 1) * _has_one(spec, nodes)
    import numpy as np

    known = {each: (each - 1) * _has_one(spec, each) for each in set(nodes.ravel().tolist())}
    return np.array([known[each] for each in nodes.ravel().tolist()]).reshape(nodes.shape)


def _has_one(spec: ModelSpec, nodes: int) -> float:
    """The chance that a node has at least one of a token's experts.

    One minus that of all K being drawn from the others: C(E - E / M, K) / C(E, K); where groups are drawn first, the
    same within the experts of those, by how many of the drawn groups are the node's.
    """
    assert spec.n_experts is not None
    experts, chosen, groups, drawn = spec.n_experts, spec.experts_per_token, spec.router_groups, spec.router_top_groups
    here = experts // nodes
    if drawn >= groups or (groups % nodes and nodes % groups):
        return 1 - _missed(experts, here, chosen)
    candidates, of_group = drawn * experts // groups, experts // groups
    if groups >= nodes:
        own = groups // nodes
        hits = (
            (comb(own, each) * comb(groups - own, drawn - each), each * of_group) for each in range(min(own, drawn) + 1)
        )
        return sum(ways * (1 - _missed(candidates, size, chosen)) for ways, size in hits) / comb(groups, drawn)
    return drawn / groups * (1 - _missed(candidates, here, chosen))


def _missed(experts: int, here: int, chosen: int) -> float:
    """The chance that none of the ``chosen`` of so many experts is among those that are ``here``."""
    return comb(experts - here, chosen) / comb(experts, chosen)
