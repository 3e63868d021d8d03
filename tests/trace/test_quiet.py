"""torch's own log of what fake tensors refuse: kept back while a trace says it itself, and only then."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.trace.recorder.source_lines import quiet_fake_errors

pytestmark = pytest.mark.torch

LOGGER = "torch._subclasses.fake_tensor"


def refused() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"must have same reduction dim|mat1"):
        torch.ops.aten.mm.default(torch.empty(2, 7), torch.empty(8, 8))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger(LOGGER), "handlers", [Handler()])
    return lines


def test_the_line_is_kept_back_and_no_other(told: list[str]) -> None:
    before = list(logging.getLogger(LOGGER).filters)
    refused()
    assert told
    assert all("failed while attempting to run meta for aten.mm" in each for each in told)
    told.clear()
    with quiet_fake_errors():
        refused()
        logging.getLogger(LOGGER).error("another line")
    assert told == ["another line"]
    assert logging.getLogger(LOGGER).filters == before


def test_nothing_stays_behind_after_an_error() -> None:
    before = list(logging.getLogger(LOGGER).filters)
    with pytest.raises(ZeroDivisionError), quiet_fake_errors():
        raise ZeroDivisionError
    assert logging.getLogger(LOGGER).filters == before
