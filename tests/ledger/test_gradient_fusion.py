"""Weight gradients that matmuls add up: what is not allocated any more, and Transformer Engine's stand-ins, by hand."""

from typing import Any

import pytest

from trainledger.answers.load import load
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import accounts
from trainledger.spec.convert.megatron import from_arguments
from trainledger.spec.convert.megatron.arguments import Arguments
from trainledger.spec.problem import InvalidInput

D, F, KV, V = 512, 2048, 128, 1024
MEGATRON = {"kind": "bf16", "master_weights": True, "gradient_dtype": "fp32"}


def ledger_of(*, fused: bool, layers: int = 2, **fields: Any) -> Ledger:
    table: dict[str, Any] = {
        "model": {
            "vocab_size": V, "d_model": D, "n_layers": layers, "max_seq_len": 64,
            "attention": {"n_heads": 8, "n_kv_heads": 2}, "feed_forward": {"d_ff": F}, **fields.pop("model", {}),
        },
        "recipe": {
            "seq_len": 64, "micro_batch": 1, "global_batch": 2, "steps": 1, "framework": "megatron-core",
            "attention": "flash", "precision": MEGATRON, "gradient_fusion": fused, **fields,
        },
        "cluster": {"device": "h100-sxm", "count": 1},
    }  # fmt: skip
    return accounts(load(table), backend="cuda")[0].ledger


def stand_ins(ledger: Ledger) -> int:
    return dict(ledger.resident).get("stand-ins of gradients", 0)


def test_one_stand_in_for_each_shape_whatever_the_layers() -> None:
    """Queries, keys and values are one matrix of Megatron Core; so are gate and up."""
    shapes = {(D + 2 * KV, D), (D, D), (2 * F, D), (D, F)}
    by_hand = 2 * sum(rows * columns for rows, columns in shapes)
    assert stand_ins(ledger_of(fused=True)) == stand_ins(ledger_of(fused=True, layers=8)) == by_hand
    assert stand_ins(ledger_of(fused=False)) == 0


def test_equal_shapes_share_one() -> None:
    alike = {"attention": {"n_heads": 8}, "feed_forward": {"d_ff": D, "gated": False, "activation": "gelu"}}
    assert stand_ins(ledger_of(fused=True, model=alike)) == 2 * (3 * D * D + D * D)


def test_gradients_of_blocks_are_not_allocated_and_the_flops_are_the_same() -> None:
    fused, apart = ledger_of(fused=True), ledger_of(fused=False)
    assert sum(e.flops * e.times for e in fused if e.kind == "matmul") == sum(
        e.flops * e.times for e in apart if e.kind == "matmul"
    )
    assert {e.dtype for e in fused if e.kind == "matmul"} == {e.dtype for e in apart if e.kind == "matmul"}

    def of_blocks(ledger: Ledger, name: str) -> int:
        return sum(e.times for e in ledger if e.phase == "backward" and e.name == name and "layers" in e.path)

    matrices = 2 * 2 * 7  # micro-batches, layers, q k v o gate up down
    assert of_blocks(apart, "add_") - of_blocks(fused, "add_") == matrices
    written = [e for e in fused if e.phase == "backward" and e.name == "mm" and "layers" in e.path and not e.allocated]
    assert sum(e.times for e in written) == matrices


@pytest.mark.parametrize(
    "fields",
    [{"framework": "torch"}, {"precision": {"kind": "bf16", "master_weights": True}}, {"framework": "megatron-local"}],
)
def test_other_programs_have_none(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"gradient_fusion = true: is Transformer Engine's"):
        ledger_of(fused=True, **fields)


def test_megatron_fuses_unless_its_arguments_say_otherwise() -> None:
    flags = {
        "num-layers": "2", "hidden-size": "64", "num-attention-heads": "4", "seq-length": "64", "vocab-size": "256",
        "max-position-embeddings": "64", "micro-batch-size": "1", "global-batch-size": "8", "bf16": "true",
    }  # fmt: skip
    off = {"no-gradient-accumulation-fusion": "true"}
    for more, fuses in (({}, True), (off, False), ({"transformer-impl": "local"}, False)):
        read = from_arguments(Arguments(flags | more), devices=8)
        assert read.table["recipe"].get("gradient_fusion", False) == fuses, more
