"""A recorded step of a rank in a loop of several: its ledger beside the closed form of the same run."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import trainledger as tl
from ports import free_ports
from trainledger.answers.pages.record import read_run
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.parts import with_fields
from trainledger.spec.run import Run

pytestmark = pytest.mark.process


@pytest.mark.parametrize("way", ["replicate", "shard"])
def test_a_recorded_step_of_a_rank_is_what_its_account_says(tmp_path, way):
    from rank_loop import RECIPE, SPEC

    program = Path(__file__).with_name("rank_loop.py")
    (port,) = free_ports(1)
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "run"), str(rank), str(port), way], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = [each.communicate()[1] for each in processes]
    assert [each.returncode for each in processes] == [0, 0], said
    found = read_run(tmp_path / "run").measured_ledger
    run = Run(
        model=SPEC, recipe=RECIPE, layout=with_fields(Layout(), {way: 2}), cluster=with_fields(Cluster(), {"count": 2})
    )
    account = tl.account(run)
    assert found.matmul_flops == account.matmul_flops
    assert found.model_flops == account.model_flops
    assert found.kept_nbytes == account.kept_nbytes
    assert found.peak().nbytes == pytest.approx(account.peak().nbytes, rel=0.01)
    sent = [
        Counter(
            (each.phase, each.name, each.payload)
            for each in ledger
            for _ in range(each.times)
            if each.kind == "collective" and each.phase != "clip" and each.name != "broadcast"  # DDP sends buffers
        )
        for ledger in (found, account)
    ]
    assert sent[0] == sent[1]
    assert sent[0]
