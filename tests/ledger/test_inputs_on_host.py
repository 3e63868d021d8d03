"""Inputs of recomputed blocks in host memory: bytes on both sides by hand, and the same step otherwise."""

from typing import Any

import pytest

from trainledger.answers.load import load
from trainledger.ledger.entry import HOST
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import accounts

B, T, D, LAYERS = 2, 512, 256, 6


def ledger_of(inputs: str, *, layers: int = LAYERS, batch: int = B, **layout: Any) -> Ledger:
    table = {
        "model": {
            "vocab_size": 512, "d_model": D, "n_layers": layers, "max_seq_len": T, "attention": {"n_heads": 4},
            "feed_forward": {"d_ff": 512},
        },
        "recipe": {
            "seq_len": T, "micro_batch": batch, "global_batch": batch * layout.get("shard", 1), "steps": 1,
            "precision": "bf16", "attention": "flash",
            "activation_checkpointing": {"kind": "full", "inputs": inputs},
        },
        "layout": layout, "cluster": {"device": "h100-sxm", "count": layout.get("shard", 1)},
    }  # fmt: skip
    return accounts(load(table), backend="cuda")[0].ledger


@pytest.mark.parametrize("layout", [{}, {"shard": 4, "zero": 3}])
def test_each_input_goes_to_the_host_and_comes_back_once(layout: dict[str, Any]) -> None:
    ledger = ledger_of("host", **layout)
    moved = {
        name: sum(entry.times for entry in ledger if entry.name == name and entry.kind == "transfer")
        for name in ("to_host", "to_device")
    }
    assert moved == {"to_host": LAYERS, "to_device": LAYERS}
    sent = sum(dict(entry.allocated).get(HOST, 0) * entry.times for entry in ledger if entry.name == "to_host")
    assert sent == LAYERS * B * T * D * 2


def test_a_layer_more_keeps_nothing_more_on_the_device() -> None:
    def activations(inputs: str, layers: int) -> int:
        peak = ledger_of(inputs, layers=layers, batch=32).peak()
        return sum(nbytes for name, nbytes in peak.by_category.items() if name not in (HOST, *states))

    states = ("parameters", "gradients", "optimizer state")
    of_layer = 32 * T * D * 2
    assert activations("device", 8) - activations("device", 6) == pytest.approx(2 * of_layer, abs=of_layer // 4)
    assert activations("host", 8) - activations("host", 6) <= of_layer // 4


def test_what_is_computed_is_the_same() -> None:
    def computed(inputs: str) -> int:
        return sum(entry.flops * entry.times for entry in ledger_of(inputs))

    assert computed("host") == computed("device")
