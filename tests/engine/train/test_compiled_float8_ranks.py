"""Ranks whose compiled blocks multiply in 8 bits, torchtitan's recipe: the closed form against the trace."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch._inductor.ir
from test_compiled_ranks import AGAIN, SELECTIVE, run_of
from test_fake_worlds import program_of
from test_parallel_ranks import Case, ledgers_by_rank

from trainledger.trace.distributed import trace_rank

pytestmark = [
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
    ),
    pytest.mark.skipif(torch.__version__ < "2.12", reason="matmuls in 8 bits with a scale per row run on CPUs since"),
    pytest.mark.slow,
]
TENSORWISE, ROWWISE = ({"precision": f"fp8-{each}-sharded"} for each in ("tensorwise", "rowwise"))
CASES: dict[str, Case] = {
    "fsdp": ({"shard": 2}, {}, TENSORWISE),
    "fsdp, checkpointed": ({"shard": 2}, {}, {**AGAIN, **TENSORWISE}),
    "fsdp, selective": ({"shard": 2}, {}, {**SELECTIVE, **TENSORWISE}),
    "fsdp, selective, rows": ({"shard": 2}, {"attention.n_kv_heads": 2}, {**SELECTIVE, **ROWWISE}),
    "ddp": ({"replicate": 2}, {}, {"precision": "fp8-tensorwise"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_in_8_bits_is_what_the_closed_form_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.ir, "is_cpu", lambda x: False)  # as on GPUs: see test_compiled_float8.py
    run = run_of(CASES[name])
    traced, closed = trace_rank(program_of(run), world_size=2), ledgers_by_rank(run)[0]
    assert not traced.partial
    assert (traced.notes, traced.uncounted, closed.notes) == ((), (), ())
    assert traced.kept_nbytes == closed.kept_nbytes
    assert closed.peak().nbytes == pytest.approx(traced.peak().nbytes, rel=0.025)
