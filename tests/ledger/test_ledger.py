"""What a ledger can be asked."""

import pytest

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger

LAYERS, BATCHES = ("layers", 3), ("micro-batches", 2)


def small() -> Ledger:
    entries = (
        Entry("embedding", "embed", "forward", "embedding", read=64, written=64, kept=8, loop=(BATCHES,)),
        Entry("mm", "layers.*.up", "forward", "matmul", flops=100, model_flops=100, kept=16, loop=(BATCHES, LAYERS)),
        Entry("mm", "layers.*.up", "recompute", "matmul", flops=100, loop=(BATCHES, LAYERS)),
        Entry("mm", "layers.*.up", "backward", "matmul", flops=200, model_flops=200, loop=(BATCHES, LAYERS)),
        Entry("flash", "layers.*.attention", "forward", "attention", flops=7, model_flops=7, loop=(BATCHES, LAYERS)),
        Entry("adamw", "", "optimizer", "update", flops=1200, basis="assumed", read=10, written=20),
    )
    return Ledger(entries, parameters=100, tokens=64, micro_batches=2, writer="hand")


def test_times_is_the_product_of_the_loops() -> None:
    assert [each.times for each in small()] == [2, 6, 6, 6, 6, 1]


def test_totals_count_each_entry_as_often_as_it_runs() -> None:
    ledger = small()
    assert ledger.flops == ledger.total("flops") == 6 * (100 + 100 + 200 + 7) + 1200
    assert ledger.model_flops == 6 * (100 + 200 + 7)
    assert ledger.matmul_flops == 6 * (100 + 100 + 200 + 7)
    assert ledger.total("read") == 2 * 64 + 10
    assert ledger.total("written") == 2 * 64 + 20


def test_kept_bytes_are_those_of_one_micro_batch() -> None:
    assert small().kept_nbytes == 8 + 3 * 16


def test_by_splits_a_total() -> None:
    ledger = small()
    assert ledger.by("phase") == {"forward": 642, "recompute": 600, "backward": 1200, "optimizer": 1200}
    assert ledger.by("kind", "kept") == {"embedding": 16, "matmul": 96, "attention": 0, "update": 0}
    assert ledger.by("basis") == {"exact": 2442, "assumed": 1200}
    for key in ("phase", "kind", "path", "basis"):
        assert sum(ledger.by(key).values()) == ledger.flops


def test_by_path_takes_equal_blocks_together() -> None:
    entries = [Entry("mm", f"layers.{layer}.up", "forward", "matmul", flops=5) for layer in range(12)]
    assert Ledger(tuple(entries)).by("path") == {"layers.*.up": 60}


def test_filter_keeps_what_the_ledger_knows() -> None:
    matmuls = small().filter(lambda each: each.kind == "matmul")
    assert (len(matmuls), matmuls.flops) == (3, 2400)
    assert (matmuls.parameters, matmuls.tokens, matmuls.micro_batches, matmuls.writer) == (100, 64, 2, "hand")


def test_ledgers_add_up() -> None:
    ledger = small()
    forward = ledger.filter(lambda each: each.phase == "forward")
    rest = ledger.filter(lambda each: each.phase != "forward")
    assert (forward + rest).flops == ledger.flops
    assert len(forward + rest) == len(ledger)


def test_diff_says_where_two_ledgers_differ() -> None:
    ledger = small()
    assert ledger.diff(ledger) == {}
    without = ledger.filter(lambda each: each.phase != "recompute")
    assert ledger.diff(without, "phase") == {"recompute": 600}
    assert without.diff(ledger, "phase") == {"recompute": -600}
    assert ledger.diff(without, "path") == {"layers.*.up": 600}
    assert ledger.diff(without, "kind", "kept") == {}


def test_an_unknown_amount_is_an_error() -> None:
    with pytest.raises(ValueError):
        small().total("flopz")


def test_an_amount_that_no_entry_has_is_reported():
    for ask in (
        lambda: Ledger(()).total("flop"),
        lambda: Ledger(()).by("category"),
        lambda: Ledger(()).by("kind", "x"),
    ):
        with pytest.raises(ValueError, match="an entry has no"):
            ask()


def test_a_notebook_shows_its_sums_and_a_data_frame_takes_its_entries() -> None:
    ledger = small()
    page = ledger._repr_html_()
    assert "<table" in page
    assert all(each in page for each in ("matmul", "attention", "update"))
    rows = ledger.records()
    assert [row["flops"] * row["times"] for row in rows] == [each.flops * each.times for each in ledger]
    assert (rows[1]["path"], rows[1]["phase"]) == ("layers.*.up", "forward")
