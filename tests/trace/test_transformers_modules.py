"""transformers' own modules beside the closed form: what is equal is equal as integers, what is not is explained."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from collections import Counter
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers_compared import CONFIGS, Comparison, compare, config_of, step_of, traced
from transformers_modules import PAGE, page
from transformers_reasons import REASONS, reasons_of

from trainledger.ledger.ledger import Ledger
from trainledger.trace.fakes.rules import fake_rules
from trainledger.trace.fakes.tensors import make_states
from trainledger.trace.recorder.recorder import Recorder

pytestmark = pytest.mark.agreement
transformers.utils.logging.set_verbosity_error()
KINDS = sorted(CONFIGS)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of_other_sizes(kind: str) -> Comparison:
    return compare(kind, B=3, T=24, other=True)


def test_there_are_at_least_twelve_types() -> None:
    assert len(KINDS) >= 12


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_flops_are_equal(kind: str, other: bool) -> None:
    c = of_other_sizes(kind) if other else compare(kind)
    assert c.theirs.parameters == c.ours.parameters
    theirs, ours = c.theirs.by("kind"), c.ours.by("kind")
    assert theirs["matmul"] == ours["matmul"] > 0
    assert theirs.get("attention", 0) == ours.get("attention", 0)
    assert c.theirs.model_flops == c.ours.model_flops
    assert c.theirs.uncounted == c.ours.uncounted == ()


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_difference_of_kept_bytes_is_explained(kind: str, other: bool) -> None:
    c = of_other_sizes(kind) if other else compare(kind)
    for row in c.rows:
        assert sum(nbytes for _, nbytes in reasons_of(row)) == row.difference, (row.place, row.theirs, row.ours)
    assert sum(row.difference for row in c.rows) == c.kept
    assert sum(each.nbytes(c) for each in REASONS) == c.kept
    assert c.live_at_loss(c.theirs) - c.live_at_loss(c.ours) == c.kept + c.resident


def test_every_reason_is_some_types() -> None:
    assert [each.name for each in REASONS if not any(each.nbytes(compare(kind)) for kind in KINDS)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_peaks_differ_by_what_is_kept_and_resident(kind: str) -> None:
    c = compare(kind)
    more = c.kept + c.resident
    if c.same_place:
        assert c.peak == more
    else:
        peak = c.theirs.peak()
        assert "act" in peak.entry.path or "gelu" in peak.entry.path
        assert peak.entry.phase == "backward"
        assert 0 < c.peak - more <= peak.by_category["scratch"]


def test_only_where_gelu_is_written_out_is_the_peak_elsewhere() -> None:
    assert [kind for kind in KINDS if not compare(kind).same_place] == ["bloom", "gpt2", "gptj"]


def test_the_page_is_what_the_script_writes_today() -> None:
    written = PAGE.read_text(encoding="utf-8")
    this = torch.__version__.partition("+")[0]
    if f" with torch {this}:" not in written:
        pytest.skip(f"the page is of another torch than {this}; the other tests hold its rows for this one too")
    assert page([compare(kind) for kind in CONFIGS]).stale() == []


def really(config: object) -> Ledger:
    """The same step with real tensors, recorded as it runs."""
    with step_of(config) as (model, batch, loss, optimizer):
        make_states(model, optimizer)
        recorder = Recorder(model, optimizer)
        recorder.resident(list(batch.values()), "batch")

        def step() -> None:
            with recorder.phase("forward"):
                value = loss(model(**batch))
            with recorder.phase("backward"):
                value.backward()
            with recorder.phase("optimizer"):
                optimizer.step()

        with recorder:
            step()
        return recorder.ledger(tokens=batch["input_ids"].numel(), writer="measure")


@pytest.mark.parametrize("kind", KINDS)
def test_the_modules_run_on_fake_tensors_what_they_run_for_real(kind: str) -> None:
    fake, real = compare(kind).theirs, really(config_of(kind))
    assert facts(fake) == facts(real)
    assert fake.resident == real.resident
    assert fake.peak().by_category == real.peak().by_category
    assert freed(fake) == freed(real)


def facts(ledger: Ledger) -> list[tuple[object, ...]]:
    """What each operation does; when the results of a look at the values die is not compared."""
    return [
        (
            each.name, each.path, each.phase, each.kind, each.shape, each.flops, each.read, each.written, each.kept,
            each.allocated,
        )
        for each in ledger
    ]  # fmt: skip


def freed(ledger: Ledger) -> Counter[str]:
    """All that dies in the step, by category."""
    total: Counter[str] = Counter()
    for each in ledger:
        total.update(dict(each.freed))
    return total


def test_packed_sequences_would_be_seen() -> None:
    """What is undone for the trace matters: with transformers' own care, fake tensors get a mask."""
    undone = import_module("trainledger.trace.fakes.rules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(undone, "_packed", lambda find, position_ids: find(position_ids))
        careful = traced(config_of("llama"))
    assert careful.kept_nbytes > compare("llama").theirs.kept_nbytes


SHAPES = [((12, 8), (3, 8, 16)), ((8, 16), (16, 24)), ((3, 16, 8), (3, 8, 16)), ((3, 16, 8), (8, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", SHAPES)
def test_grouped_matmuls_of_fake_tensors_are_shaped_as_real_ones(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype
) -> None:
    def matmul() -> torch.Tensor:
        a, b = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        ends = None if a.dim() == b.dim() == 3 else torch.tensor([4, 8, 12], dtype=torch.int32)
        return F.grouped_mm(a, b, offs=ends)

    with FakeTensorMode(), fake_rules():
        fake = matmul()
    real = matmul()
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
