"""MXFP8 and NVFP4 linear layers: bytes by hand (OCP Microscaling v1.0, table 1; arXiv 2509.25149), and matmuls."""

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from trainledger.answers.load import load
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import accounts
from trainledger.spec.convert.megatron import from_arguments
from trainledger.spec.convert.megatron.arguments import Arguments

N, D, F, KV = 2 * 1024, 512, 2048, 128  # tokens of a micro-batch, widths
LINEAR = {"q": (D, D), "k": (KV, D), "v": (KV, D), "o": (D, D), "gate": (F, D), "up": (F, D), "down": (D, F)}
WEIGHTS = sum(rows * columns for rows, columns in LINEAR.values())
BITS = {"mxfp8": 8 + Fraction(8, 32), "nvfp4": 4 + Fraction(8, 16)}


def ledger_of(kind: str, layers: int = 2, *, layout: dict[str, Any] | None = None, **recipe: Any) -> Ledger:
    precision = {"kind": kind, "master_weights": True, "gradient_dtype": "fp32", **recipe.pop("precision", {})}
    run = load({
        "model": {
            "vocab_size": 1024, "d_model": D, "n_layers": layers, "max_seq_len": 1024,
            "attention": {"n_heads": 8, "n_kv_heads": 2}, "feed_forward": {"d_ff": F},
        },
        "recipe": {
            "seq_len": 1024, "micro_batch": 2, "global_batch": 4, "steps": 1, "framework": "megatron-core",
            "attention": "flash", "precision": precision, **recipe,
        },
        "layout": layout or {},
        "cluster": {"device": "b200", "count": (layout or {}).get("tensor", 1)},
    })  # fmt: skip
    return accounts(run, backend="cuda")[0].ledger


def of_a_layer(kind: str, **changes: Any) -> int:
    """Bytes kept of one layer."""
    return ledger_of(kind, 3, **changes).kept_nbytes - ledger_of(kind, 2, **changes).kept_nbytes


@pytest.mark.parametrize("kind", BITS)
def test_backward_keeps_low_columns_of_inputs_and_weights(kind: str) -> None:
    """Inputs of q, k, v (one), of o, of gate and up (one) and of down, and without caching every weight's columns."""
    inputs, scales = N * (3 * D + F), (4 + len(LINEAR)) * (4 if kind == "nvfp4" else 0)
    low = (inputs + WEIGHTS) * BITS[kind] / 8 + scales
    assert of_a_layer(kind) - low == of_a_layer("bf16") - 2 * inputs


@pytest.mark.parametrize("kind", BITS)
def test_cached_weights_are_two_copies(kind: str) -> None:
    def resident(layers: int, caching: bool) -> int:
        ledger = ledger_of(kind, layers, precision={"weight_caching": caching})
        return sum(nbytes for _, nbytes in ledger.resident)

    copies = [resident(layers, True) - resident(layers, False) for layers in (2, 3)]
    tensors = 2 * len(LINEAR) * (4 if kind == "nvfp4" else 0)
    assert copies[1] - copies[0] == 2 * WEIGHTS * BITS[kind] / 8 + tensors


def flops_by_dtype(ledger: Ledger) -> Counter[str]:
    flops: Counter[str] = Counter()
    for entry in ledger:
        if entry.kind == "matmul":
            flops[entry.dtype] += entry.flops * entry.times
    return flops


@pytest.mark.parametrize("kind", BITS)
def test_the_same_matmuls_in_another_format(kind: str) -> None:
    wide, low = flops_by_dtype(ledger_of("bf16")), flops_by_dtype(ledger_of(kind))
    assert sum(low.values()) == sum(wide.values())
    assert low[kind] == 3 * 2 * (2 * N) * 2 * WEIGHTS  # two micro-batches of two layers, three matmuls each


def test_layers_at_the_ends_stay_in_16_bits() -> None:
    whole = flops_by_dtype(ledger_of("nvfp4", 8))["nvfp4"]
    ends = {"first_in_16_bits": 1, "last_in_16_bits": 2}
    assert flops_by_dtype(ledger_of("nvfp4", 8, precision=ends))["nvfp4"] * 8 == whole * 5
    every = {"first_in_16_bits": 8, "last_in_16_bits": 8}
    assert flops_by_dtype(ledger_of("nvfp4", 8, precision=every))["nvfp4"] == 0


def test_tensor_ranks_keep_their_own_columns_where_they_gather_again() -> None:
    def kept(gather: str) -> int:
        layout = {"tensor": 4, "sequence_parallel": True, "sequence_gather": gather}
        return of_a_layer("mxfp8", layout=layout, micro_batch=4)

    gathered = 2 * (4 * 1024) * D * BITS["mxfp8"] / 8  # of both norms
    assert kept("kept") - kept("again") == gathered * Fraction(3, 4)


MEGATRON = {
    "num-layers": "8", "hidden-size": "512", "num-attention-heads": "8", "seq-length": "1024",
    "max-position-embeddings": "1024", "micro-batch-size": "1", "global-batch-size": "8", "vocab-size": "1024",
    "bf16": "true",
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "kind", "ends"),
    [
        ({"fp8-format": "e4m3", "fp8-recipe": "mxfp8"}, "mxfp8", (0, 0)),
        ({"fp8-format": "e4m3", "fp8-recipe": "mxfp8", "first-last-layers-bf16": "true"}, "mxfp8", (1, 1)),
        ({"fp4-format": "e2m1"}, "nvfp4", (0, 0)),
        ({"fp4-format": "e2m1", "fp4-recipe": "nvfp4", "first-last-layers-bf16": "true",
          "num-layers-at-end-in-bf16": "3"}, "nvfp4", (1, 3)),
    ],
)  # fmt: skip
def test_arguments_of_megatron(flags: dict[str, str], kind: str, ends: tuple[int, int]) -> None:
    precision = load(from_arguments(Arguments(MEGATRON | flags), devices=8).table).recipe.precision
    assert (precision.kind, precision.weight_caching) == (kind, True)
    assert (precision.first_in_16_bits, precision.last_in_16_bits) == ends
