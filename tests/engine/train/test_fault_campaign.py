"""A short form of bench/faults.py: some kills of each kind of run, nothing lost and the same bits in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
BENCH = Path(__file__).resolve().parents[3] / "bench"
# In a process of its own, which forks: pytest's has threads.
CAMPAIGN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from faults import run_campaign, total
met = run_campaign(Path(sys.argv[1]), sys.argv[2:], len(sys.argv) - 2, seed=3, seconds=400, tell=lambda *kind: None)
print(json.dumps(asdict(total(met))))
"""


def test_a_kill_of_each_kind_of_run(tmp_path: Path) -> None:
    kinds = ["one process", "gradient accumulation", "asynchronous saves", "FSDP2 on 2", "2 pipeline stages"]
    command = [sys.executable, "-c", CAMPAIGN, str(tmp_path / "runs"), *kinds]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    met = json.loads(done.stdout.splitlines()[-1])
    assert met["kills"] >= len(kinds)
    wrong = ("failed_resumes", "damaged", "other_weights", "notes")
    assert {name: met[name] for name in wrong} == {
        "failed_resumes": 0,
        "damaged": 0,
        "other_weights": 0,
        "notes": [],
    }, done
