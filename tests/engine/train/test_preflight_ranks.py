"""Preflight of two real ranks: what differs, memory and disk are said once, and a collective is timed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import commanded
import pytest

import trainledger

pytestmark = pytest.mark.process


def trained(folder: Path, *words: str, source: str = "", steps: int = 2) -> subprocess.CompletedProcess[str]:
    """`train --ranks 2` in a folder, rank 1 with the package of ``source`` where one is given."""
    commanded.write(folder, layout="shard = 2", ranks=2, steps=steps, every=2)
    environment = {"OTHER_SOURCE": source}
    if source:  # a module that Python loads before all others
        (folder / "sitecustomize.py").write_text(
            "import os, sys\nif os.environ.get('RANK') == '1':\n    sys.path.insert(0, os.environ['OTHER_SOURCE'])\n"
        )
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(Path(trainledger.__file__).parent.parent)])
    process = commanded.start(folder, *words, ranks=2, environment=environment)
    return subprocess.CompletedProcess(process.args, *commanded.end(process))


def test_a_collective_goes_through_and_is_timed(tmp_path: Path) -> None:
    done = trained(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        len(
            re.findall(
                r"An all-reduce of [\d.]+ \w+ over 2 ranks took [\d.]+ \w+: [\d.]+ \w+/s for each\.", done.stderr
            )
        )
        == 1
    )
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert not (run_dir / "preflight.json").exists()


def test_other_code_on_a_rank_is_said_once_and_not_started_again(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(trainledger.__file__).parent, other / "trainledger")
    with (other / "trainledger" / "units.py").open("a") as file:
        file.write("# another version\n")
    done = trained(tmp_path, source=str(other))
    assert done.returncode == 2, done.stderr
    first = [each for each in done.stderr.splitlines() if "on rank 1 (" in each and "Not started again" not in each]
    assert len(first) == 1
    assert re.search(r"trainledger: is [\w.]+ \(\w{12}\) on rank 1 \(.*\), and .* on rank 0 ", first[0])
    again = trained(tmp_path, "--no-preflight", source=str(other))
    assert again.returncode == 0, again.stderr


def test_a_disk_that_is_too_small_is_said_once(tmp_path: Path) -> None:
    keep = ("--set", "recipe.checkpoints.every=1", "--set", "recipe.checkpoints.keep_last=100000000")
    done = trained(tmp_path, *keep, steps=10**8)
    assert done.returncode == 4, done.stderr
    assert len(re.findall(r"^The disk of .* has .* left", done.stderr, re.MULTILINE)) == 1
