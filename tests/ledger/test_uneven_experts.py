"""Uneven routing as a stated factor: what the rank with the most tokens holds, computes and receives."""

from typing import Any

import pytest

from trainledger.answers.load import load
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import accounts
from trainledger.spec.problem import InvalidInput

N, D, F, K = 2 * 512, 256, 128, 2


def ledger_of(imbalance: float, *, layers: int = 2, expert: int = 4, send: str = "", **recipe: Any) -> Ledger:
    run = load({
        "model": {
            "vocab_size": 512, "d_model": D, "n_layers": layers, "max_seq_len": 512, "attention": {"n_heads": 4},
            "feed_forward": {
                "kind": "experts", "d_ff": F, "n_experts": 8, "per_token": K, "imbalance": imbalance, "gated": True,
            },
        },
        "recipe": {
            "seq_len": 512, "micro_batch": 2, "global_batch": 8, "steps": 1, "attention": "flash", "precision": "bf16",
            **recipe,
        },
        "layout": {"shard": 4, "expert": expert, "zero": 3, **({"expert_send": send} if send else {})},
        "cluster": {"device": "h100-sxm", "count": 4},
    })  # fmt: skip
    return accounts(run, backend="cuda")[0].ledger


def grouped(ledger: Ledger) -> int:
    return sum(entry.flops * entry.times for entry in ledger if entry.name == "grouped_mm")


@pytest.mark.parametrize("imbalance", [1.25, 2.0])
def test_the_heaviest_rank_multiplies_and_keeps_as_many_times_the_mean(imbalance: float) -> None:
    even, uneven = ledger_of(1.0), ledger_of(imbalance)
    assert grouped(uneven) == imbalance * grouped(even)
    of_layer = [
        ledger_of(factor, layers=3).kept_nbytes - ledger_of(factor, layers=2).kept_nbytes for factor in (1.0, imbalance)
    ]
    # Of each row beyond the mean: it, both halves of its inner width and their product in 2 bytes, the activation of
    # the gate, and three indices of 8 bytes.
    more = (imbalance - 1) * N * K
    assert more * (2 * D + 6 * F) <= of_layer[1] - of_layer[0] <= more * (4 * D + 10 * F + 24)
    assert uneven.peak().nbytes > even.peak().nbytes


def test_what_is_received_grows_and_what_a_rank_sends_back_comes_whole() -> None:
    def sent(ledger: Ledger) -> list[int]:
        return [entry.payload for entry in ledger if entry.name == "all_to_all" and entry.payload > 1000]

    assert {1.5 * payload for payload in sent(ledger_of(1.0))} == set(sent(ledger_of(1.5)))


def test_one_rank_has_all_experts_and_all_tokens() -> None:
    assert ledger_of(1.5, expert=1) == ledger_of(1.0, expert=1)


def test_places_of_a_capacity_are_even() -> None:
    with pytest.raises(InvalidInput, match=r"imbalance = 1\.5: experts with a capacity have as many places on every"):
        ledger_of(1.5, expert_dispatch={"kind": "capacity", "factor": 1.0})
