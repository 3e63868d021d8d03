"""Models of every kind: what their trace on fake tensors says, held against real steps and independent counters."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import csv

import pytest
import torch
import transformers
from tables import DOCS, plain
from zoo_compared import BEYOND, LIMITS, PRECISIONS, ZOO, Comparison, built, compare, kept_by, traced
from zoo_reasons import REASONS, differing

from trace_models import beyond_row, flops_row, memory_row

pytestmark = pytest.mark.agreement
transformers.utils.logging.set_verbosity_error()

# One of each way that matters, for every run of the tests; all of them are slow.
SAMPLE = [
    ("llama, padded", "fp32"), ("llama, checkpointed", "fp32"), ("bart", "fp32"), ("mixtral", "fp32"),
    ("llama with LoRA (peft)", "bf16"), ("convnext", "fp32"), ("swin", "bf16"), ("unet", "fp32"), ("gan", "fp32"),
    ("lstm and gru", "fp32"), ("graph network", "bf16"), ("own function, hooks, in place", "fp32"),
]  # fmt: skip
ALL = [(each.name, precision) for each in ZOO for precision in PRECISIONS]
OF_PAGE = f": torch {torch.__version__.partition('+')[0]}, "
NUMBER = 8  # bytes of a Python number made a tensor


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def holds(c: Comparison) -> None:
    """What is promised of every model."""
    assert c.ledger.partial == ""
    assert c.ledger.uncounted == ()
    assert abs(c.peak_error) <= LIMITS[c.precision], (c.specimen.name, c.ledger.peak().nbytes, c.truth.peak)
    assert abs(c.kept_error) <= LIMITS[c.precision], (c.specimen.name, kept_by(c.ledger), c.truth.kept)
    assert [(operator, key) for operator, key in differing(c) if not key] == []
    assert c.ledger.matmul_flops == sum(c.flops.values()) > 0


def keeps_exactly(c: Comparison) -> None:
    """Kept bytes as integers: what is left are Python numbers, made tensors below the dispatcher."""
    missing = c.truth.kept - kept_by(c.ledger)
    assert missing % NUMBER == 0
    assert 0 <= missing <= 16 * NUMBER, (c.specimen.name, missing)
    assert c.truth.saved <= kept_by(c.ledger)


of_this_cpu = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="what oneDNN's kernels take is known for AVX512"
)


@of_this_cpu
@pytest.mark.parametrize(("name", "precision"), SAMPLE)
def test_a_sample_is_within_its_limits(name: str, precision: str) -> None:
    holds(compare(name, precision))
    if name != "lstm and gru":  # whose workspace is fitted
        keeps_exactly(compare(name, precision))


@of_this_cpu
@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), ALL)
def test_every_model_is_within_its_limits(name: str, precision: str) -> None:
    holds(compare(name, precision))
    if name not in ("lstm and gru", "gan"):
        keeps_exactly(compare(name, precision))


def test_there_are_enough() -> None:
    assert len(ZOO) >= 25
    assert len({each.kind for each in ZOO}) >= 8
    assert len({each.name for each in (*ZOO, *BEYOND)}) == len(ZOO) + len(BEYOND)


@pytest.mark.parametrize("specimen", BEYOND, ids=lambda each: each.name)
def test_what_cannot_be_followed_is_said(specimen: object) -> None:
    ledger = traced(built(specimen), None)  # type: ignore[arg-type]
    assert ledger.partial or ledger.uncounted
    assert len(beyond_row(specimen)[2]) > 20


# The page


PAGE = (DOCS / "traced_models.md").read_text(encoding="utf-8")


def rows(table: str, *first: str) -> dict[str, list[str]]:
    """The rows of one table of the page that begin so, by model."""
    with open(DOCS / "tables" / f"{table}.csv", newline="", encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    return {line[len(first)]: line[len(first) :] for line in lines if line[: len(first)] == list(first)}


def test_the_page_has_every_model_and_each_within_its_limits() -> None:
    names = [each.name for each in ZOO]
    assert list(rows("traced_flops")) == names
    for precision, limit in LIMITS.items():
        table = rows("traced_memory", precision)
        assert list(table) == names
        for row in table.values():
            assert abs(float(row[3])) / 100 <= limit, row  # peak
            assert abs(float(row[6])) / 100 <= limit, row  # kept


def test_the_page_explains_every_ratio_but_one() -> None:
    for row in rows("traced_flops").values():
        *_, ratio, why = row
        keys = [each.strip() for each in why.split(",") if each.strip()]
        assert set(keys) <= set(REASONS)
        assert (float(ratio) == 1) == (not keys), row


def test_the_page_tells_what_a_sample_gives_today() -> None:
    """What is traced, to the byte; real runs of another machine may differ in what their kernels take."""
    for name, precision in SAMPLE:
        c = compare(name, precision)
        if OF_PAGE in PAGE:  # FlopCounterMode has formulas that other versions have not
            assert rows("traced_flops")[name] == [*map(plain, flops_row(c))]
        written, today = rows("traced_memory", precision)[name], [*map(plain, memory_row(c))]
        assert written[4] == today[4]  # kept, traced
        if torch.backends.cpu.get_cpu_capability() in PAGE:
            assert written[1] == today[1]  # peak, traced
