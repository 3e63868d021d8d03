"""The page of a profile: it opens offline, draws what there is, and has every kernel and matmul in its tables."""

import subprocess
import sys
from pathlib import Path

import pytest
from offline import CHROMIUM, opened

from trainledger.observe.profiler.profile import profile_of
from trainledger.report.draw.chart import svg

TRACES = Path(__file__).parents[2] / "observe" / "profiler" / "traces"
TRACE = TRACES / "h100_qwen_forward.json.gz"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here, so the page was not looked at")


def written(folder: Path, *words: str) -> Path:
    command = [sys.executable, "-m", "trainledger", "reconcile", *words, "--html", str(folder / "step.html")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "step.html"


@needs_chromium
def test_it_opens_offline_and_draws_four_figures(tmp_path):
    page = written(tmp_path, "--trace", str(TRACE))
    shown, asked = opened(page, tmp_path / "chromium")
    assert asked == []
    assert "<script" not in shown
    assert shown.count("<figure>") == 4
    assert shown.count("<svg") >= 8
    for title in ("Where step 6 goes", "What runs when in step 6", "The matmuls of step 6", "Memory over step 6"):
        assert title in shown
    found = profile_of(TRACE)
    for each in found.matmuls:
        assert each.shape in shown
    assert shown.count("<td>elementwise</td>") >= len([each for each in found.kernels if each.kind == "elementwise"])


@needs_chromium
def test_two_traces_and_ranks_are_pages_too(tmp_path):
    other = TRACES / "mi300_resnet_checkpointed_ddp8.json.gz"
    shown, asked = opened(written(tmp_path, "--trace", str(TRACE), "--against", str(other)), tmp_path / "chromium")
    assert asked == []
    assert shown.count("<figure>") == 2
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "rank0.json.gz").write_bytes(other.read_bytes())
    shown, asked = opened(written(tmp_path, "--trace", str(folder)), tmp_path / "chromium")
    assert asked == []
    assert "Kernels of rank 0" in shown


def test_pieces_of_the_step_sum_to_its_parts():
    for path in sorted(TRACES.glob("*.json.gz")):
        found = profile_of(path)
        assert {part: sum(each) for part, each in found.pieces.items()} == dict(found.step.parts_ns)
        together = [sum(each) for each in zip(*found.pieces.values(), strict=True)]
        assert max(together) - min(together) <= 2
        assert all(svg(each) for each in found.document().figures())
